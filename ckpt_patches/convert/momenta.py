"""Muon's momentum at ZeRO 1 and 2: several ranks hold a matrix's full momentum, a universal checkpoint holds one."""

import hashlib

from ckpt_patches.errors import UserError
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.zero import Flat
from ckpt_patches.formats.zero_folder import Zero
from ckpt_patches.runtime.shown import shown

PIECE = 1 << 24  # bytes per read


def check(found: Zero) -> None:
    """Check that each matrix has the same momentum on all ranks that hold it.

    Raises:
        UserError: one has not.
    """
    digests: dict[tuple[int, str], tuple[str, bytes]] = {}  # by model-parallel rank and matrix: of the first file
    with RangedFiles() as files:
        for file in found.ranks.values():
            for own in file.partitions:
                for name, (start, numel) in own.wholes.items():
                    if own.momentum and own.fragments[name][1] < numel:
                        digest = _digest(files, own.momentum, start, numel)
                        first, expected = digests.setdefault((file.model_rank, name), (file.path.name, digest))
                        if digest != expected:
                            raise UserError(
                                f"Muon's momentum of {shown(name)} is not the same in {first} and {file.path.name}: "
                                "DeepSpeed 0.18.9 to 0.19.7 can leave it at zero on a rank; resume on the same ranks"
                            )


def _digest(files: RangedFiles, flat: Flat, start: int, numel: int) -> bytes:
    """The digest of some elements of a tensor in a file."""
    size = ITEM_SIZE[flat.type.dtype]
    begin, end = flat.offset + start * size, flat.offset + (start + numel) * size
    digest = hashlib.blake2b()
    for offset in range(begin, end, PIECE):
        data = memoryview(bytearray(min(PIECE, end - offset)))
        files.read(flat.file, offset, data)
        digest.update(data)
    return digest.digest()
