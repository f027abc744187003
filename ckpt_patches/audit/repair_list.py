"""The list of repaired elements in a repaired checkpoint. Without it, reset moments look like lost ones.

The list has the sizes and checksums of the files that hold these elements. If a file differs, the list is ignored.
"""

import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_patches.audit.ranges import Range, joined
from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import Checkpoint
from ckpt_patches.formats.checksum import crc32
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.paths import path_within
from ckpt_patches.formats.ranged import open_regular, read_metadata
from ckpt_patches.runtime.durable import write_durably
from ckpt_patches.runtime.shown import shown

NAME = "ckpt-patches-repaired.json"
SCHEMA = 2
AT_A_TIME = 1 << 24  # bytes

Key = tuple[str, str]  # array and shard


@dataclass
class Repaired:
    """What was repaired in a checkpoint, over all its repairs."""

    ranges: dict[Key, list[Range]] = field(default_factory=dict)  # elements of the shard
    sources: dict[Key, str] = field(default_factory=dict)  # source of the last repair
    files: list[str] = field(default_factory=list)  # names in the folder of the files with these elements

    def add(self, key: Key, ranges: list[Range], source: str) -> None:
        """Add repaired elements; those of earlier repairs stay in the list."""
        if ranges:
            self.ranges[key] = joined([*self.ranges.get(key, []), *ranges])
            self.sources[key] = source

    def elements(self, key: Key) -> int:
        return sum(end - begin for begin, end in self.ranges[key])


def read(found: Checkpoint) -> Repaired:
    """Read the repair list of a checkpoint, and add a finding for it. Empty if it is missing, invalid or stale."""
    path = found.path / NAME
    if not path.exists():
        return Repaired()
    try:
        content = json.loads(read_metadata(path))
        listed, ranges = Repaired(), defaultdict[Key, list[Range]](list)
        for entry in content["repaired"]:
            key = str(entry["array"]), str(entry["shard"])
            ranges[key] += [_range(*own) for own in entry["ranges"]]
            listed.sources[key] = str(entry["source"])
        listed.ranges = {key: joined(own) for key, own in ranges.items() if own}
        listed.files = [str(name) for name in content["files"]]
        others = [name for name, known in content["files"].items() if fingerprint(found.path, name) != known]
        stale = f"of another {shown(others[0])}" if others else ""
    except (OSError, UserError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        stale = f"no list that repair writes: {type(error).__name__}: {error}"
    if stale:
        found.findings.append(Finding(damages.STALE_LIST, NAME, detail=stale))
        return Repaired()
    elements = sum(map(listed.elements, listed.ranges))
    found.findings.append(Finding(damages.REPAIRED, NAME, detail=f"{elements} elements"))
    return listed


def write(folder: Path, listed: Repaired) -> None:
    """Write the list, with the current sizes and checksums of the files."""
    content = {
        "schema": SCHEMA,
        "repaired": [
            {"array": array, "shard": shard, "source": listed.sources[array, shard], "ranges": ranges}
            for (array, shard), ranges in sorted(listed.ranges.items())
        ],
        "files": {name: fingerprint(folder, name) for name in sorted(set(listed.files))},
    }
    write_durably(folder / NAME, (json.dumps(content, indent=1) + "\n").encode())


def fingerprint(folder: Path, name: str) -> list[int]:
    """Size and checksum of a file of a checkpoint.

    Raises:
        UserError: the name points outside the folder.
        OSError: the file cannot be read.
    """
    size = crc = 0
    with os.fdopen(open_regular(path_within(folder, name)), "rb") as file:
        while data := file.read(AT_A_TIME):
            size, crc = size + len(data), crc32(data, crc)
    return [size, crc]


def _range(begin: Any, end: Any) -> Range:
    if type(begin) is not int or type(end) is not int or not 0 <= begin < end:
        raise ValueError(f"expected a range of elements, found {shown(begin)} to {shown(end)}")
    return begin, end
