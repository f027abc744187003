"""Muon's momentum at ZeRO 1 and 2: several ranks hold a matrix's full momentum, a universal checkpoint holds one."""

import hashlib
from pathlib import Path

from ckpt_patches.errors import UserError
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.zero import Flat
from ckpt_patches.formats.zero_checkpoint import Checkpoint
from ckpt_patches.runtime.shown import shown

PIECE = 1 << 24  # bytes per read


def unlike(checkpoint: Checkpoint, *, strict: bool) -> list[str]:
    """Warnings about matrices whose momentum differs between ranks.

    Raises:
        UserError: with `strict`, there is one.
    """
    digests: dict[tuple[int, str], dict[str, bytes]] = {}  # by (model, matrix), then by file
    for number, rank in enumerate(checkpoint.ranks):
        for own in rank.partitions:
            for name, (start, numel) in own.wholes.items():
                if own.momentum and own.fragments[name][1] < numel:
                    path = checkpoint.files[own.momentum.file].path
                    by_file = digests.setdefault((number // checkpoint.dp_degree, name), {})
                    by_file[path.name] = _digest(path, own.momentum, start, numel)
    others = [(name, files) for (_, name), files in digests.items() if len(set(files.values())) > 1]
    if not others:
        return []
    name, files = others[0]
    found = (
        f"Muon's momentum of {shown(name)} is not the same in {' and '.join(sorted(files)[:2])} ({len(others)} such "
        "matrices): DeepSpeed 0.18.9 to 0.19.7 can leave it at zero on a rank"
    )
    if strict:
        raise UserError(f"{found}; --no-strict takes of each rank what it has of its own elements")
    return [found]


def _digest(path: Path, flat: Flat, start: int, numel: int) -> bytes:
    """The digest of some elements of a tensor in a file."""
    size = ITEM_SIZE[flat.type.dtype]
    left = numel * size
    digest = hashlib.blake2b()
    with open(path, "rb") as file:
        file.seek(flat.offset + start * size)
        while left and (data := file.read(min(left, PIECE))):
            digest.update(data)
            left -= len(data)
    return digest.digest()
