"""Write output files: each under a temporary name, synced in batches, then renamed."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ckpt_patches.convert.conversion_plan import CopiedOutput, Output
from ckpt_patches.convert.merging import Merger
from ckpt_patches.convert.reading import Reader, Records, Seen
from ckpt_patches.formats.torch_writer import torch_file
from ckpt_patches.runtime.unfinished import TEMPORARY, reported

BLOCK = 1 << 20  # bytes that are read, and written, at once; larger ones are not faster, and exceed a processor's cache
# Limits of a batch of files to sync together: the disk then does common work only once.
FILES_TOGETHER = 32
BYTES_TOGETHER = 64 << 20


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

    def __init__(self, folder: Path, records: Mapping[str, Records]) -> None:
        self.folder, self._records = folder, records
        self._unnamed: list[tuple[BinaryIO, str, str]] = []  # with temporary and final names
        self._folders: set[str] = set()  # that exist

    def __call__(self, batch: Sequence[Output]) -> tuple[int, Seen]:
        """Write a batch. Returns its size in bytes, and what was read.

        Raises:
            UserError: the disk is full, or a file cannot be read. The complete files have their names.
        """
        if not self._folders:  # in the worker process
            self.reader = Reader(self._records)
            self.merger = Merger(self.reader, BLOCK)
            # Random and not the process id: processes of two containers can have the same id.
            self._temporary = f"{TEMPORARY}{os.urandom(4).hex()}-"
        self.reader.seen = {}
        try:
            for output in batch:
                self.write(output)
        finally:
            self._finish()
        return sum(output.nbytes for output in batch), self.reader.seen

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
            file = open(temporary, "wb")  # noqa: SIM115 - closed after the sync of its batch
            try:
                self._fill(file, output)
                file.flush()
            except BaseException:
                with suppress(OSError):  # what is left cannot be written either
                    file.close()
                os.unlink(temporary)
                raise
            if isinstance(output, CopiedOutput):
                shutil.copystat(output.path, temporary)
        self._unnamed.append((file, temporary, path))

    def _fill(self, file: BinaryIO, output: Output) -> None:
        if isinstance(output, CopiedOutput):
            block = memoryview(bytearray(min(BLOCK, output.nbytes)))
            for begin in range(0, output.nbytes, BLOCK):
                piece = block[: output.nbytes - begin]
                self.reader.read(str(output.path), begin, piece)
                file.write(piece)
            return
        with torch_file(file, os.path.basename(output.name).removesuffix(".pt"), output.value) as records:
            for key, content in output.contents.items():
                records.add_storage(key, content.nbytes, self.merger.blocks(content, output.name))

    def _finish(self) -> None:
        """Sync the written files, and give them their final names."""
        while self._unnamed:
            file, temporary, path = self._unnamed.pop(0)
            with reported(path), file:
                os.fsync(file.fileno())
                os.replace(temporary, path)
