"""Write output files: storages in windows of bounded size, then an atomic rename of each file."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckpt_patches.convert.layout import Block
from ckpt_patches.convert.new_file import PAGE, NewFile, pages, writes_directly
from ckpt_patches.convert.output_files import Content, CopiedOutput, Output, Records, TorchOutput
from ckpt_patches.convert.reading import Seen, Shares, opened
from ckpt_patches.errors import UserError
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.torch_writer import torch_file
from ckpt_patches.runtime.unfinished import TEMPORARY, reported

SHORT = 65536  # bytes; rows up to this length are read in batches, longer ones directly to their targets
COMPARED = 1 << 20  # bytes at a time
BYTES_IN_FLIGHT = 16 << 20  # of all workers; larger buffers are not faster, and exceed a processor's cache
# Limits of a batch of files to sync together: the disk then does common work only once.
FILES_TOGETHER = 32
BYTES_TOGETHER = 64 << 20

Fill = Callable[[Shares, Content, int, memoryview, memoryview], None]


def batches(outputs: Iterable[Output]) -> Iterator[list[Output]]:
    """Batches of files that a worker writes and syncs together."""
    batch: list[Output] = []
    for output in outputs:
        batch.append(output)
        if len(batch) >= FILES_TOGETHER or sum(own.nbytes for own in batch) >= BYTES_TOGETHER:
            yield batch
            batch = []
    if batch:
        yield batch


class Writer:
    """Writes batches of files into a folder, in one of several worker processes.

    `records` are those of the checkpoint's files. A file gets its final name when it is on disk.
    """

    def __init__(self, folder: Path, records: Mapping[str, Records], workers: int) -> None:
        self.folder, self._records = folder, records
        self._nbytes = BYTES_IN_FLIGHT // workers
        self._unnamed: list[tuple[NewFile, str, str]] = []  # with temporary and final names
        self._folders: set[str] = set()  # that exist

    def __call__(self, batch: Sequence[Output]) -> tuple[int, Seen]:
        """Write a batch. Returns its size in bytes, and what was read.

        Raises:
            UserError: the disk is full, or a file cannot be read. The complete files have their names.
        """
        if not self._folders:  # in the worker process
            self._begin()
        self.reader.seen = {}
        try:
            for output in batch:
                self.write(output)
        finally:
            self.finish()
        return sum(output.nbytes for output in batch), self.reader.seen

    def _begin(self) -> None:
        self.reader = opened(self._records)
        self.direct = writes_directly(self.folder)
        # The second buffer is for rows before their copy, or for slices to average or compare.
        memory = pages(max(self._nbytes, 2 * PAGE))
        half = len(memory) // PAGE // 2 * PAGE
        self.buffer, self.rows = memory[:half], memory[half:]
        # Random and not the process id: processes of two containers can have the same id.
        self._temporary = f"{TEMPORARY}{os.urandom(4).hex()}-"

    def write(self, output: Output) -> None:
        """Write a file under a temporary name.

        Raises:
            UserError: the disk is full, or a file cannot be read.
        """
        path = f"{self.folder}/{output.name}"  # building a `Path` takes as long as writing a small file
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/{self._temporary}{name}"
        with reported(path):
            if folder not in self._folders:
                os.makedirs(folder, exist_ok=True)
                self._folders.add(folder)
            file = NewFile(temporary, self.buffer, direct=self.direct)
            try:
                self._fill(file, output)
                file.finish()
            except BaseException:
                file.close()
                os.unlink(temporary)
                raise
            if isinstance(output, CopiedOutput):
                shutil.copystat(output.path, temporary)
        self._unnamed.append((file, temporary, path))

    def _fill(self, file: NewFile, output: Output) -> None:
        if isinstance(output, TorchOutput):
            with torch_file(file, os.path.basename(output.name).removesuffix(".pt"), output.value) as records:
                for key, content in output.contents.items():
                    records.add_storage(key, content.nbytes, self.windows(file, content, output.name))
        else:
            self._copy(output, file)

    def finish(self) -> None:
        """Sync the written files, and give them their final names."""
        while self._unnamed:
            file, temporary, path = self._unnamed.pop(0)
            with reported(path):
                file.sync()
                file.close()
                os.replace(temporary, path)

    def _copy(self, output: CopiedOutput, file: NewFile) -> None:
        begin = 0
        while begin < output.nbytes:
            piece = file.room(output.nbytes - begin)
            self.reader.read(str(output.path), begin, piece)
            begin += file.write(piece)

    def windows(self, file: NewFile, content: Content, name: str) -> Iterator[memoryview]:
        """Yield a storage's bytes in pieces of the file's buffer."""
        fill, shares = made_by(content.how), Shares(self.reader, content)
        begin = 0
        while begin < content.nbytes:
            window = file.room(content.nbytes - begin)
            fill(shares, content, begin, window, self.rows)
            _check_copies(shares, content, begin, window, self.rows, name)
            yield window
            begin += len(window)


def made_by(how: str) -> Fill:
    """The function that fills windows with a content; imports `arithmetic` only if needed."""
    if how == "place":
        return place
    from ckpt_patches.convert import arithmetic

    fills: dict[str, Fill] = {"averaged": arithmetic.averaged, "float32": arithmetic.as_float32}
    return fills[how]


def _check_copies(
    shares: Shares, content: Content, begin: int, window: memoryview, rows: memoryview, name: str
) -> None:
    """Check that all slices agree where they overlap the window.

    Raises:
        UserError: they differ.
    """
    size = ITEM_SIZE[content.dtype]
    copies = content.layout.copies if content.how == "place" else ()
    for block in copies:
        for source, target, nbytes in _rows(block.scaled(size), begin, begin + len(window)):
            found, expected = rows[:nbytes], window[target - begin : target - begin + nbytes]
            shares.read(block.slice, source, found)
            if not _same(found, expected, content.dtype):
                raise UserError(_differs(name, content, block.slice))


def _differs(name: str, content: Content, index: int) -> str:
    if index in content.stages:
        one, other = content.stages[index]
        return (
            f"{name}: expected the same values in pipeline stages {one} and {other}, which both hold this parameter, "
            "found others; a universal checkpoint has one of it: resume with as many stages as were saved"
        )
    return (
        f"{name}: the checkpoint states that tensor-parallel rank {index} holds the same as others of this "
        "parameter, and it does not"
    )


def _same(one: memoryview, other: memoryview, dtype: str) -> bool:
    """Whether elements are equal. Compares bytes, which is faster than comparing views."""
    if all(bytes(one[at : at + COMPARED]) == bytes(other[at : at + COMPARED]) for at in range(0, len(one), COMPARED)):
        return True
    from ckpt_patches.convert import arithmetic

    return arithmetic.equal(one, other, dtype)


def place(shares: Shares, content: Content, begin: int, window: memoryview, rows: memoryview) -> None:
    """Fill a window of the full parameter, from byte `begin` on, from the slices."""
    size = ITEM_SIZE[content.dtype]
    for block in content.layout.blocks:
        if block.count > 1 and block.source_stride == block.length and block.length * size <= SHORT:
            _place_short_rows(shares, block.scaled(size), begin, window, rows)
        else:
            for source, target, nbytes in _rows(block.scaled(size), begin, begin + len(window)):
                shares.read(block.slice, source, window[target - begin : target - begin + nbytes])


def _rows(block: Block, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The parts of a block's rows between `begin` and `end` of the target: source, target, length in bytes."""
    for row in range(max(0, (begin - block.target) // block.target_stride), block.count):
        target = block.target + row * block.target_stride
        if target >= end:
            return
        low, high = max(target, begin), min(target + block.length, end)
        if low < high:
            yield block.source + row * block.source_stride + low - target, low, high - low


def _place_short_rows(shares: Shares, block: Block, begin: int, window: memoryview, rows: memoryview) -> None:
    """Read many rows that are consecutive in the slice at once, then copy each to its target."""
    batch: list[tuple[int, int, int]] = []
    nbytes = 0
    for row in _rows(block, begin, begin + len(window)):
        if nbytes + row[2] > len(rows):
            _scatter(shares, block.slice, batch, begin, window, rows[:nbytes])
            batch, nbytes = [], 0
        batch.append(row)
        nbytes += row[2]
    _scatter(shares, block.slice, batch, begin, window, rows[:nbytes])


def _scatter(
    shares: Shares,
    number: int,
    batch: list[tuple[int, int, int]],
    begin: int,
    window: memoryview,
    rows: memoryview,
) -> None:
    if not batch:
        return
    first = batch[0][0]
    shares.read(number, first, rows)
    for source, target, nbytes in batch:
        window[target - begin : target - begin + nbytes] = rows[source - first : source - first + nbytes]
