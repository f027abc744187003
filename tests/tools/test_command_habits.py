"""All commands have the same habits: one sentence for a wrong path, with the checkpoint to name; the next step last."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_patches.cli import main
from ckpt_patches.runtime.terminal import Output, take_options
from crafted_files import copied
from megatron_checkpoints import ZARR, written
from old_checkpoints import flattened, settings
from small_tree import command, on_terminal, one_line
from test_audit import lose_both_moments, lose_master
from upstream import REPOSITORY, TIMEOUT
from zero_checkpoints import trained


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DeepSpeed run with two checkpoints and a tracker; the current folder is empty."""
    for step in (2, 10):
        shutil.copytree(trained("0.19.8", "stage1")["stage1"], tmp_path / "run" / f"global_step{step}")
    (tmp_path / "run" / "latest").write_text("global_step10")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tmp_path / "run"


def refused(capsys: pytest.CaptureFixture[str], arguments: str, path: Path) -> str:
    """The line of a command that ends with 2, between "expected a checkpoint …" and its end."""
    assert main([*arguments.split(), str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: expected " in line
    return line.partition(", found ")[2]


@pytest.mark.parametrize("command", ["repair --output new", "to-universal --output new", "fingerprint"])
def test_a_path_that_is_no_checkpoint(command: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run / "global_step10"
    assert refused(capsys, command, run) == f"a folder of 2; name one, such as {newest}"
    assert refused(capsys, command, run / "latest") == f"a tracker; it names {newest}"
    assert refused(capsys, command, run / "absent") == "nothing"
    assert refused(capsys, command, Path()) == "none in this folder (ckpt-patches explain formats)"
    (run / "file").touch()
    assert refused(capsys, command, run / "file") == "a file"


def test_a_path_that_is_no_checkpoint_of_the_kind(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "migrate --output new", run).startswith("a folder of 2; name one")
    assert refused(capsys, "migrate --output new", run / "global_step2").startswith("none in this folder")
    assert refused(capsys, "audit", run / "latest") == f"a tracker; it names {run / 'global_step10'}"
    assert refused(capsys, "audit", run / "absent") == "nothing"
    assert refused(capsys, "resume-from", run / "absent") == "nothing"
    assert refused(capsys, f"compare {run / 'global_step2'}", run).startswith("a folder of 2; name one")


def test_the_last_line_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def last(*arguments: object) -> str:
        assert main([*map(str, arguments)]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    zero = trained("0.19.8", "stage1")["stage1"]
    expected = 'to load it: "checkpoint": {"load_universal": true} and tag universal'
    assert last("to-universal", zero, "--output", tmp_path / "universal") == expected
    old = flattened(tmp_path / "old", {"layer.weight": (6, 4)}, {"layer.weight": (1, 2)}, ranks=3)[0].write(settings())
    migrated = last("migrate", old, "--output", tmp_path / "iter_0000010")
    assert migrated == f"to load it: --load {tmp_path} --ckpt-step 10"
    damaged = copied(written(ZARR).whole[-1], tmp_path)
    lose_master(damaged)
    assert last("repair", damaged, "--output", tmp_path / "repaired").startswith("to resume from it, give it the name")


@pytest.mark.parametrize("stream", [1, 2])
def test_a_closed_stream_changes_no_verdict(stream: int, run: Path) -> None:
    save = str(run / "global_step10")
    for arguments in (["audit", save], ["compare", save, save], ["resume-from", str(run), "--quick"]):
        command = [sys.executable, "-m", "ckpt_patches", *arguments]
        right = subprocess.run(command, capture_output=True, text=True, check=False)
        closed = subprocess.run(
            ["bash", "-c", f'"$@" {stream}>&-', "bash", *command], capture_output=True, text=True, check=False
        )
        assert closed.returncode == right.returncode
        assert "Traceback" not in closed.stdout + closed.stderr
        assert (closed.stdout, closed.stderr) == (("", right.stderr) if stream == 1 else (right.stdout, ""))


def test_a_universal_one_is_converted_already(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["to-universal", str(run / "global_step2"), "--output", "universal"]) == 0
    capsys.readouterr()
    assert main(["to-universal", "universal", "--output", "again"]) == 0
    assert "universal is a universal checkpoint already" in capsys.readouterr().err
    assert not Path("again").exists()


def test_no_word_of_a_long_headline_is_broken(run: Path) -> None:
    path = (run / "global_step2").rename(run / " ".join(["long"] * 30))
    shown = on_terminal("audit", str(path), str(path), columns=80, TERM="dumb")
    lines = shown[shown.index("long") :].splitlines()
    assert max(map(len, lines)) <= 80
    assert path.name in " ".join(shown.split())


def test_a_save_that_is_named_twice_is_judged_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["audit", "--summary", str(run)])
    once = capsys.readouterr()
    assert main(["audit", "--summary", str(run), str(run), str(run / "global_step2")]) == status
    assert capsys.readouterr() == once
    assert "2 checkpoints" in once.out.splitlines()[0]
    linked = run.with_name("linked")
    linked.mkdir()
    (linked / "global_step2").symlink_to(run / "global_step2")
    assert main(["audit", str(run), str(linked)]) == status  # a link of another run is judged there, too
    assert f"{linked / 'global_step2'}: " in capsys.readouterr().out


def test_the_forms_of_an_audit_exclude_each_other(run: Path) -> None:
    for forms in (["--json", "--json-lines"], ["--json", "--summary"], ["--summary", "--markdown"]):
        assert "not allowed with argument" in one_line(command("audit", *forms, str(run)))


def test_findings_have_one_order(tmp_path: Path) -> None:
    damaged = copied(written(ZARR).whole[-1], tmp_path)
    for damage in (lose_master, lose_both_moments):
        damage(damaged)
    outputs = {command("audit", "--notes", str(damaged), PYTHONHASHSEED=str(seed)).stdout for seed in range(3)}
    assert len(outputs) == 1
    assert "lost_master" in outputs.pop()


def test_an_option_of_every_command_is_a_whole_word_of_one_call() -> None:
    given = ["explain", "-quietly failing: error", "-v is wrong", "-vq"]
    assert take_options(["audit", "-q", "--verbose", "--color=never", "--", "-q"]) == ["audit", "--", "-q"]
    assert (Output.quiet, Output.verbose, Output.color) == (True, True, "never")
    assert take_options(given) == given
    assert (Output.quiet, Output.verbose, Output.color) == (False, False, "auto")


def test_the_help_has_groups_and_the_environment() -> None:
    text = command("--help").stdout
    for line in ("fixes:", "checkpoints:", "write the fixes:", "environment variables:", "options of every command:"):
        assert f"\n{line}\n" in text
    for name in ("CKPT_PATCHES ", "CKPT_PATCHES_SKIP", "CKPT_PATCHES_FINGERPRINT", "NO_COLOR"):
        assert f"\n  {name}" in text


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, ()) for name in ("audit", "resume-from", "fingerprint")),
        *((name, ("--output", "new")) for name in ("repair", "migrate", "to-universal")),
        ("compare", (".",)),
    ],
)
def test_without_numpy_a_command_says_what_to_install(name: str, more: tuple[str, ...], tmp_path: Path) -> None:
    program = f"import sys; sys.path[:0] = [{str(REPOSITORY)!r}]; from ckpt_patches.cli import main; sys.exit(main())"
    run = [sys.executable, "-I", "-S", "-c", program, name, str(tmp_path), *more]
    done = subprocess.run(run, capture_output=True, text=True, timeout=TIMEOUT, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith(": needs numpy, which is not installed: pip install numpy\n")
    assert len(done.stderr.splitlines()) == 1
