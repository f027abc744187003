"""Checkpoints of ZeRO 1 and 2 with `round_robin_gradients`: upstream's `param_slice_mappings` has wrong addresses."""

from pathlib import Path

import pytest
import torch

import universal
from ckpt_patches.audit.audit import WHOLE, audit
from ckpt_patches.convert.zero_fingerprints import read
from ckpt_patches.fingerprint.states import Fingerprint
from upstream import releases
from zero_checkpoints import KEYS
from zero_resumes import trained

CASES = ("stage1_round_robin-2", "stage2_round_robin-2")
STEP = "global_step2"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("version", releases("deepspeed"))
def test_existing_files_are_read_in_the_order_in_which_the_optimizer_wrote_them(
    version: str, ranks: int, tmp_path: Path
) -> None:
    """The audit accepts the files, converted states equal the optimizers' memory, and all have fingerprints."""
    saved = trained(version, "none", *CASES, ranks=ranks)
    for case in CASES:
        report = audit(saved / case / STEP)
        assert (report.verdict, [f for f in report.findings if f.kind.severity != "note"]) == (WHOLE, [])
        truth = torch.load(saved / case / "truth.pt", weights_only=False)["saved"]
        output = tmp_path / case
        universal.ours(saved / case / STEP, output, "--inject_missing_state")
        names = [name.removesuffix(".fp32") for name in truth if name.endswith(".fp32")]
        wrong = [
            f"{name} {key}"
            for name in names
            for key in KEYS
            if not universal.value_of(output / "zero" / name / f"{key}.pt").equal(truth[f"{name}.{key}"])
        ]
        assert (wrong, len(names)) == ([], 7)
        found: list[Fingerprint] = read(saved / case / STEP, trust=True)[0]
        assert len(found) >= len(names) * len(KEYS)
