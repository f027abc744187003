"""The list, in a checkpoint that was repaired, of the elements that were: reset moments look like lost ones.

It is bound to the files that hold these elements, by their sizes and checksums. Of other files it says nothing.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_patches.audit import damages
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.ranges import Range, joined
from ckpt_patches.audit.readers.checkpoint import Checkpoint
from ckpt_patches.errors import UserError
from ckpt_patches.formats.checksum import crc32
from ckpt_patches.formats.paths import path_within
from ckpt_patches.runtime.durable import write_durably

NAME = "ckpt-patches-repaired.json"
SCHEMA = 2
AT_A_TIME = 1 << 24  # bytes

Key = tuple[str, str]  # array and shard


@dataclass
class Repaired:
    """What was repaired in a checkpoint, in all repairs of it."""

    ranges: dict[Key, list[Range]] = field(default_factory=dict)  # elements of the shard
    sources: dict[Key, str] = field(default_factory=dict)  # what the last repair took
    files: dict[str, tuple[int, int]] = field(default_factory=dict)  # by name in the folder: size, checksum
    moved: list[dict[str, Any]] = field(default_factory=list)  # for people: what of a shifted state came from where
    copied: list[dict[str, Any]] = field(default_factory=list)  # for people: which files were made of which

    def add(self, key: Key, ranges: list[Range], source: str) -> None:
        """Elements that were repaired; those of an earlier repair stay."""
        self.ranges[key] = joined([*self.ranges.get(key, []), *ranges])
        self.sources[key] = source

    def elements(self, key: Key) -> int:
        return sum(end - begin for begin, end in self.ranges[key])


def read(found: Checkpoint) -> Repaired:
    """The list of a checkpoint; an empty one where there is none, or it is of other files, which is a finding."""
    path = found.path / NAME
    if not path.exists():
        return Repaired()
    try:
        content = json.loads(path.read_bytes())
        listed = Repaired(
            {(entry["array"], entry["shard"]): [_range(*r) for r in entry["ranges"]] for entry in content["repaired"]},
            {(entry["array"], entry["shard"]): str(entry["source"]) for entry in content["repaired"]},
            {str(name): (int(size), int(crc)) for name, (size, crc) in content["files"].items()},
            list(content.get("moved", [])),
            list(content.get("copied", [])),
        )
        others = [name for name, known in listed.files.items() if fingerprint(found.path, name) != known]
    except (OSError, UserError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        detail = f"no list that repair writes: {type(error).__name__}: {error}"
        found.findings.append(Finding(damages.STALE_LIST, NAME, detail=detail))
        return Repaired()
    if others:
        found.findings.append(Finding(damages.STALE_LIST, NAME, detail=f"of another {others[0]}"))
        return Repaired()
    elements = sum(map(listed.elements, listed.ranges))
    files = f", files made of {len(listed.copied)} others" if listed.copied else ""
    found.findings.append(Finding(damages.REPAIRED, NAME, detail=f"{elements} elements{files}"))
    return listed


def write(folder: Path, before: Repaired, now: Repaired, files: set[str]) -> None:
    """Put the list into a checkpoint: what an earlier repair had listed, and this one, with what the files are now."""
    listed = before
    for key, ranges in now.ranges.items():
        listed.add(key, ranges, now.sources[key])
    content = {
        "schema": SCHEMA,
        "repaired": [
            {"array": array, "shard": shard, "source": listed.sources[array, shard], "ranges": ranges}
            for (array, shard), ranges in sorted(listed.ranges.items())
        ],
        "moved": [*before.moved, *now.moved],
        "copied": [*before.copied, *now.copied],
        "files": {name: fingerprint(folder, name) for name in sorted({*before.files, *files})},
    }
    write_durably(folder / NAME, (json.dumps(content, indent=1) + "\n").encode())


def fingerprint(folder: Path, name: str) -> tuple[int, int]:
    """Size and checksum of a file of a checkpoint.

    Raises:
        UserError: the name leads out of the folder.
        OSError: the file cannot be read.
    """
    size = crc = 0
    with open(path_within(folder, name), "rb") as file:
        while data := file.read(AT_A_TIME):
            size, crc = size + len(data), crc32(data, crc)
    return size, crc


def _range(begin: Any, end: Any) -> Range:
    if type(begin) is not int or type(end) is not int or not 0 <= begin < end:
        raise ValueError(f"expected a range of elements, found {begin!r} to {end!r}")
    return begin, end
