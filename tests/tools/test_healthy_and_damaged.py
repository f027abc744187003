"""The program that draws checkpoints runs, and its exit status is that of the verdicts."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("healthy_and_damaged.py")


def drawn(only: str, damage: str, seed: int, count: int) -> "subprocess.CompletedProcess[str]":
    options = ["--seed", str(seed), "--count", str(count), "--only", only, "--damage", damage]
    return subprocess.run([sys.executable, PROGRAM, *options], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("only", "damage", "seed", "count", "least"),
    [
        ("dcp: AdamW", "*", 0, 1, 20),
        ("dcp: 2,000 steps", "", 0, 1, 0),  # first moments that decayed to zero, long after the last gradient
        ("dcp: pruned elements", "", 6, 1, 0),  # zeros whose edges are by chance those of others are no lost slice
        pytest.param("ranks: [!s]*", "ranks: fsdp: *", 0, 1, 25, marks=pytest.mark.slow),
        pytest.param("deepspeed: zero [123]", "*", 0, 2, 60, marks=pytest.mark.slow),
        pytest.param("megatron: *, fully_reshardable", "*", 0, 1, 15, marks=pytest.mark.slow),
    ],
)
def test_healthy_kinds_are_whole_and_damaged_ones_are_not(
    only: str, damage: str, seed: int, count: int, least: int
) -> None:
    """But those that the table names as undetectable."""
    done = drawn(only, damage, seed, count)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    damaged = [line for line in done.stdout.splitlines() if line.startswith("damaged") and "  all " not in line]
    assert len(damaged) >= least
