"""The files of a run's folder that name a save.

DeepSpeed writes the name of a folder to `latest` (its converter: to `latest_universal`). Megatron writes an iteration,
which stands for the folder `iter_0000010`, or the word `release` to `latest_checkpointed_iteration.txt`, and
Megatron-Bridge the state of the training to `latest_train_state.pt`. verl writes Megatron's file for the folder
`global_step_10`, which has a checkpoint for each trained model.
"""

import re
from pathlib import Path
from typing import NamedTuple

from ckpt_patches.errors import UserError
from ckpt_patches.formats import tensor_streams, torch_file

MEGATRON_TRACKER, BRIDGE_TRACKER = "latest_checkpointed_iteration.txt", "latest_train_state.pt"
TRACKERS = ("latest", "latest_universal", MEGATRON_TRACKER, BRIDGE_TRACKER)
LONGEST_NAME = 255  # bytes, of a folder's name and of a tracker's content
OF_VERL = re.compile(r"global_step_\d{1,15}")


class Tracker(NamedTuple):
    """A file that names a checkpoint."""

    path: Path
    names: Path | None  # the folder; None if the file names no folder


def trackers(path: Path) -> list[Tracker]:
    """The trackers in a folder."""
    return [Tracker(path / name, named_in(path / name)) for name in TRACKERS if (path / name).is_file()]


def named_in(file: Path) -> Path | None:
    """The folder that a tracker names; it need not exist. None if it names none."""
    if file.name == BRIDGE_TRACKER:
        return _named_by_bridge(file)
    with file.open("rb") as opened:
        text = opened.read(LONGEST_NAME + 2)
    name = text.decode("utf-8", "replace").strip()
    if file.name == MEGATRON_TRACKER and name.isdecimal():
        of_verl = any(OF_VERL.fullmatch(entry.name) for entry in file.parent.iterdir())
        name = f"global_step_{int(name)}" if of_verl else f"iter_{int(name):07d}"
    is_name = name not in ("", ".", "..") and len(text) <= LONGEST_NAME + 1 and name.isprintable() and "/" not in name
    return file.with_name(name) if is_name else None


def _named_by_bridge(file: Path) -> Path | None:
    """The folder of the step in Megatron-Bridge's training state, a dict of tensors."""
    try:
        state = torch_file.read(file).value
        step = tensor_streams.scalar(file, state.get("step")) if isinstance(state, dict) else None
    except (UserError, OSError):
        return None
    return file.with_name(f"iter_{int(step):07d}") if step is not None and 0 <= step < 1 << 53 else None
