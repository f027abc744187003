"""The fingerprints of a checkpoint's files, from the shards that its reader has found. Needs no torch.

An element has the same place in its tensor in every format, whatever the parallelism of the run that saved.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint.buckets import Layout
from ckpt_patches.fingerprint.element_hash import MODULUS, Box, all_of, of_box
from ckpt_patches.fingerprint.states import FROZEN, in_words, state_named, words_of, words_per_element
from ckpt_patches.formats import damages, dcp, torch_dist
from ckpt_patches.formats.checkpoint import Checkpoint, Shard, Stream
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.elements import BlockReader
from ckpt_patches.formats.megatron_arrays import CONFIG
from ckpt_patches.formats.megatron_names import OPTIMIZER_STATE
from ckpt_patches.formats.megatron_torch import MODEL
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.reading import reader_of, wrong_path
from ckpt_patches.formats.zero_folder import FROZEN_PARTS
from ckpt_patches.runtime.distributed import Ranks
from ckpt_patches.runtime.processes import in_order
from ckpt_patches.runtime.progress import with_progress
from ckpt_patches.runtime.shown import shown

Item = TypeVar("Item")
Result = TypeVar("Result")
# The names of arrays of a bucket and state, and of all buckets of a buffer and state.
BUCKETS = re.compile(
    r"(?P<chain>chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\."
    r"(?:gbuf_idx_(?P<buffer>\d+)\.dtype_.*\.bucket_idx_(?P<bucket>\d+)(?:\.(?P<state>\w+))?"
    r"|param_state(?:/shard_[\d.]+)?(?:_[\d.]+)?\.(?P<whole>\d+)\..*)"
)
Parts = Mapping[str, Sequence["Part"]]  # by a tensor's name
Hashes = Mapping[str, tuple[int, int]]  # elements and hash, by a tensor's name
Names = Callable[[str], tuple[str, str]]  # the parameter and the state of a tensor, by its name
BLOCK = 1 << 22  # elements that are read together
# Findings after which the files do not have all elements, or not the right ones.
LOST = (
    damages.BAD_FILE,
    damages.BAD_METADATA,
    damages.MISSING_CHUNK,
    damages.SHORT_CHUNK,
    damages.MISSING_RANK,
    damages.FOREIGN_FILE,
    damages.FRAGMENTS,
)
NO_STATES = (CONFIG, MODEL)  # files that no fingerprint needs


class Part(NamedTuple):
    """Elements of a tensor, in C order of a box: those of a stream from its element `begin` on."""

    box: Box
    stream: Stream
    begin: int = 0

    @property
    def numel(self) -> int:
        return max(min(self.box.numel, self.stream.numel - self.begin), 0)


def opened(path: Path) -> Checkpoint:
    """The structure of a checkpoint.

    Raises:
        UserError: the folder has no known format.
    """
    read = reader_of(path) if path.is_dir() else None
    if read is None:
        raise wrong_path(path)
    return read(path)


def check_complete(found: Checkpoint) -> None:
    """Check that the files have all that they state.

    Raises:
        UserError: they do not; the message names the first problem.
    """
    lost = [one for one in found.findings if one.kind in LOST and not one.array.endswith(NO_STATES)]
    if lost:
        where = "/".join(filter(None, (lost[0].array, lost[0].shard)))
        detail = f": {lost[0].detail}" if lost[0].detail else ""
        raise _damaged(found, f"{lost[0].kind.name} {found.path / where}{detail}")
    for folder in dcp.folders(found.path):
        for name in torch_dist.read_index(folder).absent:
            if name != torch_dist.COMMON_OBJECT:
                raise _damaged(found, f"{shown(name)} is in the index, and in no file")


def _damaged(found: Checkpoint, what: str) -> UserError:
    return UserError(f"{found.path} is damaged or incomplete: {what} (ckpt-patches audit)")


def tensors(found: Checkpoint) -> tuple[Parts, dict[str, str]]:
    """The tensors of a checkpoint that lie in its files under names of their own; and others, with the reason."""
    shards: dict[str, list[tuple[Shard, Stream]]] = {}
    for shard in found.shards:
        for stream in shard.streams.values() if shard.has_rows else ():
            shards.setdefault(stream.array, []).append((shard, stream))
    placed = {name: _placed(own) for name, own in sorted(shards.items())}
    parts = {name: own for name, own in placed.items() if own is not None}
    unread = {one.array: one.detail for one in found.findings if one.kind in (damages.NOT_READ, damages.NOT_JUDGED)}
    unread |= dict.fromkeys(placed, "its parts do not state their places, or do not fill it")
    return parts, {name: why for name, why in unread.items() if name not in parts}


def _placed(own: Sequence[tuple[Shard, Stream]]) -> list[Part] | None:
    """The parts of a tensor; None if its shards do not fill it, or do not state where they begin."""
    if len(own) == 1 and not own[0][0].begin:
        ((shard, stream),) = own
        return [Part(all_of(shard.shape if math.prod(shard.shape) == stream.numel else (stream.numel,)), stream)]
    if len({len(sizes) for shard, _ in own for sizes in (shard.begin, shard.shape)}) > 1:
        return None
    ends = (map(sum, zip(shard.begin, shard.shape, strict=True)) for shard, _ in own)
    whole = tuple(max(axis) for axis in zip(*ends, strict=True))
    if sum(stream.numel for _, stream in own) != math.prod(whole):
        return None
    return [Part(Box(shard.begin, shard.shape, whole), stream) for shard, stream in own]


def tensors_in_buckets(found: Checkpoint, known: Mapping[str, Layout]) -> Parts:
    """The states of parameters in Megatron's buckets, under names as of other formats; without its layout, a bucket.

    The formats `dp_reshardable` and `fully_sharded_bucket_space` have a tensor per bucket and state.
    `dp_zero_gather_scatter` has one per buffer and state: its buckets without their end padding.
    """
    by_name: dict[str, list[Shard]] = {}
    for shard in found.shards:
        if not shard.has_rows:
            by_name.setdefault(shard.parameter, []).append(shard)
    parts: dict[str, list[Part]] = {}
    for name, shards in sorted(by_name.items()):
        if (match := BUCKETS.fullmatch(name)) is None:
            continue
        buffer, bucket = match["buffer"] or match["whole"], None if match["whole"] else int(match["bucket"])
        layout = known.get(f"{match['chain'] or ''}dp_group_idx_{match['group']}.gbuf_idx_{buffer}")
        for role in sorted({role for shard in shards for role in shard.streams}):
            own = [shard for shard in shards if role in shard.streams]  # in the order of their elements
            extents = tuple(extent for shard in own for extent in shard.streams[role].extents)
            stream = own[0].streams[role]._replace(extents=extents)
            if layout is None:
                parts[stream.array] = [Part(all_of((stream.numel,)), stream)]
            for begin, laid in layout.places(bucket) if layout else ():
                named = f"{OPTIMIZER_STATE}{match['state'] or role}.{laid.parameter}"
                parts.setdefault(named, []).append(Part(laid.box, stream, begin))
    return parts


def hashes(parts: Parts, workers: int, label: str, ranks: Ranks) -> Hashes:
    """The number of elements and the hash of each tensor, by name, with a progress line that begins with the label.

    Raises:
        UserError: a file cannot be read, or a rank is missing.
    """

    def read(names: Sequence[str]) -> Iterator[tuple[int, int]]:
        own = [parts[name] for name in names]
        with RangedFiles() as files:  # each process opens its own
            yield from computed(partial(of_parts, files=files), own, [*map(_nbytes, own)], workers, label)

    names = sorted(parts)
    return dict(zip(names, ranks.spread("reading the states", names, read), strict=True))


def computed(
    function: Callable[[Item], Result], items: Sequence[Item], nbytes: Sequence[int], workers: int, label: str
) -> Iterator[Result]:
    """The function's values, each computed from that many bytes, with a progress line; an empty label shows none."""
    values = in_order(function, items, workers) if workers > 1 else map(function, items)
    return with_progress(values, nbytes, f"{label}:") if label else values


def _nbytes(parts: Sequence[Part]) -> int:
    return sum(part.numel * item_size(part.stream.dtype) for part in parts)


def of_parts(parts: Sequence[Part], files: RangedFiles) -> tuple[int, int]:
    """The number of elements of the parts of a tensor, and their hash.

    Raises:
        UserError: a file cannot be read.
    """
    return sum(part.numel for part in parts), sum(_of_part(part, files) for part in parts) % MODULUS


def _of_part(part: Part, files: RangedFiles) -> int:
    dtype, end = part.stream.dtype, part.begin + part.numel
    reader = BlockReader(part.stream, min(BLOCK, part.numel), files, checked=False)
    words, box, value = words_per_element(dtype), in_words(part.box, dtype), 0
    for at in range(part.begin, end, BLOCK):
        try:
            block = memoryview(reader.read(at, min(at + BLOCK, end)))
        except OSError as error:
            raise UserError(f"{part.stream.extents[0].path} cannot be read: {error.strerror or error}") from None
        value += of_box(words_of(block, dtype), (at - part.begin) * words, box)
    return value


# Names


def of_megatron(name: str) -> tuple[str, str]:
    """Split a tensor's name: `optimizer.state.exp_avg.decoder.weight` is the state exp_avg of decoder.weight."""
    before, found, rest = name.partition(OPTIMIZER_STATE)
    state, _, parameter = rest.partition(".")
    return (f"{before}{parameter}", state_named(state)) if found and parameter else (name, "model")


def of_universal(name: str) -> tuple[str, str]:
    """Split the name of a state's file: `decoder.weight/exp_avg.pt`; of a frozen parameter's parts at stage 3."""
    if name.startswith(FROZEN_PARTS):
        return name.removeprefix(FROZEN_PARTS), FROZEN
    parameter, _, file = name.rpartition("/")
    return parameter, state_named(file.removesuffix(".pt"))
