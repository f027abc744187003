"""What the tests of the audit share: verdicts, copies of checkpoints, and changes of torch's files."""

import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ckpt_patches.audit.audit import Report, audit
from ckpt_patches.formats import damages, torch_file, torch_writer

Change = Callable[[Path], object]  # of a checkpoint, in place


def names(report: Report, *, notes: bool = False) -> set[str]:
    """The names of a report's findings."""
    return {finding.kind.name for finding in report.findings if notes or finding.kind.severity != damages.NOTE}


def found_in(path: Path) -> tuple[str, set[str]]:
    """The verdict, and the names of the findings that are no notes."""
    report = audit(path, workers=1)
    assert not [finding for finding in report.findings if "a defect of the audit" in finding.detail]
    return report.verdict, names(report)


def copied(path: Path, to: Path) -> Path:
    return Path(shutil.copytree(path, to / path.name))


def change(path: Path, make: Callable[[Any], object]) -> None:
    """Load a file with torch, change its value, and save it."""
    value = torch.load(path, weights_only=False)
    make(value)
    torch.save(value, path)


def without(*patterns: str) -> Change:
    """Remove files and folders."""

    def remove(path: Path) -> None:
        for pattern in patterns:
            for own in list(path.glob(pattern)):
                shutil.rmtree(own) if own.is_dir() else own.unlink()

    return remove


def both(*changes: Change) -> Change:
    def apply(path: Path) -> None:
        for own in changes:
            own(path)

    return apply


def _rewritten(path: Path, pickled: Callable[[bytes], bytes]) -> Path:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, pickled(content) if name.endswith("data.pkl") else content)
    return path


def with_other_name(path: Path, old: bytes, new: bytes) -> Path:
    """Replace bytes in the file's pickle, with correct checksums."""
    return _rewritten(path, lambda content: content.replace(old, new))


def with_other_value(path: Path, change: Callable[[Any], object]) -> Path:
    """Apply `change` to the file's value, in place; the bytes of its tensors and their checksums stay.

    Objects of classes are stubs: nothing of the package that saved them is needed.
    """
    value = torch_file.read(path, trust=True).value
    change(value)
    return _rewritten(path, lambda _: torch_writer.pickled(value))


def held(value: Any) -> Any:
    """The attributes of a stub, or the value itself."""
    return value.fields if isinstance(value, torch_file.Instance) else value


def keys(value: Any, as_one: tuple[str, ...] = (), path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every entry of every dictionary and list, at any depth; `as_one`: not below these keys."""
    own = held(value)
    entries = own.items() if isinstance(own, dict) else enumerate(own) if isinstance(own, list) else ()
    for name, item in list(entries):
        yield (*path, name)
        if name not in as_one and not isinstance(item, torch_file.TensorHeader):
            yield from keys(item, as_one, (*path, name))


def delete(value: Any, path: tuple[Any, ...]) -> None:
    for part in path[:-1]:
        value = held(value)[part]
    del held(value)[path[-1]]
