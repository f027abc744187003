"""With any bytes changed, an audit returns a verdict within seconds: no traceback, no endless run.

In small checkpoints of every format, each bit outside the tensors' elements is flipped. In all kinds, random bytes are
changed, 1,000 times each. The default run takes a sample of both.
"""

import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from ckpt_patches.audit.audit import EXIT_STATUS, audit
from every_checkpoint import EVERY, tensors
from test_audit_fp8 import masters, saved
from upstream import all_releases, once

pytestmark = pytest.mark.slow

SECONDS = 10  # for an audit that takes 0.01 s
FLIPS = None if all_releases() else 60  # per small checkpoint; None: all
RANDOM = 1000 if all_releases() else 15


class EndlessError(BaseException):
    """Not an Exception: the audit converts those to findings."""


@contextmanager
def time_limit() -> Iterator[None]:
    def end(_signal: int, _frame: FrameType | None) -> None:
        raise EndlessError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def defect_of(folder: Path) -> str:
    """The defects of the audit of a folder; empty if it returned a verdict."""
    try:
        with time_limit():
            report = audit(folder, workers=1)
    except EndlessError:
        return f"no end within {SECONDS} seconds"
    assert report.verdict in EXIT_STATUS
    details = [finding.detail for finding in report.findings if "a defect of the audit" in finding.detail]
    return "; ".join(details)


def kept(source: Path, to: Path, *patterns: str) -> Path:
    """A copy of the matching files of a checkpoint."""
    for file in sorted({file for pattern in patterns for file in source.glob(pattern) if file.is_file()}):
        (to / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to / file.relative_to(source))
    return to


SMALL: dict[str, Callable[[Path], Path]] = {
    "zarr": lambda to: kept(EVERY["0.14, zarr"].path, to, "*.norm.bias/*", "*.json", "common.pt"),
    "torch_dist": lambda to: saved(to, masters()[:4, :4].bfloat16(), masters()[:4, :4]),
    "Megatron's torch": lambda to: kept(EVERY["0.14, torch"].path, to, "mp_rank_00/*"),
    "stage 2": lambda to: kept(EVERY["stage 2"].path, to, "*_rank_0_*", "mp_rank_00_*"),
    "stage 3": lambda to: kept(EVERY["stage 3"].path, to, "*_rank_0_*"),
    "universal": lambda to: kept(EVERY["universal of stage 2"].path, to, "zero/ln.bias/*", "mp_rank_00_*"),
}


def bits(folder: Path) -> list[tuple[Path, int, int]]:
    """The file, byte and bit numbers of everything that is not an element of a tensor."""
    elements: dict[Path, set[int]] = {}
    for place in tensors(folder):
        elements.setdefault(place.path, set()).update(range(place.offset, place.offset + place.nbytes))
    return [
        (path, at, bit)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        for at in range(path.stat().st_size)
        if at not in elements.get(path, ())
        for bit in range(8)
    ]


@pytest.mark.parametrize("name", SMALL)
def test_a_turned_bit_in_any_header_or_metadata_comes_to_a_verdict(name: str, tmp_path: Path) -> None:
    whole = once(f"small-{name}", SMALL[name])
    folder = Path(shutil.copytree(whole, tmp_path / "checkpoint"))
    assert defect_of(folder) == ""
    every = bits(folder)
    assert len(every) > 8 * 1000
    chosen = every if FLIPS is None else random.Random(name).sample(every, FLIPS)
    failed = []
    for path, at, bit in chosen:
        data = path.read_bytes()
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        if found := defect_of(folder):
            failed.append(f"bit {bit} of byte {at} of {path.name}: {found}")
        path.write_bytes(data)
    assert failed == []


@pytest.mark.parametrize("name", [name for name, kind in EVERY.items() if kind.default or all_releases()])
def test_bytes_changed_at_random_come_to_a_verdict(name: str, tmp_path: Path) -> None:
    """An audit with one to four bytes of a file changed returns a verdict. Files are chosen regardless of size."""
    folder = Path(shutil.copytree(EVERY[name].path, tmp_path / "checkpoint"))
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    failed = []
    for seed in range(RANDOM):
        choose = random.Random(seed)
        path = choose.choice(files)
        before = path.read_bytes()
        data = bytearray(before)
        for _ in range(choose.randrange(1, 5)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        path.write_bytes(data)
        if found := defect_of(folder):
            failed.append(f"seed {seed}, {path.name}: {found}")
        path.write_bytes(before)
    assert failed == []
