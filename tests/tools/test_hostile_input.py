"""The program of hostile input finds nothing in a few changes of two formats; all of them take an hour."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("hostile_input.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "only", "audits"),
    [("mutations", "trainer", "20 audit"), ("values", "dcp", "audit")],
)
def test_commands_end_in_a_line(how: str, only: str, audits: str) -> None:
    options = (how, "--only", only, "--count", "1" if how == "values" else "20")
    done = subprocess.run([sys.executable, str(PROGRAM), *options], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert audits in done.stdout
