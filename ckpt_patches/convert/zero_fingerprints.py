"""The fingerprints of a ZeRO checkpoint, computed from the bytes that a conversion would write."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from ckpt_patches.convert.conversion_plan import TorchOutput
from ckpt_patches.convert.convert import Options, planned
from ckpt_patches.convert.merging import Merger
from ckpt_patches.convert.reading import open_files
from ckpt_patches.fingerprint import files
from ckpt_patches.fingerprint.files import computed
from ckpt_patches.fingerprint.states import Fingerprint, of_blocks, state_named
from ckpt_patches.formats import universal, zero_reader
from ckpt_patches.formats.zero import MASTER
from ckpt_patches.formats.zero_folder import FROZEN_PARTS
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
    options = Options(strict=False, trust_checkpoint=trust, inject_missing_state=True, skip_lost=True)
    plan = planned(path, options)
    why = "it has no element for each of the parameter's"
    lost = {f"{name} {state}": why for state, names in plan.lost.items() for name in names}
    outputs = {output.name: output for output in plan.outputs if isinstance(output, TorchOutput)}
    folder = f"{universal.FOLDER}/"  # of the parameters' folders
    names = [n for n in sorted(outputs) if n.rpartition("/")[0].startswith(folder) and Path(n).stem != "step"]

    def read_share(share: Sequence[str]) -> Iterator[Fingerprint]:
        own = [(name, outputs[name]) for name in share]
        nbytes = [output.nbytes for _, output in own]
        with open_files() as opened:  # each process opens its own
            fingerprint = partial(_fingerprint, merger=Merger(opened))
            yield from computed(fingerprint, own, nbytes, workers, label)

    ranks = ranks or Ranks()
    found = ranks.spread("reading the states", names, read_share)
    why = "only the first tensor-parallel rank's part was read"
    lost |= {f"{name} {state_named(MASTER)}": why for name in plan.of_first_rank}
    frozen, unread = _frozen_parts(path, workers, label, ranks) if plan.has_frozen_parts else ([], {})
    return [*(one for one in found if f"{one.parameter} {one.state}" not in lost), *frozen], {**lost, **unread}


def _frozen_parts(path: Path, workers: int, label: str, ranks: Ranks) -> tuple[list[Fingerprint], dict[str, str]]:
    """The fingerprints of frozen parameters at stage 3, which a conversion copies with the model's files."""
    parts, unread = files.tensors(zero_reader.read(path))
    frozen = {name: own for name, own in parts.items() if name.startswith(FROZEN_PARTS)}
    hashed = files.hashes(frozen, workers, label, ranks)
    made = [Fingerprint(*files.of_universal(name), *own) for name, own in hashed.items()]
    return made, {name: why for name, why in unread.items() if name.startswith(FROZEN_PARTS)}


def _fingerprint(named: tuple[str, TorchOutput], merger: Merger) -> Fingerprint:
    name, output = named
    tensor = universal.tensor_of(output.value)
    assert tensor is not None, name  # each of these outputs has one
    value = of_blocks(merger.blocks(output.contents[tensor.storage.key], name), tensor.dtype)
    parameter, _, file = name.removeprefix(f"{universal.FOLDER}/").rpartition("/")
    return Fingerprint(parameter, state_named(file.removesuffix(".pt")), tensor.numel, value)
