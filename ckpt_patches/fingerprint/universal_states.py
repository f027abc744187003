"""The fingerprints of a universal checkpoint, one per state file."""

from collections.abc import Iterator
from pathlib import Path

from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint.states import Fingerprint, blocks, of_blocks, state_named
from ckpt_patches.formats import torch_file, universal
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.universal import parameters, states


def fingerprints(path: Path, *, trust: bool = False) -> Iterator[Fingerprint]:
    """The fingerprints of the existing states of every parameter, sorted by parameter name.

    Raises:
        UserError: a file is not a state file, or cannot be read.
    """
    with RangedFiles() as files:
        for parameter, state in ((name, state) for name in parameters(path) for state in states(path, name)):
            file = path / universal.state_file(parameter, state)
            tensor = universal.tensor_of(torch_file.read(file, trust=trust).value)
            if tensor is None or not tensor.is_contiguous:
                raise UserError(f"{file}: expected one contiguous tensor, found none")
            value = of_blocks(blocks(files, file, tensor.offset, tensor.nbytes), tensor.dtype)
            yield Fingerprint(parameter, state_named(state), tensor.numel, value)
