"""The fingerprints of a universal checkpoint: of every state's file."""

from collections.abc import Iterator
from pathlib import Path

from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint.states import BLOCK, Fingerprint, of_blocks, state_named
from ckpt_patches.formats import torch_file, universal
from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.formats.zero import STATES


def fingerprints(path: Path, *, trust: bool = False) -> Iterator[Fingerprint]:
    """Of every parameter, in the order of their names; states that a parameter does not have are left out.

    Raises:
        UserError: a file is no state's, or cannot be read.
    """
    for parameter in universal.parameters(path):
        for state in STATES:
            file = path / universal.state_file(parameter, state)
            if file.exists():
                tensor = universal.tensor_of(torch_file.read(file, trust=trust).value)
                if tensor is None or not tensor.is_contiguous:
                    raise UserError(f"{file}: expected one contiguous tensor, found none")
                value = of_blocks(_blocks(file, tensor), tensor.dtype)
                yield Fingerprint(parameter, state_named(state), tensor.numel, value)


def _blocks(path: Path, tensor: TensorHeader) -> Iterator[memoryview]:
    try:
        with open(path, "rb") as file:
            file.seek(tensor.offset)
            left = tensor.nbytes
            while left:
                block = file.read(min(left, BLOCK))
                if not block:
                    raise UserError(f"{path} has become shorter while it was read")
                left -= len(block)
                yield memoryview(block)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
