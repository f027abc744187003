"""The fingerprints of a ZeRO checkpoint, computed from the bytes that a conversion would write."""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckpt_patches.convert.convert import Options, planned
from ckpt_patches.convert.output_files import Content, TorchOutput
from ckpt_patches.convert.reading import Reader, Shares, opened
from ckpt_patches.convert.write import made_by
from ckpt_patches.fingerprint.states import BLOCK, Fingerprint, of_blocks, state_named
from ckpt_patches.formats import torch_file, universal, zero, zero_folder


def fingerprints(path: Path, *, trust: bool = False, without: Collection[str] = ()) -> Iterator[Fingerprint]:
    """The fingerprints of every full parameter, in the order of names, merged from the ranks as in a conversion.

    Args:
        path: the checkpoint's folder.
        trust: accept classes that are not known; their code is never run.
        without: names of states that are left out, see `unread`.

    Raises:
        UserError: the checkpoint is damaged, or of an unsupported kind.
    """
    plan = planned(
        path, Options(trust_checkpoint=trust, inject_missing_state=True, drop_singles=True, drop_state=tuple(without))
    )
    outputs = {output.name: output for output in plan.outputs if isinstance(output, TorchOutput)}
    outputs.update({link.name: outputs[link.file] for link in plan.links if link.file in outputs})
    with opened({}) as reader:
        for name in sorted(outputs):
            folder, _, file = name.rpartition("/")
            state = file.removesuffix(".pt")
            if folder.startswith(f"{universal.FOLDER}/") and state != "step":
                tensor = universal.tensor_of(outputs[name].value)
                assert tensor is not None, name  # each of these outputs has one
                content = outputs[name].contents[tensor.storage.key]
                value = of_blocks(_windows(reader, content), tensor.dtype)
                parameter = folder.removeprefix(f"{universal.FOLDER}/")
                yield Fingerprint(parameter, state_named(state), tensor.numel, value)


def unread(path: Path) -> dict[str, str]:
    """The optimizer's states that have no element for each of a parameter's, such as 8-bit codes, by their names.

    Raises:
        UserError: the checkpoint is damaged, or of an unsupported kind.
    """

    def read_all(names: Sequence[str], wanted: Callable[[torch_file.TorchFile], Any]) -> list[Any]:
        return [wanted(torch_file.read(path / name, trust=True)) for name in names]  # runs no code

    found = zero_folder.read(zero.look(path), read_all)
    held = [(file, number, own) for file in found.ranks.values() for number, own in enumerate(file.state.partitions)]
    return {
        f"{name} {state}": "it has no element for each of the parameter's"
        for file, number, own in held
        for state in own.others
        for name in own.fragments or zero_folder.shapes_of(found.model(file.model_rank))[number]
    }


def _windows(reader: Reader, content: Content) -> Iterator[memoryview]:
    """Yield all bytes of a parameter's state in order, block by block in one buffer."""
    fill, shares = made_by(content.how), Shares(reader, content)
    memory, rows = (memoryview(bytearray(min(BLOCK, content.nbytes))) for _ in range(2))
    for begin in range(0, content.nbytes, BLOCK):
        window = memory[: min(BLOCK, content.nbytes - begin)]
        fill(shares, content, begin, window, rows)
        yield window
