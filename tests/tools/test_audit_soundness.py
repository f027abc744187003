"""No checkpoint of any format is called WHOLE while a tensor has NaN, with a correct checksum.

`damage_kinds.py` has the other values: zeros, another run's elements, and moved ones.
"""

import math
import shutil
from pathlib import Path

import pytest
import torch

from ckpt_patches.audit.audit import UNKNOWN, WHOLE, audit
from crafted_files import names
from every_checkpoint import EVERY, put, tensors
from upstream import all_releases

FLOATS = ("float32", "float64", "bfloat16", "float16")


@pytest.mark.parametrize("name", [name for name, kind in EVERY.items() if kind.default or all_releases()])
def test_nan_in_any_tensor_is_not_called_whole(name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EVERY[name].path, tmp_path / "checkpoint"))
    report = audit(folder, workers=1)
    may_be_odd = {"odd_in_bucket"} if name.endswith("buckets") else set()  # their padding is not initialized
    assert names(report) <= may_be_odd
    assert report.verdict == WHOLE or (report.verdict == UNKNOWN and may_be_odd)
    # Padding has no meaning: a partition of zeros alone, or at stage 3 the part of a bias that only rank 0 has.
    places = [place for place in tensors(folder) if place.dtype in FLOATS and any(place.data())]
    places = [place for place in places if not name.startswith("stage 3") or "rank_0_" in place.path.name]
    assert len(places) > 2
    missed = []
    for place in places if all_releases() else places[:: max(len(places) // 12, 1)]:
        before = place.path.read_bytes()
        one = torch.tensor([math.nan], dtype=getattr(torch, place.dtype)).view(torch.uint8).numpy().tobytes()
        put(place, one)
        if audit(folder, workers=1).verdict == WHOLE:
            missed.append(f"{place.path.name} {place.name} {place.first}")
        place.path.write_bytes(before)
    assert missed == []
