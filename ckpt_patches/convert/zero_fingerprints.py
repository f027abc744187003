"""The fingerprints of a ZeRO checkpoint, computed from the bytes that a conversion would write."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from ckpt_patches.convert.conversion_plan import TorchOutput
from ckpt_patches.convert.convert import Options, planned
from ckpt_patches.convert.merging import Merger
from ckpt_patches.convert.reading import open_files
from ckpt_patches.fingerprint.files import computed
from ckpt_patches.fingerprint.states import Fingerprint, of_blocks, state_named
from ckpt_patches.formats import universal
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
    options = Options(trust_checkpoint=trust, inject_missing_state=True, skip_lost=True)
    plan = planned(path, options)
    why = "it has no element for each of the parameter's"
    lost = {f"{name} {state}": why for state, names in plan.lost.items() for name in names}
    outputs = {output.name: output for output in plan.outputs if isinstance(output, TorchOutput)}
    folder = f"{universal.FOLDER}/"  # of the parameters' folders
    names = [n for n in sorted(outputs) if n.rpartition("/")[0].startswith(folder) and Path(n).stem != "step"]

    def read_share(share: Sequence[str]) -> Iterator[Fingerprint]:
        own = [(name, outputs[name]) for name in share]
        nbytes = [output.nbytes for _, output in own]
        with open_files() as files:  # each process opens its own
            fingerprint = partial(_fingerprint, merger=Merger(files))
            yield from computed(fingerprint, own, nbytes, workers, label)

    return (ranks or Ranks()).spread("reading the states", names, read_share), lost


def _fingerprint(named: tuple[str, TorchOutput], merger: Merger) -> Fingerprint:
    name, output = named
    tensor = universal.tensor_of(output.value)
    assert tensor is not None, name  # each of these outputs has one
    value = of_blocks(merger.blocks(output.contents[tensor.storage.key], name), tensor.dtype)
    parameter, _, file = name.removeprefix(f"{universal.FOLDER}/").rpartition("/")
    return Fingerprint(parameter, state_named(file.removesuffix(".pt")), tensor.numel, value)
