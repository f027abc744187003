"""A conversion or migration that is killed never looks complete, and the next run gives the identical result."""

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt_patches.convert.convert import LATEST
from ckpt_patches.errors import UserError
from ckpt_patches.formats import torch_dist
from ckpt_patches.runtime.unfinished import LOCK, UnfinishedFolder
from old_checkpoints import flattened, settings
from universal import command, environment, files, ours, parallel, summary
from upstream import all_releases, program_file
from zero_checkpoints import dp768

pytestmark = pytest.mark.slow

LAYERS: dict[str, tuple[int, ...]] = {f"layer{number}.weight": (8, 6) for number in range(6)}
BEHIND_THE_END = 1000  # file-system changes


def write_old(folder: Path, shapes: dict[str, tuple[int, ...]] | None = None) -> Path:
    old, _ = flattened(folder, shapes or LAYERS)
    old.object("rng_state/shard_0_1", [1, 2])
    return old.write(settings())


def write_zero(folder: Path) -> Path:
    return shutil.copytree(parallel("fused")["fused"], folder / "global_step7")


@dataclass(frozen=True)
class Tool:
    """A tool to kill, and what it leaves."""

    write: Callable[[Path], Path]  # writes a checkpoint
    beside: tuple[str, ...]  # files beside the finished output
    rewritten: frozenset[str]  # files that are written last, and again by the next run
    changes: int  # file-system changes, after which some files are complete and others are not


TOOLS = {
    "convert": Tool(write_zero, (LATEST,), frozenset(), 32),
    "migrate": Tool(write_old, (), frozenset({"metadata.json", ".metadata"}), 8),
}
POINTS = [
    *(("convert", point) for point in range(0, 48, 1 if all_releases() else 3)),
    *(("migrate", point) for point in range(0, 62, 1 if all_releases() else 6)),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tool.write(tmp_path_factory.mktemp("source") / "in") for name, tool in TOOLS.items()}


@pytest.fixture(scope="module")
def expected(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    found = {}
    for name, source in sources.items():
        output = tmp_path_factory.mktemp("expected") / "output"
        assert killed(name, source, output, BEHIND_THE_END).stdout == "done\n"
        found[name] = files(output)
    return found


@pytest.fixture
def source(sources: dict[str, Path]) -> Path:
    return sources["convert"]


def killed(name: str, source: Path, output: Path, point: int) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, *map(str, (program_file("killed_in_time"), name, source, output, point))]
    return subprocess.run(arguments, env=environment(), capture_output=True, text=True, check=False)


def unfinished(output: Path) -> Path:
    """The folder that is not finished; the finished one if there is none."""
    return next(output.parent.glob(f"{output.name}-*.unfinished"), output)


def complete_files(output: Path) -> dict[str, int]:
    """The inodes of the files that have their final names."""
    folder = unfinished(output)
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".unfinished-"))
    return {str(path.relative_to(folder)): path.stat().st_ino for path in found if path.name != LOCK}


def check_what_has_its_name(tool: Tool, output: Path, expected: dict[str, bytes]) -> None:
    """Check that the output folder, and files beside it, exist only if every file is complete.

    What names the folder is written just before the folder gets that name.
    """
    if output.exists():
        assert files(output) == expected
    elif any((output.parent / name).exists() for name in tool.beside):
        assert complete_files(output).keys() == expected.keys()


@pytest.mark.parametrize(("name", "point"), POINTS)
def test_killed_at_any_change_of_the_file_system(
    name: str, point: int, sources: dict[str, Path], expected: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    tool, source, output = TOOLS[name], sources[name], tmp_path / "output"
    done = killed(name, source, output, point)
    if done.returncode == 0:
        assert done.stdout == "done\n"
        assert point > tool.changes
        assert files(output) == expected[name]
        return
    assert done.returncode == -signal.SIGKILL
    check_what_has_its_name(tool, output, expected[name])
    if output.exists():  # it was killed after its last change that counts
        return
    before = complete_files(output)

    again = killed(name, source, output, BEHIND_THE_END)
    assert (again.returncode, again.stdout) == (0, "done\n"), again.stderr
    assert files(output) == expected[name]
    after = complete_files(output)
    assert {own for own, inode in before.items() if after[own] != inode} <= tool.rewritten
    assert sorted(os.listdir(tmp_path)) == sorted(["output", *tool.beside])
    assert all((tmp_path / own).read_text() == "output" for own in tool.beside)


def test_some_kills_come_when_some_files_are_complete(sources: dict[str, Path], tmp_path: Path) -> None:
    for name, tool in TOOLS.items():
        killed(name, sources[name], tmp_path / name, tool.changes)
        assert not (tmp_path / name).exists()
        assert complete_files(tmp_path / name)


def killed_at_any_time(arguments: list[str], output: Path, delay: float) -> None:
    """Kill only the parent, also in the middle of a file, until the work ends; its workers end by themselves."""
    processes = []
    while not output.exists():
        process = subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        processes.append(process)
        time.sleep(delay)
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL)
        delay *= 1.3
    assert any(process.returncode for process in processes)
    assert unfinished(output) == output
    for process in processes:
        process.communicate(timeout=300)  # until the last of its workers has ended


@pytest.mark.slow
def test_a_conversion_killed_at_any_time_with_several_workers(tmp_path: Path) -> None:
    source, output = dp768()["dp768"], tmp_path / "universal"
    ours(source, tmp_path / "expected" / "universal")
    killed_at_any_time(command(source, output), output, 0.05)
    assert files(output) == files(tmp_path / "expected" / "universal")


@pytest.mark.slow
def test_a_migration_killed_at_any_time_with_two_workers(tmp_path: Path) -> None:
    source = write_old(tmp_path / "old", {f"layer{number}.weight": (1024, 1024) for number in range(24)})
    output = tmp_path / "new"
    arguments = [sys.executable, "-m", "ckpt_patches", "migrate", str(source), "--output", str(output)]
    killed_at_any_time([*arguments, "--workers", "2"], output, 0.2)
    index = torch_dist.read_index(output)
    assert len(index.tensors) == 24 * 4
    assert all(tensor.chunks.keys() == tensor.places.keys() for tensor in index.tensors.values())


@pytest.mark.slow
def test_a_second_conversion_into_the_same_folder_is_refused(tmp_path: Path) -> None:
    """The second is refused, as PIDs and so temporary names may be equal in two containers."""
    source, output = dp768()["dp768"], tmp_path / "universal"
    options = ("--num_extract_workers", "1")
    first = subprocess.Popen(command(source, output, *options), env=environment(), stdout=subprocess.PIPE)
    while not any(unfinished(output).rglob("*.pt")):
        assert first.poll() is None
    first.send_signal(signal.SIGSTOP)
    second = ours(source, output, check=False)
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 2
    assert "another conversion writes" in second.stderr
    first.communicate(timeout=300)
    assert first.returncode == 0
    ours(source, tmp_path / "expected" / "universal")
    assert files(output) == files(tmp_path / "expected" / "universal")


@pytest.mark.parametrize("name", TOOLS)
def test_a_changed_checkpoint_is_begun_anew(name: str, tmp_path: Path) -> None:
    """The output would mix two checkpoints. What there was of it is removed."""
    tool, output = TOOLS[name], tmp_path / "output"
    source = tool.write(tmp_path / "in")
    assert killed(name, source, output, tool.changes).returncode == -signal.SIGKILL
    os.utime(next(iter([*source.glob("*rank_1*optim_states.pt"), *source.glob("__1_0.distcp")])), ns=(0, 0))
    before = unfinished(output)
    assert complete_files(output)
    assert killed(name, source, output, BEHIND_THE_END).stdout == "done\n"
    assert not before.exists()
    assert killed(name, source, tmp_path / "expected", BEHIND_THE_END).stdout == "done\n"
    assert files(output) == files(tmp_path / "expected")


def test_a_checkpoint_by_its_relative_and_by_its_absolute_path_is_one(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted conversion continues with either path."""
    copy, output = shutil.copytree(source, tmp_path / "in" / source.name), tmp_path / "universal"
    killed("convert", copy, output, TOOLS["convert"].changes)
    monkeypatch.chdir(copy.parent)
    assert summary(Path(copy.name), output)["files_before"] > 0


# An error of the disk

ERRORS = ("ENOSPC", "EIO", "EROFS", "EDQUOT")
FAILING = [
    pytest.param(name, ERRORS[point % 4], point, marks=[] if point % 15 == 5 else pytest.mark.exhaustive)
    for name, last in (("convert", 60), ("migrate", 75))
    for point in range(last)
]


def failing(error: str, point: int, name: str, source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, *map(str, (program_file("failing_disk"), error, point, name, source, output))]
    return subprocess.run(arguments, env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("name", "error", "point"), FAILING)
def test_an_error_of_the_disk_is_told_and_the_same_command_goes_on(
    name: str, error: str, point: int, sources: dict[str, Path], expected: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    tool, source, output = TOOLS[name], sources[name], tmp_path / "output"
    done = failing(error, point, name, source, output)
    assert "Traceback" not in done.stderr
    if done.returncode not in (0, 99):  # not one that changes nothing, such as of a file that is removed at the end
        assert done.returncode == 2, done.stderr
        assert os.strerror(getattr(errno, error)) in done.stderr
        check_what_has_its_name(tool, output, expected[name])
        assert failing(error, BEHIND_THE_END, name, source, output).returncode == 99
    assert files(output) == expected[name]
    assert sorted(os.listdir(tmp_path)) == sorted(["output", *tool.beside])


# A full disk


def test_a_full_disk_is_found_before_the_start(tmp_path: Path) -> None:
    folder = UnfinishedFolder(tmp_path / "a" / "universal", "conversion", "", tmp_path / "source")
    folder.check({"x": 1})
    with pytest.raises(UserError, match=rf"universal needs 909\.5 TiB, and {tmp_path} has .* [GT]iB free"):
        folder.check({"x": 10**15})


def test_a_disk_that_fills_up_is_reported_with_the_path(
    source: Path, expected: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    """The path is reported, and the next run continues. A limit on file sizes simulates the full disk."""
    output = tmp_path / "universal"
    largest = max(map(len, expected["convert"].values()))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, resource.RLIM_INFINITY))

    done = subprocess.run(
        command(source, output), env=environment(), capture_output=True, text=True, preexec_fn=limited
    )
    assert done.returncode == 2
    path = rf"{tmp_path}/universal-\w+\.unfinished/mp_rank_0\d_model_states\.pt"
    assert re.fullmatch(rf"ds_to_universal: {path}: File too large\n", done.stderr)
    assert not output.exists()
    check_what_has_its_name(TOOLS["convert"], output, {})
    ours(source, output)
    assert files(output) == expected["convert"]
