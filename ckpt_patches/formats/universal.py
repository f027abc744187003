"""DeepSpeed's universal checkpoints: `zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`, each the whole array.

Beside `zero/` lie the model-states files of the ZeRO checkpoint. A file holds a tensor, as stage 3's do, or a dict with
it under "param" and what is to be done with it at another tensor-parallel size.
https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

from pathlib import Path
from typing import Any

from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.formats.zero import STATES

FOLDER = "zero"
VOCABULARY = "vocab_tensor"  # in a file's dict: the array's rows are tokens, without padding


def state_file(parameter: str, state: str) -> str:
    """The name of a state's file in the checkpoint's folder; `state` is one of zero.STATES, or "step"."""
    return f"{FOLDER}/{parameter}/{state}.pt"


def is_universal(path: Path) -> bool:
    zero = path / FOLDER
    folders = list(zero.iterdir()) if zero.is_dir() else []
    return any((path / state_file(folder.name, key)).exists() for folder in folders for key in STATES)


def parameters(path: Path) -> list[str]:
    """Those that have a folder."""
    return sorted(folder.name for folder in (path / FOLDER).iterdir() if folder.is_dir())


def tensor_of(value: Any) -> TensorHeader | None:
    """The array in what a state's file holds."""
    found = value.get("param") if isinstance(value, dict) else value
    return found if isinstance(found, TensorHeader) else None
