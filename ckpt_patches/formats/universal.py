"""DeepSpeed's universal checkpoints: `zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`, each a full array.

Optimizers other than Adam have other states than `exp_avg` and `exp_avg_sq`.

The model-states files of the ZeRO checkpoint are beside `zero/`. A state's file holds a tensor (stage 3), or a dict
with the tensor under "param" and how to convert it for another tensor-parallel size.
https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

from pathlib import Path
from typing import Any

from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.formats.zero import MASTER, NAME

FOLDER = "zero"
VOCABULARY = "vocab_tensor"  # key in a file's dict: the array's rows are tokens, without padding


def state_file(parameter: str, state: str) -> str:
    """The name of a state's file in the checkpoint's folder."""
    return f"{FOLDER}/{parameter}/{state}.pt"


def is_universal(path: Path) -> bool:
    """Whether a parameter below `zero/` has the states that the converter writes. A run can have the name `zero`."""
    zero = path / FOLDER
    folders = zero.iterdir() if zero.is_dir() else ()
    return any((folder / f"{state}.pt").exists() for folder in folders for state in (MASTER, "exp_avg", "exp_avg_sq"))


def parameters(path: Path) -> list[str]:
    """The parameters that have a folder."""
    return sorted(folder.name for folder in (path / FOLDER).iterdir() if folder.is_dir())


def states(path: Path, parameter: str) -> list[str]:
    """The states that a parameter has files for, the main parameter first. The step is not included."""
    folder = path / FOLDER / parameter
    names = sorted(file.stem for file in folder.iterdir() if file.suffix == ".pt") if folder.is_dir() else []
    return sorted((name for name in names if NAME.fullmatch(name) and name != "step"), key=lambda name: name != MASTER)


def tensor_of(value: Any) -> TensorHeader | None:
    """The tensor in the value of a state's file, if any."""
    found = value.get("param") if isinstance(value, dict) else value
    return found if isinstance(found, TensorHeader) else None
