"""Read the record of the run that saved a checkpoint. Needs neither torch nor NumPy."""

from pathlib import Path
from typing import Any

from ckpt_patches.fingerprint.record import STEP, of_step
from ckpt_patches.formats import torch_dist, torch_file
from ckpt_patches.formats.recorded import KEY
from ckpt_patches.formats.zero import MODEL


def of_megatron(path: Path) -> Any:
    """The record in the common state of a distributed checkpoint, or None.

    Raises:
        BadFileError, NotReadError: the common state cannot be read.
    """
    index = torch_dist.read_index(path) if (path / torch_dist.INDEX).exists() else torch_dist.Index({}, {})
    if not (path / torch_dist.COMMON).exists() and torch_dist.COMMON_OBJECT not in index.objects:
        return None  # for example a save by torch alone
    common = torch_dist.read_common(path, index)
    return common.get(KEY) if isinstance(common, dict) else None


def of_deepspeed(path: Path) -> Any:
    """The record in the model states of a ZeRO or a universal checkpoint; all model-states files have the same one.

    Raises:
        BadFileError, NotReadError: the model states cannot be read.
    """
    for file in sorted(file for file in path.glob("*model_states.pt") if MODEL.fullmatch(file.name))[:1]:
        value = torch_file.read(file, trust=True).value  # runs no code
        return of_step(value.get(KEY), value.get(STEP)) if isinstance(value, dict) else None
    return None
