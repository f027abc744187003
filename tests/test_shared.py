"""Content shared in a run is created by one of many processes, again after a failure, and removed with the last."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shared

# Creates a folder slowly; prints each creation and the content.
ASK = """
import sys, time
import shared

def make(path):
    print("made", flush=True)
    path.mkdir()
    time.sleep(0.3)
    (path / "content").write_text("whole")

print((shared.once("thing", make) / "content").read_text(), shared.folder(), flush=True)
sys.stdin.read()
"""


def ask(run: str) -> "subprocess.Popen[str]":
    """Start another process of a run. It ends when its input closes."""
    return subprocess.Popen(
        [sys.executable, "-c", ASK],
        env={**os.environ, "PYTEST_XDIST_TESTRUNUID": run, "PYTHONPATH": str(Path(shared.__file__).parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read(process: "subprocess.Popen[str]") -> list[str]:
    """Its output, up to the line with the folder."""
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    if lines == ["made\n"]:
        lines.append(process.stdout.readline())
    return lines


def test_many_processes_make_it_once_and_the_last_removes_it(tmp_path: Path) -> None:
    processes = [ask(f"many-{os.getpid()}") for _ in range(3)]
    said = [read(process) for process in processes]
    assert [lines[0] for lines in said].count("made\n") == 1
    (line,) = {lines[-1] for lines in said}
    what, folder = line.split()
    assert what == "whole"
    for process in processes:
        assert Path(folder, "thing", "content").exists()
        assert process.communicate("")[1] == ""
    assert not Path(folder).exists()


def test_what_failed_is_removed_and_made_by_the_next() -> None:
    def fail(path: Path) -> None:
        path.mkdir()
        (path / "half").touch()
        raise ValueError("on purpose")

    def make(path: Path) -> None:
        path.write_text("whole")

    with pytest.raises(ValueError, match="on purpose"):
        shared.once("of this test", fail)
    assert not (shared.folder() / "of this test").exists()
    assert shared.once("of this test", make).read_text() == "whole"
    assert shared.once("of this test", fail).read_text() == "whole"
