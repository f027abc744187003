"""Checkpoints of torch.distributed.checkpoint in the layouts of TorchTitan and Lightning, audited.

Their own code saved the same with torch 2.13: TorchTitan 0.3.0, Lightning 2.6.6. verl's layout is in
test_audit_fsdp_ranks.py, Accelerate's are in test_audit_dcp.py ("folders") and test_audit_safetensors.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, WHOLE, audit
from test_audit_dcp import names
from test_fingerprint_dcp_files import Model, flattened, saved, training


def torchtitan(folder: Path, model: Model, optimizer: Model) -> Path:
    """The weights at the top, beside a flattened optimizer, a scheduler and the trainer's step."""
    state = {
        **model,
        "optimizer": flattened(optimizer),
        "lr_scheduler": {"last_epoch": 3, "_step_count": 4},
        "train_state": {"step": torch.tensor(3)},
    }
    return saved(folder / "step-3", state)


def lightning(folder: Path, model: Model, optimizer: Model) -> Path:
    """The weights and the optimizers of a list; all else is in a file of torch."""
    path = saved(folder / "step_3", {"state_dict": model, "optimizer_0": optimizer})
    torch.save({"epoch": 0, "global_step": 3, "lr_schedulers": [], "loops": {}}, path / "meta.pt")
    return path


@pytest.mark.parametrize("save", [torchtitan, lightning])
def test_a_sound_save_is_whole_and_damage_in_it_is_found(save: Callable[..., Path], tmp_path: Path) -> None:
    model, optimizer, _ = training()
    report = audit(save(tmp_path, model, optimizer))
    assert (report.verdict, names(report), report.checkpoint.step) == (WHOLE, set(), 3)
    assert report.checkpoint.format == "torch.distributed.checkpoint"
    optimizer["state"]["0.weight"]["exp_avg"][0, 0] = torch.nan
    path = save(tmp_path / "damaged", model, optimizer)
    assert (audit(path).verdict, names(audit(path))) == (DAMAGED, {"not_finite"})
    next(path.glob("*.distcp")).unlink()
    assert audit(path).verdict == DAMAGED
