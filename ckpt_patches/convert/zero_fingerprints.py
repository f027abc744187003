"""The fingerprints of a ZeRO checkpoint, computed from the bytes that a conversion would write."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_patches.convert.conversion_plan import TorchOutput
from ckpt_patches.convert.convert import Options, planned
from ckpt_patches.convert.merging import Merger
from ckpt_patches.convert.reading import Reader
from ckpt_patches.convert.write import BLOCK
from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint.files import computed
from ckpt_patches.fingerprint.states import Fingerprint, of_blocks, state_named
from ckpt_patches.formats import torch_file, universal, zero, zero_folder
from ckpt_patches.runtime.distributed import Ranks


def read(
    path: Path, *, trust: bool = False, workers: int = 1, label: str = "", ranks: Ranks | None = None
) -> tuple[list[Fingerprint], dict[str, str]]:
    """The fingerprints of every full parameter, merged from the ranks as in a conversion; and what has none, and why.

    Args:
        path: the checkpoint's folder.
        trust: accept classes that are not known; their code is never run.
        workers: number of processes that read.
        label: of the progress line; empty for none.
        ranks: of the command; each calls this, and reads its share.

    Raises:
        UserError: the checkpoint is damaged, or of an unsupported kind.
    """
    options = Options(trust_checkpoint=trust, inject_missing_state=True, drop_singles=True)
    lost: dict[str, str] = {}
    try:
        plan = planned(path, options)
    except UserError:
        lost = _unread(path)
        if not lost:
            raise
        plan = planned(path, replace(options, drop_state=tuple({name.rpartition(" ")[2] for name in lost})))
    outputs = {output.name: output for output in plan.outputs if isinstance(output, TorchOutput)}
    outputs.update({link.name: outputs[link.file] for link in plan.links if link.file in outputs})
    folder = f"{universal.FOLDER}/"  # of the parameters' folders
    names = [n for n in sorted(outputs) if n.rpartition("/")[0].startswith(folder) and Path(n).stem != "step"]

    def read_share(share: Sequence[str]) -> Iterator[Fingerprint]:
        own = [(name, outputs[name]) for name in share]
        nbytes = [output.nbytes for _, output in own]
        with closing(Reader()) as reader:  # each process opens its own files
            fingerprint = partial(_fingerprint, merger=Merger(reader, BLOCK))
            yield from computed(fingerprint, own, nbytes, workers, label)

    return (ranks or Ranks()).spread("reading the states", names, read_share), lost


def _fingerprint(named: tuple[str, TorchOutput], merger: Merger) -> Fingerprint:
    name, output = named
    tensor = universal.tensor_of(output.value)
    assert tensor is not None, name  # each of these outputs has one
    value = of_blocks(merger.blocks(output.contents[tensor.storage.key], name), tensor.dtype)
    parameter, _, file = name.removeprefix(f"{universal.FOLDER}/").rpartition("/")
    return Fingerprint(parameter, state_named(file.removesuffix(".pt")), tensor.numel, value)


def _unread(path: Path) -> dict[str, str]:
    """The optimizer's states that have no element for each of a parameter's, such as 8-bit codes, by their names.

    Raises:
        UserError: the checkpoint is damaged, or of an unsupported kind.
    """

    def read_all(names: Sequence[str], wanted: Callable[[torch_file.TorchFile], Any]) -> list[Any]:
        return [wanted(torch_file.read(path / name, trust=True)) for name in names]  # runs no code

    found = zero_folder.read(zero.look(path), read_all)
    held = [(file, number, own) for file in found.ranks.values() for number, own in enumerate(file.partitions)]
    return {
        f"{name} {state}": "it has no element for each of the parameter's"
        for file, number, own in held
        for state in own.others
        for name in own.fragments or zero_folder.shapes_of(found.model(file.model_rank))[number]
    }
