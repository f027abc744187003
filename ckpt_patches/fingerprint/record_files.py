"""Read the record of the run that saved a checkpoint. Needs neither torch nor NumPy."""

from pathlib import Path
from typing import Any

from ckpt_patches.fingerprint.record import STEP, of_step
from ckpt_patches.formats import torch_file
from ckpt_patches.formats.recorded import KEY
from ckpt_patches.formats.zero import MODEL


def of_deepspeed(path: Path) -> Any:
    """The record in the model states of a ZeRO or a universal checkpoint; all model-states files have the same one.

    Raises:
        BadFileError, NotReadError: the model states cannot be read.
    """
    for file in sorted(file for file in path.glob("*model_states.pt") if MODEL.fullmatch(file.name))[:1]:
        value = torch_file.read(file, trust=True).value  # runs no code
        return of_step(value.get(KEY), value.get(STEP)) if isinstance(value, dict) else None
    return None
