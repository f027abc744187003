"""The output folder: it has another name until the conversion is complete, and can be taken up again until then."""

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ckpt_patches import __version__
from ckpt_patches.errors import UserError
from ckpt_patches.formats.durable import make_folder, sync_folder, write_durably
from deepspeed_patches.ds_to_universal.output_files import Output, Plan
from deepspeed_patches.ds_to_universal.traits import Traits
from deepspeed_patches.ds_to_universal.write import TEMPORARY, reported

FINGERPRINT = ".ds_to_universal.json"
LATEST = "latest_universal"
SPARE = 64 << 20  # bytes that stay free on the disk
TOGETHER = 8  # folders that are waited for at once


def fingerprint(plan: Plan, traits: Traits, strict: bool) -> str:
    """Of all that the output depends on. A file of the checkpoint that was written anew has another time."""
    files = [(os.path.abspath(file.path), file.size, file.mtime_ns) for file in plan.files]
    data = json.dumps([__version__, files, sorted(vars(traits).items()), strict])
    return hashlib.sha256(data.encode()).hexdigest()


def meeting_folder(folder: Path) -> Path:
    """Where the processes of a group meet that write an output folder together."""
    final = Path(os.path.realpath(folder))
    return final.with_name(f"{final.name}.group")


class OutputFolder:
    """Where the output goes: `working` while it is written, `final` in the end."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.final = Path(os.path.realpath(folder))
        self.working = self.final.with_name(f"{self.final.name}.unfinished")
        self.fingerprint = fingerprint

    def check(self) -> None:
        """That the output can be written, or taken up again.

        Raises:
            UserError: something else is there.
        """
        if self._has_fingerprint(self.final):
            return
        if self.final.exists() and (not self.final.is_dir() or any(self.final.iterdir())):
            raise UserError(f"{self.final} exists; name another output folder, or remove it")
        if not self._has_fingerprint(self.working) and self._has_files():
            raise UserError(
                f"{self.working} holds the unfinished conversion of another checkpoint, or of this one before it "
                "changed; remove it to begin anew"
            )

    def _has_files(self) -> bool:
        """Whether anything is in the working folder, but what another process of this conversion just begins with."""
        return self.working.exists() and any(not p.name.startswith(TEMPORARY) for p in self.working.iterdir())

    def begin(self) -> None:
        """Make the folder; what it holds belongs to this conversion from now on."""
        if not self._has_fingerprint(self.final) and not self._has_fingerprint(self.working):
            make_folder(self.working)
            _write_at_once(self.working / FINGERPRINT, json.dumps({"fingerprint": self.fingerprint}).encode())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else writes this folder meanwhile, where locks reach; a file system without them grants all.

        Raises:
            UserError: another conversion does.
        """
        with ExitStack() as stack:
            with suppress(FileNotFoundError):  # it is complete
                file = stack.enter_context(open(self.working / FINGERPRINT, "r+b"))
                # A lock of the process and not of the open file: workers of one that was killed do not hold it.
                _lock(file.fileno(), self.working)
            yield

    def missing(self, outputs: Iterable[Output]) -> list[Output]:
        """What is still to be written. A file has its own name only when it is whole."""
        folder = self.final if self._has_fingerprint(self.final) else self.working
        return [output for output in outputs if not os.path.isfile(f"{folder}/{output.name}")]

    def _clean(self) -> list[str]:
        """Remove what an interrupted run left in the middle of a file; all folders that there are."""
        folders = []
        for folder, _, names in os.walk(self.working):
            folders.append(folder)
            for name in names:
                if name.startswith(TEMPORARY):
                    Path(folder, name).unlink(missing_ok=True)
        return folders

    def check_space(self, outputs: Iterable[Output]) -> None:
        """That the disk has room for these.

        Raises:
            UserError: it says how much is free and how much is needed.
        """
        existing = next(path for path in (self.working, *self.working.parents) if path.exists())
        needed, free = sum(output.nbytes for output in outputs), shutil.disk_usage(existing).free
        if free < needed + SPARE:
            raise UserError(f"{self.final} needs {needed / 1e9:.2f} GB, and {existing} has {free / 1e9:.2f} GB free")

    def finish(self, plan: Plan, *, sync: bool = True) -> None:
        """Give the complete folder its name, then write `latest_universal`.

        Raises:
            UserError: a file is missing.
        """
        missing = self.missing(plan.outputs)
        if missing:
            raise UserError(f"{self.working / missing[0].name} is missing, and {len(missing) - 1} more")
        if not self._has_fingerprint(self.final):
            folders = self._clean()
            for link in plan.links:
                _link(self.working / link.file, self.working / link.name)
            if sync:
                _sync_folders(folders)
            os.rename(self.working, self.final)
        _write_at_once(self.final.parent / LATEST, self.final.name.encode())
        (self.final / FINGERPRINT).unlink()

    def _has_fingerprint(self, folder: Path) -> bool:
        try:
            found = json.loads((folder / FINGERPRINT).read_text())
        except (OSError, ValueError):
            return False
        return bool(found == {"fingerprint": self.fingerprint})


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(f"another conversion writes {folder} now; wait for it, or name another output folder") from None
    except OSError:
        pass  # no locks here


def _link(file: Path, name: Path) -> None:
    """Give a small file another name; where the file system has no such links, copy it."""
    with reported(name):
        try:
            os.link(file, name)
        except OSError:
            if not name.is_file():  # it is one of an interrupted run
                _write_at_once(name, file.read_bytes())


def _write_at_once(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{TEMPORARY}{os.urandom(4).hex()}-{path.name}")
    write_durably(temporary, data)
    os.replace(temporary, path)
    sync_folder(path.parent)


def _sync_folders(folders: Sequence[str]) -> None:
    """Have the names of all files in some folders on the disk; the files are there already.

    Raises:
        OSError: of one of the folders; the others may not be there either.
    """
    errors: list[OSError] = []

    def sync(share: Sequence[str]) -> None:
        try:
            for folder in share:
                sync_folder(Path(folder))
        except OSError as error:  # in a thread it would be printed, and lost
            errors.append(error)

    # Each waits for the disk, and what the disk has to do for one it then does for all.
    others = [threading.Thread(target=sync, args=(folders[index::TOGETHER],)) for index in range(1, TOGETHER)]
    for thread in others:
        thread.start()
    sync(folders[::TOGETHER])
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
