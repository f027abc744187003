"""Change files of torch.save into files that only a later torch, or an attacker, would write."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_patches.formats import torch_file, torch_writer


def with_other_name(path: Path, old: bytes, new: bytes) -> Path:
    """Replace bytes in the file's pickle, with correct checksums."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content.replace(old, new) if name.endswith("data.pkl") else content)
    return path


def with_other_value(path: Path, change: Callable[[Any], Any]) -> Path:
    """Apply `change` to the file's value, in place; the bytes of its tensors and their checksums stay."""
    value = torch_file.read(path, trust=True).value
    change(value)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, torch_writer.pickled(value) if name.endswith("/data.pkl") else content)
    return path
