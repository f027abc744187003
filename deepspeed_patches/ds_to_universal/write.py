"""Write one file of the output: its storages in windows of bounded size, then the file under its own name at once."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path

from ckpt_patches.errors import UserError
from ckpt_patches.torch_file import ITEM_SIZE
from deepspeed_patches.ds_to_universal.layout import Block
from deepspeed_patches.ds_to_universal.outputs import Content, CopiedOutput, Output, Slice, TorchOutput
from deepspeed_patches.ds_to_universal.sources import Access, Sources
from deepspeed_patches.ds_to_universal.torch_writer import torch_file

TEMPORARY = ".unfinished-"  # what names of files begin with that are not whole yet
SHORT = 65536  # bytes; rows up to this length are read together, longer ones each into its place
COMPARED = 1 << 20  # bytes at once
PAGE = 4096  # bytes; a buffer is pages, so that it holds whole elements of every type

Moved = Callable[[int], object]
Fill = Callable[[Sources, Content, int, memoryview, memoryview], None]


@dataclass(frozen=True)
class Job:
    """What all files of a conversion have in common."""

    folder: Path  # that they are written to
    paths: list[Path]  # of the checkpoint's files
    access: Access
    bytes_in_flight: int
    sync: bool = True  # have a file on the disk before it gets its name


class Writer:
    """Writes outputs of a job one by one; `moved` is told of every window of bytes."""

    def __init__(self, job: Job, sources: Sources, moved: Moved) -> None:
        self.job, self.sources, self.moved = job, sources, moved
        # A second buffer takes rows on their way, or the slices that are averaged or compared.
        nbytes = max(1, job.bytes_in_flight // 2 // PAGE) * PAGE
        self.buffer, self.rows = _pages(nbytes), _pages(nbytes)

    def write(self, output: Output) -> None:
        """Write a file under a temporary name, and rename it when it is whole.

        Raises:
            UserError: the disk is full, or a file cannot be read.
        """
        path = self.job.folder / output.name
        temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb", buffering=0) as file:
                if isinstance(output, TorchOutput):
                    with torch_file(file, path.stem, output.value) as records:
                        for key, content in output.contents.items():
                            records.add_storage(key, content.nbytes, self.windows(content, output.name))
                else:
                    self._copy(output, file.fileno())
                if self.job.sync:
                    os.fsync(file.fileno())
            if isinstance(output, CopiedOutput):
                shutil.copystat(self.job.paths[output.file], temporary)
            os.replace(temporary, path)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None

    def _copy(self, output: CopiedOutput, descriptor: int) -> None:
        for begin in range(0, output.nbytes, len(self.buffer)):
            piece = self.buffer[: output.nbytes - begin]
            self.sources.read(output.file, begin, piece)
            _write_all(descriptor, piece)
            self.moved(len(piece))

    def windows(self, content: Content, name: str) -> Iterator[memoryview]:
        """A storage's bytes, in pieces that lie in the buffer until the next is asked for."""
        fill = place if content.how == "place" else _arithmetic(content.how)
        for begin in range(0, content.nbytes, len(self.buffer)):
            window = self.buffer[: content.nbytes - begin]
            fill(self.sources, content, begin, window, self.rows)
            _check_copies(self.sources, content, begin, window, self.rows, name)
            yield window
            self.moved(len(window))


def _arithmetic(how: str) -> Fill:
    from deepspeed_patches.ds_to_universal import arithmetic

    fills: dict[str, Fill] = {"averaged": arithmetic.averaged, "float32": arithmetic.as_float32}
    return fills[how]


def _check_copies(
    sources: Sources, content: Content, begin: int, window: memoryview, rows: memoryview, name: str
) -> None:
    """That every slice that holds a part of the window holds the same.

    Raises:
        UserError: one does not.
    """
    size = ITEM_SIZE[content.dtype]
    copies = content.layout.copies if content.how == "place" else ()
    for block in copies:
        for source, target, nbytes in _rows(block.scaled(size), begin, begin + len(window)):
            found, expected = rows[:nbytes], window[target - begin : target - begin + nbytes]
            sources.read_slice(content.slices[block.slice], source, found)
            if not _same(found, expected, content.dtype):
                raise UserError(
                    f"{name}: the checkpoint says that tensor-parallel rank {block.slice} holds the same as others of "
                    "this parameter, and it does not"
                )


def _same(one: memoryview, other: memoryview, dtype: str) -> bool:
    """Views compare byte by byte; bytes do at once."""
    if all(bytes(one[at : at + COMPARED]) == bytes(other[at : at + COMPARED]) for at in range(0, len(one), COMPARED)):
        return True
    from deepspeed_patches.ds_to_universal import arithmetic

    return arithmetic.equal(one, other, dtype)


def place(sources: Sources, content: Content, begin: int, window: memoryview, rows: memoryview) -> None:
    """Fill a window of the whole parameter, from byte `begin` on, with what the slices hold of it."""
    size = ITEM_SIZE[content.dtype]
    for block in content.layout.blocks:
        slice_ = content.slices[block.slice]
        if block.count > 1 and block.source_stride == block.length and block.length * size <= SHORT:
            _place_short_rows(sources, slice_, block.scaled(size), begin, window, rows)
        else:
            for source, target, nbytes in _rows(block.scaled(size), begin, begin + len(window)):
                sources.read_slice(slice_, source, window[target - begin : target - begin + nbytes])


def _rows(block: Block, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Of a block's rows, in bytes, what lies between `begin` and `end` of the target: source, target, length."""
    for row in range(max(0, (begin - block.target) // block.target_stride), block.count):
        target = block.target + row * block.target_stride
        if target >= end:
            return
        low, high = max(target, begin), min(target + block.length, end)
        if low < high:
            yield block.source + row * block.source_stride + low - target, low, high - low


def _place_short_rows(
    sources: Sources, slice_: Slice, block: Block, begin: int, window: memoryview, rows: memoryview
) -> None:
    """Read many rows at once, which follow on one another in the slice, and then put each in its place."""
    batch: list[tuple[int, int, int]] = []
    nbytes = 0
    for row in _rows(block, begin, begin + len(window)):
        if nbytes + row[2] > len(rows):
            _scatter(sources, slice_, batch, begin, window, rows[:nbytes])
            batch, nbytes = [], 0
        batch.append(row)
        nbytes += row[2]
    _scatter(sources, slice_, batch, begin, window, rows[:nbytes])


def _scatter(
    sources: Sources,
    slice_: Slice,
    batch: list[tuple[int, int, int]],
    begin: int,
    window: memoryview,
    rows: memoryview,
) -> None:
    if not batch:
        return
    first = batch[0][0]
    sources.read_slice(slice_, first, rows)
    for source, target, nbytes in batch:
        window[target - begin : target - begin + nbytes] = rows[source - first : source - first + nbytes]


def _pages(nbytes: int) -> memoryview:
    """Memory of this process alone: writing from shared memory takes the kernel twice as long."""
    return memoryview(mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS))


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
