"""A migration that is killed never looks complete, and the next one ends in the identical result."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt_patches.formats import torch_dist
from old_checkpoints import flattened, settings
from upstream import PROGRAMS, all_releases

POINTS = range(0, 70, 1 if all_releases() else 6)
SHAPES: dict[str, tuple[int, ...]] = {f"layer{number}.weight": (8, 6) for number in range(6)}
COMMAND = (sys.executable, "-m", "ckpt_patches", "migrate")
# As one that many runs begin with, and not one of them all: no launcher has started it.
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "SLURM", "OMPI"))}


def write(folder: Path, shapes: dict[str, tuple[int, ...]] | None = None) -> Path:
    old, _ = flattened(folder, shapes or SHAPES)
    old.object("rng_state/shard_0_1", [1, 2])
    return old.write(settings())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("source") / "old")


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("expected") / "new"
    assert killed(source, output, 1000).stdout == "done\n"
    return files(output)


def killed(source: Path, output: Path, point: int) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, *map(str, (PROGRAMS / "killed_in_time.py", "migrate", source, output, point))]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, env=ENVIRONMENT)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_change_of_the_file_system(
    point: int, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    output = tmp_path / "new"
    done = killed(source, output, point)
    if done.returncode == 0:
        assert done.stdout == "done\n"
        assert files(output) == expected
        return
    assert done.returncode == -signal.SIGKILL
    if output.exists():  # all that it is to hold is there; what is kept for the next run beside it
        kept = {name: data for name, data in files(output).items() if not name.startswith(".judged")}
        assert {name: kept[name] for name in expected} == expected
        assert kept.keys() - expected.keys() <= {".ckpt-patches-migrate.json"}
    before = {path: path.stat().st_ino for path in tmp_path.glob("new.unfinished/__*.distcp")}
    again = killed(source, output, 1000)
    assert (again.returncode, again.stdout) == (0, "done\n"), again.stderr
    assert files(output) == expected
    assert {(output / path.name).stat().st_ino for path in before} == set(before.values())  # none was written again
    assert sorted(os.listdir(tmp_path)) == ["new"]


def test_a_kill_comes_at_every_kind_of_change(expected: dict[str, bytes]) -> None:
    """There are several files, and the last of the points lies behind the end."""
    assert len([name for name in expected if name.endswith(".distcp")]) >= 3
    assert len(POINTS) > 10


@pytest.mark.slow
def test_killed_at_any_time_with_two_workers(tmp_path: Path) -> None:
    source = write(tmp_path / "old", {f"layer{number}.weight": (1024, 1024) for number in range(24)})
    output = tmp_path / "new"
    delay, deaths = 0.2, 0
    while not output.exists() or (output / ".ckpt-patches-migrate.json").exists():
        process = subprocess.Popen(
            [*COMMAND, source, "--output", output, "--workers", "2"], env=ENVIRONMENT, stderr=subprocess.PIPE
        )
        time.sleep(delay)
        process.kill()
        deaths += process.wait() == -signal.SIGKILL
        delay += 0.2
    assert deaths > 0
    index = torch_dist.read_index(output)
    assert len(index.tensors) == 24 * 4
    assert all(tensor.chunks.keys() == tensor.places.keys() for tensor in index.tensors.values())
    assert not list(tmp_path.glob("new.unfinished"))


def test_a_changed_checkpoint_is_not_taken_up_again(tmp_path: Path) -> None:
    """Half of one checkpoint and half of another would look like one."""
    old = write(tmp_path / "old")
    assert killed(old, tmp_path / "new", 20).returncode == -signal.SIGKILL
    os.utime(old / "__1_0.distcp", ns=(0, 0))
    done = subprocess.run(
        [*COMMAND, old, "--output", tmp_path / "new"], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "new.unfinished holds the unfinished migration of another checkpoint" in done.stderr
