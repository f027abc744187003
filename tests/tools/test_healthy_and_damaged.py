"""The program that draws checkpoints runs, and its exit status is that of the verdicts."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("healthy_and_damaged.py")


def drawn(only: str, damage: str, seed: int = 0) -> "subprocess.CompletedProcess[str]":
    options = ["--seed", str(seed), "--count", "1", "--only", only, "--damage", damage]
    return subprocess.run([sys.executable, PROGRAM, *options], capture_output=True, text=True)


def test_healthy_kinds_are_whole_and_damaged_ones_are_not() -> None:
    done = drawn("dcp: AdamW", "*: * dropped for *")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[-2:] for line in lines if line[:2] == ["healthy", "all"]] == [["WHOLE", "1/1"]]
    found = [line for line in lines if line[0] == "damaged" and line[1] != "all"]
    assert len(found) == 3
    assert all("DAMAGED" in line for line in found), found


def test_zeros_whose_edges_are_by_chance_those_of_others_are_no_lost_slice() -> None:
    done = drawn("dcp: pruned elements", "", seed=6)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WHOLE 1/1" in done.stdout
