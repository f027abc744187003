"""`ckpt-patches resume-from`: the newest good checkpoint of a run, in a form that scripts can use."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import checkpoint

import test_audit_safetensors
from ckpt_patches.audit import resume_from as resume_from_module
from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, UNKNOWN, WHOLE, audit_structure
from ckpt_patches.cli import main
from every_checkpoint import EVERY, UNIVERSAL
from plain_runs import NOT_FINITE, save
from zero_checkpoints import trained

ZERO = "global_step2"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three whole saves."""
    for step in (2, 4, 10):  # by name, step-10 comes before step-2
        save(tmp_path / "run", step)
    return tmp_path / "run"


@pytest.fixture
def zero_run(tmp_path: Path) -> Path:
    """A DeepSpeed run: one checkpoint, and `latest`, which names it."""
    shutil.copytree(trained("0.19.8", "stage1")["stage1"], tmp_path / "zero" / ZERO)
    (tmp_path / "zero" / "latest").write_text(ZERO)
    return tmp_path / "zero"


class Said(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def resume_from(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str | Path) -> Said:
        status = main(["resume-from", *map(str, arguments)])
        return Said(status, *capsys.readouterr())

    return call


# Which one


def test_the_newest_is_the_answer_and_no_older_one_is_read(
    run: Path, resume_from: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def listed(path: Path) -> Any:
        read.append(path.name)
        return audit_structure(path)

    monkeypatch.setattr(resume_from_module, "audit_structure", listed)
    said = resume_from(run)
    assert said == (0, f"{run / 'step-10'}\n", f"ckpt-patches: {run / 'step-10'}: WHOLE\n")
    assert read == ["step-10"]
    found = checkpoint.FileSystemReader(said.out.strip()).read_metadata()  # as torch takes it
    assert "model.0.weight" in found.state_dict_metadata


def test_damaged_elements_are_found_unless_structure_alone_is_asked_for(run: Path, resume_from: Any) -> None:
    newest = save(run, 12, damaged=True)
    said = resume_from(run)
    assert said[:2] == (0, f"{run / 'step-10'}\n")
    assert f"skipped {newest}: DAMAGED: not_finite optimizer.state.0.weight.{NOT_FINITE}" in said.err
    said = resume_from(run, "--quick")
    assert said[:2] == (0, f"{newest}\n")
    assert said.err == f"ckpt-patches: structure only, no element was read: {newest}\n"


@pytest.mark.parametrize("options", [(), ("--quick",)], ids=["", "quick"])
def test_a_save_that_lacks_files_is_skipped(run: Path, options: tuple[str, ...], resume_from: Any) -> None:
    next((run / "step-10").glob("*.distcp")).unlink()
    (run / "step-4" / ".metadata").unlink()
    said = resume_from(run, *options)
    assert said[:2] == (0, f"{run / 'step-2'}\n")
    first, second, _ = said.err.splitlines()
    assert first.startswith(f"ckpt-patches: skipped {run / 'step-10'}: DAMAGED: bad_file ")
    assert second.startswith(f"ckpt-patches: skipped {run / 'step-4'}: INCOMPLETE: incomplete_save ")


@pytest.mark.parametrize("options", [(), ("--quick",)], ids=["", "quick"])
def test_deepspeed_with_an_incomplete_save_and_trackers(
    zero_run: Path, options: tuple[str, ...], resume_from: Any
) -> None:
    (zero_run / "global_step3").mkdir()
    shutil.copy(zero_run / ZERO / "mp_rank_00_model_states.pt", zero_run / "global_step3")
    (zero_run / "latest").write_text("global_step7")  # it was removed
    said = resume_from(zero_run, "--format", "tag", *options)
    assert said[:2] == (0, f"{ZERO}\n")
    removed, unfinished, found, tracker = said.err.splitlines()
    assert removed.startswith(f"ckpt-patches: skipped {zero_run / 'global_step7'}: INCOMPLETE: incomplete_save")
    assert unfinished.startswith(f"ckpt-patches: skipped {zero_run / 'global_step3'}: INCOMPLETE: incomplete_save")
    assert found.endswith(f"; tag {ZERO} in {zero_run}")
    assert tracker.startswith("ckpt-patches: latest names global_step7, not this one: ")
    (zero_run / "latest").write_text("")
    assert resume_from(zero_run, *options).err.splitlines()[-1].startswith("ckpt-patches: latest names no checkpoint")
    (zero_run / "latest").write_text(ZERO)
    assert "latest" not in resume_from(zero_run, *options).err


def test_an_unproven_newest_is_skipped_and_named_if_none_is_good(zero_run: Path, resume_from: Any) -> None:
    newest = zero_run / "global_step4"
    shutil.copytree(zero_run / ZERO, newest)  # another number than the steps that the files state
    said = resume_from(zero_run)
    assert said[:2] == (0, f"{zero_run / ZERO}\n")
    assert f"skipped {newest}: UNKNOWN: unusual " in said.err
    shutil.rmtree(zero_run / ZERO)
    said = resume_from(zero_run)
    assert said[:2] == (1, "")
    *_, last = said.err.splitlines()
    assert last.startswith(
        f"ckpt-patches: no checkpoint in {zero_run} is verified as good; the newest without damage is {newest}, "
        "which is UNKNOWN: unusual "
    )
    assert last == f"{last.partition(': unusual ')[0]}{said.err.splitlines()[0].partition('UNKNOWN')[2]}"


def test_all_are_damaged(run: Path, resume_from: Any) -> None:
    for path in run.iterdir():
        next(path.glob("*.distcp")).write_bytes(b"")
    for options in ((), ("--quick",)):
        said = resume_from(run, *options)
        assert said[:2] == (1, "")
        *_, last = said.err.splitlines()
        assert last == f"ckpt-patches: no checkpoint in {run} is verified as good, all are damaged or incomplete"


def test_the_number_of_saves_that_are_read_can_be_limited(run: Path, resume_from: Any) -> None:
    next((run / "step-10").glob("*.distcp")).unlink()
    said = resume_from(run, "--max", "1")
    assert said[:2] == (1, "")
    assert said.err.endswith("is verified as good, all are damaged or incomplete; 2 older ones were not read (--max)\n")
    assert resume_from(run, "--max", "2")[:2] == (0, f"{run / 'step-4'}\n")


def test_a_universal_folder_is_for_another_kind_of_load(tmp_path: Path, resume_from: Any) -> None:
    """It is the answer if no other kind is beside it, or if it is named."""
    kind = UNIVERSAL["universal of stage 2"]
    universal, source = tmp_path / "run" / "global_step9_universal", tmp_path / "run" / ZERO
    shutil.copytree(kind.path, universal)
    shutil.copytree(EVERY["stage 2"].path, source)
    (tmp_path / "run" / "latest_universal").write_text(universal.name)
    said = resume_from(tmp_path / "run")
    assert said[:2] == (0, f"{source}\n")
    assert f"skipped {universal}: a universal checkpoint" in said.err
    assert "latest_universal" not in said.err  # DeepSpeed reads it with "load_universal" alone
    next(source.glob("*optim_states.pt")).unlink()
    said = resume_from(tmp_path / "run")
    assert said[:2] == (1, "")
    assert said.err.endswith(f"no checkpoint in {tmp_path / 'run'} is verified as good\n")  # the universal one may be
    universal.rename(universal.with_name("universal"))
    (tmp_path / "run" / "latest").write_text("global_step8")
    for path in (tmp_path / "run" / "universal", tmp_path / "run"):
        said = resume_from(path)
        assert said[:2] == (0, f"{tmp_path / 'run' / 'universal'}\n")
        assert '"load_universal": true' in said.err
        assert "latest_universal names global_step9_universal, not this one" in said.err
        shutil.rmtree(source, ignore_errors=True)


def test_exported_models_are_passed_over(run: Path, resume_from: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("step-11", "final"):
        (run / name).mkdir()
        test_audit_safetensors.written(run / name / "model.safetensors", {"weight": torch.ones(2, 3)})
    said = resume_from(run)
    assert said[:2] == (0, f"{run / 'step-10'}\n")
    assert f"skipped {run / 'step-11'}: weights without an optimizer" in said.err
    assert resume_from(run, "--max", "1")[:2] == (1, "")  # older ones can have an optimizer
    for path in run.glob("step-[0-9]"), run.glob("step-10"):
        for each in path:
            shutil.rmtree(each)
    said = resume_from(run)
    assert said[:2] == (1, "")
    assert f"no checkpoint in {run} can be resumed from: all have weights without an optimizer" in said.err
    assert said.err.endswith(f"the newest is {run / 'step-11'}\n")
    assert resume_from(run, "--allow-empty")[:2] == (1, "")  # a training that began anew could overwrite them
    main(["audit", str(run)])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"resume from: no checkpoint in {run} has an optimizer; no tracker names a checkpoint"
    assert main(["audit", str(run), "--html", str(run.parent / "page.html")]) == 0
    page = (run.parent / "page.html").read_text()
    assert "Take a save with an optimizer" in page
    assert "none can be repaired" not in page


def test_a_link_to_another_run_is_not_the_answer(run: Path, tmp_path: Path, resume_from: Any) -> None:
    (run / "step-90").symlink_to(save(tmp_path / "other", 90))
    (run / "last").symlink_to("step-2")
    said = resume_from(run)
    assert said[:2] == (0, f"{run / 'step-10'}\n")
    assert f"skipped {run / 'step-90'}: a link to another folder" in said.err


# Which run


@pytest.mark.parametrize("name", ["metadata.json", ".metadata", "common.pt", "model.safetensors", "run.log", ".nfs01"])
def test_a_stray_file_changes_nothing(run: Path, tmp_path: Path, name: str, resume_from: Any) -> None:
    content = {".metadata": b"\x80\x04}.", "metadata.json": b'{"sharded_backend": "torch_dist"}'}
    for folder in (run, tmp_path):
        (folder / name).write_bytes(content.get(name, b"{}"))
        if name == "model.safetensors":
            test_audit_safetensors.written(folder / name, {"weight": torch.ones(2, 3)})
    for folder in (run, tmp_path):
        assert resume_from(folder)[:2] == (0, f"{run / 'step-10'}\n")


def test_the_current_folder(run: Path, resume_from: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert resume_from(".")[:2] == (0, "step-10\n")
    assert resume_from() == resume_from(".")
    assert resume_from(".", "--format", "step")[:2] == (0, "10\n")
    monkeypatch.chdir(run / "step-4")
    assert resume_from(".", "--format", "tag")[:2] == (0, "step-4\n")


def test_a_save_is_deleted_meanwhile(run: Path, resume_from: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings remove old saves while others look at them."""

    def removed(path: Path) -> Any:
        if path.name == "step-10":
            shutil.rmtree(path, ignore_errors=True)
        return audit_structure(path)

    monkeypatch.setattr(resume_from_module, "audit_structure", removed)
    said = resume_from(run)
    assert said[:2] == (0, f"{run / 'step-4'}\n")
    assert f"skipped {run / 'step-10'}: INCOMPLETE: " in said.err


def test_several_runs_have_no_common_answer(run: Path, tmp_path: Path, resume_from: Any) -> None:
    shutil.copytree(run, tmp_path / "other")
    said = resume_from(tmp_path)
    assert said[:2] == (2, "")
    assert said.err == f"ckpt-patches: {tmp_path}: expected one run, found 2; name one: {tmp_path / 'other'} {run}\n"
    for each in (tmp_path / "other", run):
        assert resume_from(each)[:2] == (0, f"{each / 'step-10'}\n")


def test_a_run_whose_saves_are_all_unfinished_is_a_run(run: Path, tmp_path: Path, resume_from: Any) -> None:
    (tmp_path / "other" / "iter_0000007").mkdir(parents=True)
    assert resume_from(tmp_path)[:2] == (2, "")


def test_saves_below_the_saves_of_a_run_are_not_considered(run: Path, resume_from: Any) -> None:
    """Frameworks load direct ones, too. Backups, or Megatron's folder `non_persistent`, are runs of their own."""
    newer = save(run / "backup", 30)
    assert resume_from(run)[:2] == (0, f"{run / 'step-10'}\n")
    assert resume_from(run / "backup")[:2] == (0, f"{newer}\n")


def test_one_run_in_a_subfolder(run: Path, tmp_path: Path, resume_from: Any) -> None:
    """Its path is clear. A tag or a step would be looked for in the folder that was named."""
    assert resume_from(tmp_path)[:2] == (0, f"{run / 'step-10'}\n")
    for kind in ("tag", "step"):
        said = resume_from(tmp_path, "--format", kind)
        assert said[:2] == (2, "")
        assert f"found the run in {run}; name that" in said.err


def test_folders_without_a_checkpoint(tmp_path: Path, resume_from: Any) -> None:
    assert resume_from(tmp_path) == (1, "", f"ckpt-patches: no checkpoint in {tmp_path}\n")
    (tmp_path / "latest").write_text("")
    assert resume_from(tmp_path)[:2] == (1, "")
    absent = tmp_path / "absent"
    said = resume_from(absent)
    assert said == (2, "", f"ckpt-patches: {absent}: expected the folder of a run, found nothing\n")


def test_a_first_start_needs_no_checkpoint(run: Path, tmp_path: Path, resume_from: Any) -> None:
    (tmp_path / "void" / "logs").mkdir(parents=True)
    (tmp_path / "void" / "logs" / "events.txt").touch()
    for path in (tmp_path / "void", tmp_path / "absent"):
        assert resume_from(path, "--allow-empty")[:2] == (0, "")
    assert resume_from(run, "--allow-empty") == resume_from(run)
    for path in run.iterdir():
        next(path.glob("*.distcp")).unlink()
    assert resume_from(run, "--allow-empty")[:2] == (1, "")  # to begin anew would be wrong
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert resume_from(tmp_path / "link", "--allow-empty")[:2] == (2, "")


@pytest.mark.parametrize("name", ["epoch=1-step=200.ckpt", "checkpoints/model_200.pt"])
def test_a_file_that_can_be_a_checkpoint_is_not_nothing(name: str, tmp_path: Path, resume_from: Any) -> None:
    """Lightning saves one file without sharding, and other scripts one of torch.save: to begin anew would be wrong."""
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    torch.save({"state_dict": {"weight": torch.ones(3)}}, file)
    said = resume_from(tmp_path / "run", "--allow-empty")
    assert said[:2] == (1, "")
    assert said.err == f"ckpt-patches: no checkpoint of a known format in {tmp_path / 'run'}, but {file}\n"


# What is printed


def megatron(kind: str, tmp_path: Path) -> Path:
    source = EVERY[kind].path
    return Path(shutil.copytree(source, tmp_path / "run" / source.name))


@pytest.mark.parametrize("kind", ["0.14, zarr", "0.14, torch_dist", "0.14, torch", "0.19, fully_reshardable"])
def test_megatron_takes_a_folder_and_a_step(kind: str, tmp_path: Path, resume_from: Any) -> None:
    path = megatron(kind, tmp_path)
    step = int(path.name.removeprefix("iter_"))
    assert resume_from(tmp_path / "run", "--format", "step")[:2] == (0, f"{step}\n")
    said = resume_from(tmp_path / "run")
    assert said == (0, f"{path}\n", f"ckpt-patches: {path}: WHOLE; --load {path.parent} --ckpt-step {step}\n")


def test_the_trainer_takes_its_own_folder(zero_run: Path, resume_from: Any) -> None:
    """It has DeepSpeed's folder in it, and weights beside that."""
    path = zero_run / "checkpoint-2"
    path.mkdir()
    shutil.move(zero_run / ZERO, path / ZERO)
    shutil.move(zero_run / "latest", path / "latest")
    test_audit_safetensors.written(path / "model.safetensors", {"weight": torch.ones(2, 3)})
    said = resume_from(zero_run)
    assert said == (0, f"{path}\n", f"ckpt-patches: {path}: WHOLE; resume_from_checkpoint='{path}'\n")
    assert resume_from(zero_run, "--format", "tag").out == "checkpoint-2\n"
    assert resume_from(zero_run, "--format", "step").out == "2\n"


def test_a_name_without_a_step_has_none(run: Path, resume_from: Any) -> None:
    (run / "step-10").rename(run / "last")
    assert resume_from(run).out == f"{run / 'last'}\n"  # its optimizer's step is in its files
    said = resume_from(run, "--format", "step")
    assert said[:2] == (2, "")
    assert "expected a step in its name for --format step, found none" in said.err


def test_json_has_the_answer_and_the_reasons(run: Path, zero_run: Path, resume_from: Any) -> None:
    newest = save(run, 12, damaged=True)
    found = json.loads(resume_from(run, "--json").out)
    assert found["resume_from"] == str(run / "step-10")
    assert (found["tag"], found["step"], found["undecided"]) == ("step-10", 10, None)
    assert [(own["path"], own["verdict"]) for own in found["skipped"]] == [(str(newest), DAMAGED)]
    (zero_run / ZERO).rename(zero_run / "global_step4")
    said = resume_from(zero_run, "--json")
    found = json.loads(said.out)
    assert (said.status, found["resume_from"], found["undecided"]) == (1, None, str(zero_run / "global_step4"))
    assert {(Path(own["path"]).name, own["verdict"]) for own in found["skipped"]} == {
        (ZERO, INCOMPLETE),
        ("global_step4", UNKNOWN),
    }
    found = json.loads(resume_from(run, "--json", "--quick").out)
    assert (found["resume_from"], found["structure_only"]) == (str(newest), True)


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["", "json"])
def test_a_structure_alone_is_never_called_whole(run: Path, options: tuple[str, ...], resume_from: Any) -> None:
    next((run / "step-10").glob("*.distcp")).unlink()
    said = resume_from(run, "--quick", *options)
    assert said.status == 0
    assert WHOLE not in said.out + said.err
    assert said.err.count("structure only") == 1


def command(*arguments: str | bytes | Path, **options: Any) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run([sys.executable, "-m", "ckpt_patches", "resume-from", *arguments], check=False, **options)


@pytest.mark.parametrize("name", [b"a run", b"$HOME; it's \xff \xc3\xa9"], ids=["spaces", "any bytes"])
def test_a_path_is_printed_as_it_is(run: Path, tmp_path: Path, name: bytes) -> None:
    folder = os.path.join(os.fsencode(tmp_path), name)
    os.rename(run, folder)
    done = command(folder, capture_output=True)
    assert (done.returncode, done.stdout) == (0, os.path.join(folder, b"step-10\n")), done.stderr


def test_a_closed_pipe_is_no_success(run: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = command(run, stdout=pipe, stderr=subprocess.PIPE)
    assert done.returncode == 128 + signal.SIGPIPE
    assert b"Traceback" not in done.stderr


# Structure alone


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kind in EVERY.items() if kind.default])
def test_structure_tells_complete_saves_from_those_with_cut_or_missing_files(name: str, tmp_path: Path) -> None:
    kind = EVERY[name]
    assert audit_structure(kind.path).verdict == WHOLE
    large = max((path for path in kind.path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    for number, size in enumerate((None, 0, large.stat().st_size // 2, large.stat().st_size - 1)):
        folder = shutil.copytree(kind.path, tmp_path / str(number) / kind.path.name)
        file = folder / large.relative_to(kind.path)
        file.unlink() if size is None else os.truncate(file, size)
        assert audit_structure(folder).verdict in (DAMAGED, INCOMPLETE), f"{large.name} of {size} bytes"
