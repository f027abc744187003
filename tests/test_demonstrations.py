"""Reading and running demonstrations. tests/contract/test_fix_contract.py runs each fix's."""

import os
import time
from pathlib import Path

import pytest

from trainers import run as running
from trainers.run import Demonstration, DemonstrationFailed, Outcome, environment, read, run


def program(folder: Path, text: str) -> Path:
    path = folder / "some_fix.py"
    path.write_text(text)
    return path


@pytest.mark.quick
def test_what_it_needs_is_read_and_not_imported(tmp_path: Path) -> None:
    found = read(program(tmp_path, '"""save, 4 ranks\n\nMore."""\nBESIDE = {"numpy": "2.2.6"}\nraise OSError\n'))
    assert (found.fix, found.title, found.beside) == ("some_fix", "save, 4 ranks", (("numpy", "2.2.6"),))


@pytest.mark.quick
def test_one_without_a_title_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"some_fix\.py: expected a docstring whose first line is"):
        read(program(tmp_path, "print()\n"))


SWITCHED = """'''Whether the hook is installed'''
import json, os, sys
hook = any(type(finder).__name__ == "PatchFinder" for finder in sys.meta_path)
print("more")
print(json.dumps({"bug": not hook, "found": os.environ.get("RANK", "no rank")}))
"""


@pytest.mark.quick
@pytest.mark.parametrize("patched", [True, False])
def test_it_runs_with_the_hook_on_or_off(patched: bool, tmp_path: Path) -> None:
    """It runs with the hook on or off, and without a launcher's variables."""
    environ = environment({"PATH": "/usr/bin", "RANK": "1", "CKPT_PATCHES": "off"}, patched=patched)
    assert run(read(program(tmp_path, SWITCHED)), environ) == Outcome(not patched, "no rank")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("raise OSError('full')", "exit status 1:\n.*OSError: full"),
        ("print('no outcome')", "exit status 0:\nno outcome"),
        ("print('[]')", r"exit status 0:\n\[\]"),
        ("", "exit status 0:"),
    ],
)
def test_one_that_cannot_run_is_an_error_with_its_output(ends: str, said: str, tmp_path: Path) -> None:
    environ = environment({"PATH": "/usr/bin"}, patched=False)
    with pytest.raises(DemonstrationFailed, match=rf"(?s)some_fix\.py: expected exit status 0.*found {said}"):
        run(read(program(tmp_path, f"'''End otherwise'''\n{ends}\n")), environ)


LEAVES_A_WORKER = """'''Leave a worker behind'''
import os, pathlib, time
worker = os.fork()
if worker == 0:
    time.sleep(600)
    os._exit(0)
new = pathlib.Path(__file__).with_suffix(".new")
new.write_text(str(worker))
new.rename(new.with_suffix(".pid"))  # who finds the file finds the number in it
{then}
print('{{"bug": false, "found": "it"}}')
"""


def leaves_a_worker(folder: Path, then: str = "") -> Demonstration:
    return read(program(folder, LEAVES_A_WORKER.format(then=then)))


def has_ended(left: Demonstration) -> bool:
    """Whether its worker ends within 100 s."""
    process = Path("/proc", left.path.with_suffix(".pid").read_text(), "stat")
    deadline = time.monotonic() + 100
    while process.exists() and process.read_text().split()[2] != "Z":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.quick
def test_workers_that_it_leaves_behind_are_ended(tmp_path: Path) -> None:
    left = leaves_a_worker(tmp_path)
    assert run(left, environment(os.environ, patched=False)) == Outcome(False, "it")
    assert has_ended(left)


@pytest.mark.quick
def test_its_workers_are_ended_when_it_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = leaves_a_worker(tmp_path, then="time.sleep(600)")
    for seconds in (1, 8, 64):  # on a slow machine it may not have begun to wait
        monkeypatch.setattr(running, "TIMEOUT", float(seconds))
        with pytest.raises(DemonstrationFailed, match=f"took longer than {seconds} s"):
            run(left, environment(os.environ, patched=False))
        if left.path.with_suffix(".pid").exists():
            break
    assert has_ended(left)
