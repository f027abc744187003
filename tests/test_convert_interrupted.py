"""A conversion that is killed never looks complete, and the next run ends in the identical result."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt_patches.convert.convert import LATEST, MARK
from ckpt_patches.convert.output_files import CopiedOutput
from ckpt_patches.errors import UserError
from ckpt_patches.runtime.unfinished import UnfinishedFolder
from universal import command, distinct, environment, files, ours, parallel, summary
from upstream import PROGRAMS, TIMEOUT, all_releases
from zero_checkpoints import dp768

POINTS = range(0, 60, 1 if all_releases() else 4)


@pytest.fixture(scope="module")
def source() -> Path:
    return parallel("fused")["fused"]


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("expected") / "universal"
    ours(source, output)
    return files(output)


def killed(source: Path, output: Path, point: int) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, *map(str, (PROGRAMS / "killed_in_time.py", "convert", source, output, point))]
    return subprocess.run(arguments, env=environment(), capture_output=True, text=True, check=False)


def looks_complete(output: Path) -> bool:
    return output.exists() or (output.parent / LATEST).exists()


def check_what_has_its_name(output: Path, expected: dict[str, bytes]) -> None:
    """The folder has its own name, and the marker is there, only when every file is there and whole."""
    if output.exists():
        assert {name: data for name, data in files(output).items() if name != MARK} == expected
    else:
        assert not (output.parent / LATEST).exists()


def finished(output: Path) -> bool:
    """Whether a conversion has come to its end; it may have been killed after that, before its process ended."""
    return (output.parent / LATEST).exists() and not (output / MARK).exists()


def whole_files(output: Path) -> int:
    """Those of an unfinished conversion that have their own names."""
    return distinct(output.with_name(f"{output.name}.unfinished"))


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_change_of_the_file_system(
    point: int, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    output = tmp_path / "universal"
    done = killed(source, output, point)
    if done.returncode == 0:
        assert done.stdout == "done\n"
        assert files(output) == expected
        return
    assert done.returncode == -signal.SIGKILL
    check_what_has_its_name(output, expected)
    before = distinct(output) if output.exists() else whole_files(output)

    again = summary(source, output)
    assert (again["files_before"], again["files"]) == (before, distinct(output) - before)
    assert files(output) == expected
    assert sorted(os.listdir(tmp_path)) == [LATEST, "universal"]
    assert (tmp_path / LATEST).read_text() == "universal"


@pytest.mark.slow
def test_killed_at_any_time_with_several_workers(tmp_path: Path) -> None:
    """In the middle of a file as well: the parent is killed alone, and its workers end by themselves."""
    source, output = dp768()["dp768"], tmp_path / "universal"
    ours(source, tmp_path / "expected" / "universal")
    expected = files(tmp_path / "expected" / "universal")
    delay, processes = 0.05, []
    while not finished(output):
        process = subprocess.Popen(
            command(source, output, "--bytes_in_flight", "16K"), env=environment(), stdout=subprocess.PIPE
        )
        processes.append(process)
        time.sleep(delay)
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL)
        check_what_has_its_name(output, expected)
        delay *= 1.3
    assert any(process.returncode for process in processes)
    assert files(output) == expected
    for process in processes:
        process.communicate(timeout=TIMEOUT)  # until the last of its workers has ended as well


@pytest.mark.slow
def test_a_second_conversion_into_the_same_folder_is_refused(tmp_path: Path) -> None:
    """Their temporary files could have the same names: processes of two containers have the same numbers."""
    source, output = dp768()["dp768"], tmp_path / "universal"
    options = ("--bytes_in_flight", "16K", "--num_extract_workers", "1")
    first = subprocess.Popen(command(source, output, *options), env=environment(), stdout=subprocess.PIPE)
    while not any(output.with_name("universal.unfinished").rglob("*.pt")):
        assert first.poll() is None
    first.send_signal(signal.SIGSTOP)
    second = ours(source, output, check=False)
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 2
    assert "another conversion writes" in second.stderr
    first.communicate(timeout=TIMEOUT)
    assert first.returncode == 0
    ours(source, tmp_path / "expected" / "universal")
    assert files(output) == files(tmp_path / "expected" / "universal")


def test_a_changed_checkpoint_is_not_taken_up_again(source: Path, tmp_path: Path) -> None:
    """Half of one checkpoint and half of another would look like one."""
    copy, output = shutil.copytree(source, tmp_path / "in" / source.name), tmp_path / "universal"
    interrupted(copy, output)
    rank = next(copy.glob("*rank_1*optim_states.pt"))
    os.utime(rank, ns=(0, 0))
    done = ours(copy, output, check=False)
    assert done.returncode == 2
    assert "universal.unfinished holds the unfinished conversion of another checkpoint" in done.stderr
    shutil.rmtree(tmp_path / "universal.unfinished")
    ours(copy, output)


def test_a_checkpoint_by_its_relative_and_by_its_absolute_path_is_one(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion that was interrupted goes on."""
    copy, output = shutil.copytree(source, tmp_path / "in" / source.name), tmp_path / "universal"
    interrupted(copy, output)
    monkeypatch.chdir(copy.parent)
    assert summary(Path(copy.name), output)["files_before"] > 0


def test_processes_of_one_number_in_two_containers_do_not_share_temporary_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both begin an output folder together; one would take the other's file away before it has its name."""
    replace, folders = (
        os.replace,
        [UnfinishedFolder(tmp_path / "universal", "same", MARK, "conversion") for _ in range(2)],
    )

    def first_the_other_one(temporary: Path, path: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        folders[1].begin()
        replace(temporary, path)

    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(os, "replace", first_the_other_one)
    folders[0].begin()
    assert os.listdir(tmp_path / "universal.unfinished") == [MARK]


def interrupted(source: Path, output: Path) -> None:
    killed(source, output, 40)
    assert whole_files(output)


# A full disk


def test_a_full_disk_is_found_before_the_start(tmp_path: Path) -> None:
    folder = UnfinishedFolder(tmp_path / "a" / "universal", "", MARK, "conversion")
    folder.check([CopiedOutput("x", 0, 1)])
    with pytest.raises(UserError, match=rf"universal needs 909\.5 TiB, and {tmp_path} has .* [GT]iB free"):
        folder.check([CopiedOutput("x", 0, 10**15)])


def test_a_disk_that_fills_up_is_reported_with_the_path(
    source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """By a limit on the size of files, which fails like a full disk. Nothing is lost, and the next run goes on."""
    output = tmp_path / "universal"
    largest = max(map(len, expected.values()))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, resource.RLIM_INFINITY))

    done = subprocess.run(
        command(source, output), env=environment(), capture_output=True, text=True, preexec_fn=limited
    )
    assert done.returncode == 2
    path = rf"{tmp_path}/universal\.unfinished/mp_rank_0\d_model_states\.pt"
    assert re.fullmatch(rf"ds_to_universal: {path} cannot be written: File too large\n", done.stderr)
    assert not looks_complete(output)
    ours(source, output)
    assert files(output) == expected


def test_the_summary_of_a_run_that_had_nothing_to_do(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """Killed between the last file and `latest_universal`."""
    output = tmp_path / "universal"
    ours(source, output)
    interrupted(source, tmp_path / "other")
    working = tmp_path / "other.unfinished"
    shutil.copy(working / MARK, output / MARK)
    (tmp_path / LATEST).unlink()
    found = json.loads(ours(source, output, "--json").stdout)
    assert (found["files"], found["files_before"]) == (0, distinct(output))
    assert (tmp_path / LATEST).read_text() == "universal"
    assert files(output) == expected
