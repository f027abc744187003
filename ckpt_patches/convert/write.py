"""Write output files in batches: each under a temporary name; all are synced, then renamed."""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from ckpt_patches.convert.conversion_plan import CopiedOutput, Output
from ckpt_patches.convert.merging import Merger
from ckpt_patches.convert.reading import BLOCK, open_files
from ckpt_patches.formats.torch_writer import torch_file
from ckpt_patches.runtime.durable import leave_cache, new_file

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

    A file gets its final name when it is on disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._merger: Merger | None = None  # made in the worker process

    def __call__(self, batch: Sequence[Output]) -> int:
        """Write a batch. Returns its size in bytes.

        Raises:
            OSError: the disk is full, or a file cannot be read. The files of earlier batches have their names.
        """
        self._merger = merger = self._merger or Merger(open_files())
        with ExitStack() as files:
            for output in batch:
                path = self.folder / output.name
                if not path.parent.is_dir():
                    path.parent.mkdir(parents=True, exist_ok=True)
                file = files.enter_context(new_file(path))
                write(output, file, merger)
                file.flush()
                leave_cache(file)
        return sum(output.nbytes for output in batch)


def write(output: Output, file: BinaryIO, merger: Merger) -> None:
    """Write the content of a file."""
    if isinstance(output, CopiedOutput):
        block = memoryview(bytearray(min(BLOCK, output.nbytes)))
        for begin in range(0, output.nbytes, BLOCK):
            piece = block[: output.nbytes - begin]
            merger.files.read(str(output.path), begin, piece)
            file.write(piece)
        file.flush()
        shutil.copystat(output.path, file.name)
        return
    with torch_file(file, os.path.basename(output.name).removesuffix(".pt"), output.value) as records:
        for key, content in output.contents.items():
            records.add_storage(key, content.nbytes, merger.blocks(content, output.name))
