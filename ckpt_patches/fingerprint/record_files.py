"""Where checkpoints have the record of the run that saved them. It needs neither torch nor NumPy."""

from pathlib import Path
from typing import Any

from ckpt_patches.fingerprint.record import KEY, STEP, of_step
from ckpt_patches.formats import torch_dist, torch_file
from ckpt_patches.formats.zero import MODEL


def of_megatron(path: Path) -> Any:
    """What is in the common state of a distributed checkpoint; None where nothing is.

    Raises:
        BadFileError, NotReadError: the common state cannot be read.
    """
    index = torch_dist.read_index(path) if (path / torch_dist.INDEX).exists() else torch_dist.Index({}, {})
    if not (path / torch_dist.COMMON).exists() and torch_dist.COMMON_OBJECT not in index.objects:
        return None  # as of a save by torch alone
    common = torch_dist.read_common(path, index)
    return common.get(KEY) if isinstance(common, dict) else None


def of_deepspeed(path: Path) -> Any:
    """What is in the model states of a ZeRO or a universal checkpoint, which all have the same.

    Raises:
        BadFileError, NotReadError: they cannot be read.
    """
    for file in sorted(file for file in path.glob("*model_states.pt") if MODEL.fullmatch(file.name))[:1]:
        value = torch_file.read(file, trust=True).value  # runs nothing
        return of_step(value.get(KEY), value.get(STEP)) if isinstance(value, dict) else None
    return None
