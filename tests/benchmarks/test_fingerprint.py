"""Compare a fingerprint's time with that of the save that it is for (`make bench`)."""

import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpt_patches import fingerprint


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_beside_dcp_save(device: str, tmp_path: Path) -> None:
    """A model of 256 MiB with Adam's states: the fingerprint of all of it, and a save to a local disk."""
    model = torch.nn.Linear(1 << 13, 1 << 13, bias=False, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1 << 13, device=device)).sum().backward()
    optimizer.step()
    pairs = []
    for number in range(6):
        saved = seconds(
            partial(
                dcp.save,
                dict(zip("mo", get_state_dict(model, optimizer), strict=True)),
                checkpoint_id=tmp_path / str(number),
            )
        )
        shutil.rmtree(tmp_path / str(number))
        pairs.append((seconds(lambda: fingerprint.of_training(model, optimizer)), saved))
    share = statistics.median(one / other for one, other in pairs[1:])
    print(f"\n{device}: fingerprint in {share:.1%} of the time of dcp.save (figure to reach: 5 %)")
