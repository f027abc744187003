"""The output folder: it has another name until the conversion is complete, and can be taken up again until then."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from ckpt_patches import __version__
from ckpt_patches.convert.output_files import Plan
from ckpt_patches.convert.traits import Traits
from ckpt_patches.runtime.unfinished import UnfinishedFolder, reported, write_at_once

FINGERPRINT = ".ds_to_universal.json"
LATEST = "latest_universal"


def fingerprint(plan: Plan, traits: Traits, strict: bool) -> str:
    """Of all that the output depends on. A file of the checkpoint that was written anew has another time."""
    files = [(os.path.abspath(file.path), file.size, file.mtime_ns) for file in plan.files]
    data = json.dumps([__version__, files, sorted(vars(traits).items()), strict])
    return hashlib.sha256(data.encode()).hexdigest()


class OutputFolder(UnfinishedFolder):
    """Where the output goes."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        super().__init__(folder, fingerprint, FINGERPRINT, "conversion")

    def finish(self, plan: Plan, check: Callable[[Path], object], *, sync: bool = True) -> None:
        """Give the complete folder its name, if `check` raises nothing of it, then write `latest_universal`.

        Raises:
            UserError: a file is missing.
        """
        self.check_complete(plan.outputs)
        if not self.is_of_this(self.final):
            folders = self.clean()
            for link in plan.links:
                _link(self.working / link.file, self.working / link.name)
            check(self.working)
            self.rename(folders, sync=sync)
        write_at_once(self.final.parent / LATEST, self.final.name.encode())
        (self.final / FINGERPRINT).unlink()


def _link(file: Path, name: Path) -> None:
    """Give a small file another name; where the file system has no such links, copy it."""
    with reported(name):
        try:
            os.link(file, name)
        except OSError:
            if not name.is_file():  # it is one of an interrupted run
                write_at_once(name, file.read_bytes())
