"""A run's folder: the audit reports every save, and the one to resume from."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import test_audit_safetensors
import zero_resumes
from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, UNKNOWN, WHOLE, audit
from ckpt_patches.cli import main
from ckpt_patches.runtime.progress import Progress
from crafted_files import Change, both, copied, found_in, names, with_other_value, without
from megatron_checkpoints import ZARR, written
from zero_checkpoints import trained

ZERO = "global_step2"
Say = pytest.CaptureFixture[str]


@pytest.fixture
def zero_run(tmp_path: Path) -> Path:
    """A DeepSpeed run: one checkpoint, and `latest`, which names it."""
    shutil.copytree(trained("0.19.8", "stage1")["stage1"], tmp_path / "run" / ZERO)
    (tmp_path / "run" / "latest").write_text(ZERO)
    return tmp_path / "run"


@pytest.fixture
def megatron_run(tmp_path: Path) -> Path:
    """A Megatron run: its checkpoints, and a tracker that names the last one."""
    whole = written(ZARR).whole
    for path in whole[-2:]:
        shutil.copytree(path, tmp_path / "run" / path.name)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text(
        whole[-1].name.removeprefix("iter_").lstrip("0")
    )
    return tmp_path / "run"


def audited(run: Path, capsys: Say) -> tuple[int, dict[str, str], str]:
    """The exit status, the verdicts by folder name, and the last line."""
    status = main(["audit", str(run)])
    *_, last = capsys.readouterr().out.splitlines()
    assert main(["audit", "--json", str(run)]) == status
    found = json.loads(capsys.readouterr().out)
    return status, {Path(one["path"]).name: one["verdict"] for one in found["checkpoints"]}, last


def lines_of(capsys: Say, *arguments: object, status: int) -> list[str]:
    assert main(["audit", *map(str, arguments)]) == status
    return capsys.readouterr().out.splitlines()


def latest(name: str) -> Change:
    return lambda run: (run / "latest").write_text(name)


def folder(name: str, file: str = "") -> Change:
    def make(run: Path) -> None:
        (run / name).mkdir()
        if file:
            (run / name / file).write_bytes(b"")

    return make


def interrupted(run: Path) -> None:
    folder("global_step3")(run)
    shutil.copy(run / ZERO / "mp_rank_00_model_states.pt", run / "global_step3")


def damage(run: Path) -> None:
    next((run / ZERO).glob("*optim_states.pt")).write_bytes(b"damaged")


def with_links(run: Path) -> None:
    """A link to a damaged save, another one to the same, and a loop."""
    elsewhere = run.parent / "elsewhere"
    shutil.copytree(run / ZERO, elsewhere)
    next(elsewhere.glob("*optim_states.pt")).write_bytes(b"damaged")
    (run / "global_step4").symlink_to(elsewhere)
    (run / "loop").symlink_to(run)
    (run / "twin").symlink_to(elsewhere)


class Case(NamedTuple):
    """A run's folder: the exit status, the verdicts beside the WHOLE one, and what the last line says."""

    make: Change
    status: int
    others: dict[str, str]
    last: str  # behind the path to resume from


IT, GONE = "; latest names it", "; latest names global_step{}, which is INCOMPLETE"
RUNS: dict[str, Case] = {
    "complete": Case(lambda run: None, 0, {}, IT),
    "no tracker": Case(without("latest"), 0, {}, "; no tracker names a checkpoint"),
    "a save that did not end": Case(
        both(interrupted, latest("global_step3")), 1, {"global_step3": INCOMPLETE}, GONE.format(3)
    ),
    "an empty save": Case(folder("global_step9"), 1, {"global_step9": INCOMPLETE}, IT),
    "an empty save of Megatron": Case(folder("iter_0000009"), 1, {"iter_0000009": INCOMPLETE}, IT),
    "a tracker of nothing": Case(latest("global_step7"), 1, {"global_step7": INCOMPLETE}, GONE.format(7)),
    **{
        f"a tracker that is no name, {len(text)}": Case(latest(text), 1, {"latest": INCOMPLETE}, "; latest")
        for text in ("", "../elsewhere", "x" * 10_000, "\x00")
    },
    "a tool's unfinished folder": Case(
        lambda run: shutil.copytree(run / ZERO, run / "universal.unfinished"),
        1,
        {"universal.unfinished": INCOMPLETE},
        IT,
    ),
    "a copy in a repair's unfinished folder": Case(
        lambda run: shutil.copytree(run / ZERO, run / "new-0123456789ab.unfinished" / ZERO),
        1,
        {"new-0123456789ab.unfinished": INCOMPLETE},
        IT,
    ),
    "another format": Case(folder("global_step5", "model.gguf"), 3, {"global_step5": UNKNOWN}, IT),
    "links": Case(with_links, 1, {"global_step4": DAMAGED}, IT),
}


@pytest.mark.parametrize("what", RUNS)
def test_saves_and_trackers(what: str, zero_run: Path, capsys: Say) -> None:
    case = RUNS[what]
    case.make(zero_run)
    status, verdicts, last = audited(zero_run, capsys)
    assert (status, verdicts) == (case.status, {ZERO: WHOLE, **case.others})
    assert last.startswith(f"resume from: {zero_run / ZERO} (step 2){case.last}")
    assert len(last) < 500


def test_an_interrupted_save_of_megatron_is_incomplete(megatron_run: Path, capsys: Say) -> None:
    before, last_one = sorted(path for path in megatron_run.iterdir() if path.is_dir())
    without("metadata.json", "common.pt")(last_one)
    status, verdicts, last = audited(megatron_run, capsys)
    assert (status, verdicts) == (1, {before.name: WHOLE, last_one.name: INCOMPLETE})
    assert last.endswith(f"; latest_checkpointed_iteration.txt names {last_one.name}, which is INCOMPLETE")


def test_a_good_universal_checkpoint_is_named_if_no_other_is_good(zero_run: Path, capsys: Say) -> None:
    assert main(["to-universal", str(zero_run / ZERO), "--output", str(zero_run / "universal")]) == 0
    next((zero_run / ZERO).glob("*_optim_states.pt")).unlink()
    capsys.readouterr()
    status, verdicts, last = audited(zero_run, capsys)
    assert (status, verdicts) == (1, {ZERO: DAMAGED, "universal": WHOLE})
    assert last.startswith(f"resume from: no checkpoint in {zero_run} that loads as it is, is WHOLE; ")
    assert last.endswith('; not considered, as it needs "load_universal": true: universal')


def test_a_link_out_of_the_folder_is_not_recommended(zero_run: Path, tmp_path: Path, capsys: Say) -> None:
    """A run links the checkpoint that it was fine-tuned from, and a folder of other runs; a tracker can name a link."""
    others = tmp_path / "others"
    shutil.copytree(zero_run / ZERO, others / "run" / "global_step9")
    (zero_run / "pretrained").symlink_to(others / "run" / "global_step9")
    (zero_run / "others").symlink_to(others)
    status, verdicts, last = audited(zero_run, capsys)
    assert (status, verdicts) == (0, {ZERO: WHOLE, "pretrained": WHOLE})
    assert last.startswith(f"resume from: {zero_run / ZERO} ")
    assert last.endswith("; not considered, as it is a link to another folder: pretrained")
    shutil.rmtree(zero_run / ZERO)
    latest("pretrained")(zero_run)
    assert audited(zero_run, capsys)[2].startswith(f"resume from: {zero_run / 'pretrained'} ")


def test_no_checkpoint_to_resume_from(zero_run: Path, capsys: Say) -> None:
    damage(zero_run)
    status, verdicts, last = audited(zero_run, capsys)
    assert (status, verdicts) == (1, {ZERO: DAMAGED})
    assert last == f"resume from: no checkpoint in {zero_run} is WHOLE; latest names {ZERO}, which is DAMAGED"


def test_an_undecided_checkpoint_is_named_if_none_is_whole(zero_run: Path, capsys: Say) -> None:
    (zero_run / ZERO).rename(zero_run / "global_step4")  # another number than the steps that the files state
    both(without("latest"), folder("global_step5"))(zero_run)
    status, verdicts, last = audited(zero_run, capsys)
    assert (status, verdicts) == (1, {"global_step4": UNKNOWN, "global_step5": INCOMPLETE})
    expected = f"resume from: no checkpoint in {zero_run} is WHOLE; the newest without damage is global_step4, "
    assert last == f"{expected}which is UNKNOWN; no tracker names a checkpoint"


def test_one_checkpoint_has_no_line_on_the_run(zero_run: Path, capsys: Say) -> None:
    assert "resume from" not in "".join(lines_of(capsys, zero_run / ZERO, status=0))


def test_a_checkpoint_without_zero_is_audited(tmp_path: Path) -> None:
    """A stage-0 checkpoint in fp16 is WHOLE, and one in bf16 lacks the optimizer state: see bf16_stage0_state."""
    bf16, fp16 = "stage0-2", "stage0_fp16-2"
    run = zero_resumes.trained("0.18.4", "none", bf16, fp16)
    assert found_in(run / bf16 / ZERO) == (DAMAGED, {"missing_state"})
    report = audit(run / fp16 / ZERO)
    assert (report.verdict, names(report)) == (WHOLE, set())
    assert report.checkpoint.step == 2  # the file has 3: DeepSpeed creates the state with an extra step
    path = copied(run / fp16 / ZERO, tmp_path)
    with_other_value(path / "mp_rank_00_model_states.pt", lambda value: main_parameters(value["optimizer"]).clear())
    assert found_in(path) == (DAMAGED, {"missing_state"})


def main_parameters(optimizer: Any) -> Any:
    """The list of those of FP16_Optimizer, or of FP16_UnfusedOptimizer."""
    return optimizer.get("fp32_groups_flat") or optimizer["fp32_groups"]


# Several runs below one folder


@pytest.fixture
def runs(zero_run: Path) -> Path:
    """A folder of three runs: a complete one, one whose last save is damaged, and one called `zero`."""
    zero_run.rename(zero_run.with_name("zero"))
    for name in ("a", "b"):
        shutil.copytree(zero_run.with_name("zero"), zero_run / name)
    shutil.move(zero_run.with_name("zero"), zero_run / "zero")
    (zero_run / "b" / ZERO / "mp_rank_00_model_states.pt").write_bytes(b"damaged")
    return zero_run


STRAY = ("metadata.json", ".metadata", "common.pt", "distrib_optim.pt", "model.safetensors", "fsdp_config.json")


@pytest.mark.parametrize(
    ("name", "where"), [("", "."), *((name, where) for name in STRAY for where in (".", "a"))], ids=str
)
def test_each_run_has_its_own_line_and_a_stray_file_hides_nothing(
    runs: Path, name: str, where: str, capsys: Say
) -> None:
    content = {".metadata": b"\x80\x04}.", "metadata.json": b'{"sharded_backend": "torch_dist"}'}
    if name:
        (runs / where / name).write_bytes(content.get(name, b"{}"))
    if name == "model.safetensors":
        test_audit_safetensors.written(runs / where / name, {"weight": torch.ones(2, 3)})
    lines = lines_of(capsys, runs, status=1)
    for run, verdict in (("a", WHOLE), ("b", DAMAGED), ("zero", WHOLE)):
        assert any(line.startswith(f"{runs / run / ZERO}: {verdict}") for line in lines)
    assert lines[-3:] == [
        f"resume from: {runs / 'a' / ZERO} (step 2); latest names it",
        f"resume from: no checkpoint in {runs / 'b'} is WHOLE; latest names {ZERO}, which is DAMAGED",
        f"resume from: {runs / 'zero' / ZERO} (step 2); latest names it",
    ]
    assert any(line.startswith(f"{runs / where}: ") for line in lines) == (name == "model.safetensors")
    main(["audit", "--json", str(runs)])
    found = {run["path"]: run["resume_from"] for run in json.loads(capsys.readouterr().out)["runs"]}
    expected = {str(runs / "a"): str(runs / "a" / ZERO), str(runs / "b"): None}
    assert expected.items() <= found.items()


def test_a_link_to_a_save_of_another_run_does_not_take_it_from_its_run(runs: Path, capsys: Say) -> None:
    (runs / "a" / "best").symlink_to(runs / "zero" / ZERO)
    assert lines_of(capsys, runs, status=1)[-1].startswith(f"resume from: {runs / 'zero' / ZERO} ")


def test_a_path_without_a_checkpoint_does_not_end_the_others(runs: Path, tmp_path: Path, capsys: Say) -> None:
    (tmp_path / "void").mkdir()
    absent, whole, damaged = tmp_path / "absent", runs / "a" / ZERO, runs / "b" / ZERO
    for paths, status in (([absent, whole], 2), ([tmp_path / "void", whole], 2), ([absent, damaged, whole], 1)):
        assert main(["audit", *map(str, paths)]) == status
        said = capsys.readouterr()
        assert f"{whole}: WHOLE" in said.out
        assert said.err.count(f"{paths[0]}: expected a checkpoint") == 1


# The order, and the summary


def test_the_newest_is_read_first_and_each_has_a_line(zero_run: Path, capsys: Say) -> None:
    for step in range(1000, 2000):
        (zero_run / f"global_step{step}").mkdir()
    lines = lines_of(capsys, zero_run, status=1)
    assert len(lines) == 1 + 1000 + 2
    assert lines[0] == f"{zero_run / 'global_step1999'}: INCOMPLETE: the folder is empty; take an older checkpoint"
    assert lines[1].startswith(f"{zero_run / 'global_step1998'}: ")
    assert lines[-1] == f"resume from: {zero_run / ZERO} (step 2); latest names it"


def test_progress_says_how_many_there_are(zero_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shutil.copytree(zero_run / ZERO, zero_run / "global_step1")
    monkeypatch.setattr(Progress, "INTERVAL", 0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    main(["audit", str(zero_run)])
    assert f"\r{ZERO}, 1 of 2:" in terminal.getvalue()
    assert "\rglobal_step1, 2 of 2:" in terminal.getvalue()


def test_the_current_folder_is_the_default(zero_run: Path, capsys: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(zero_run)
    assert lines_of(capsys, status=0)[-1].startswith(f"resume from: {ZERO} (step 2)")


def test_summaries(zero_run: Path, capsys: Say) -> None:
    assert lines_of(capsys, "--summary", zero_run / ZERO, status=0) == [f"{zero_run / ZERO}: WHOLE"]
    for step in range(3, 9):
        (zero_run / f"global_step{step}").mkdir()
    lines = lines_of(capsys, "--summary", zero_run, status=1)
    assert lines == [
        f"{zero_run}: 7 checkpoints: 6 INCOMPLETE, 1 WHOLE",
        f"resume from: {zero_run / ZERO} (step 2); latest names it",
        "not WHOLE: global_step8 (INCOMPLETE: incomplete_save), global_step7 (INCOMPLETE: incomplete_save), "
        "global_step6 (INCOMPLETE: incomplete_save), and 3 more",
        f"details: ckpt-patches audit {zero_run / 'global_step8'}",
    ]
    marked = lines_of(capsys, "--markdown", zero_run, status=1)
    assert marked == [f"- `{lines[0]}`", *(f"  - `{line}`" for line in lines[1:])]
    both(without("global_step[3-8]"), latest("../elsewhere"))(zero_run)
    first = lines_of(capsys, "--summary", zero_run, status=1)[0]
    assert first == f"{zero_run}: 1 checkpoint: 1 WHOLE; 1 tracker without a checkpoint"
    without("*_rank_3_mp_rank_00_optim_states.pt")(zero_run / ZERO)
    first, second = lines_of(capsys, "--summary", zero_run / ZERO, status=1)
    assert first == f"{zero_run / ZERO}: DAMAGED: missing_rank, fragments"
    assert second.startswith("missing_rank: a data-parallel rank's file is missing; ")


# Trackers and folders of trainers


def test_the_state_of_megatron_bridge_is_a_tracker(megatron_run: Path, capsys: Say) -> None:
    """Megatron-Bridge saves a dict of tensors with the step."""
    before, _ = sorted(path for path in megatron_run.iterdir() if path.is_dir())
    (megatron_run / "latest_checkpointed_iteration.txt").unlink()
    tracker = megatron_run / "latest_train_state.pt"
    step = torch.tensor(int(before.name.removeprefix("iter_")), dtype=torch.int32)
    torch.save({"step": step, "consumed_train_samples": torch.tensor(8, dtype=torch.int32)}, tracker)
    status, _, last = audited(megatron_run, capsys)
    named = "it" if last.startswith(f"resume from: {before} ") else f"{before.name}, which is WHOLE"
    assert (status, last.partition("; ")[2]) == (0, f"{tracker.name} names {named}")
    torch.save({"step": step + 1000}, tracker)
    gone = f"iter_{int(step) + 1000:07d}"
    status, verdicts, last = audited(megatron_run, capsys)
    assert (status, verdicts[gone]) == (1, INCOMPLETE)
    assert last.endswith(f"; {tracker.name} names {gone}, which is INCOMPLETE")
    for content in ({"step": torch.tensor(float("nan"))}, {"step": torch.ones(2)}, {}, 3):
        torch.save(content, tracker)
        assert audited(megatron_run, capsys)[2].endswith(f"; {tracker.name} names no checkpoint")


def test_positions_in_the_training_data_are_no_checkpoints(megatron_run: Path, capsys: Say) -> None:
    """Megatron-Bridge with Energon saves `energon/iter_0000010/train_dataloader_dprank000.pt`."""
    expected = audited(megatron_run, capsys)
    for path in [path for path in megatron_run.iterdir() if path.is_dir()]:
        (megatron_run / "energon" / path.name).mkdir(parents=True)
        for rank in (0, 1):
            file = megatron_run / "energon" / path.name / f"train_dataloader_dprank{rank:03d}.pt"
            torch.save({"dataloader_state_dict": [rank]}, file)
    assert audited(megatron_run, capsys) == expected


@pytest.fixture
def trainer_run(zero_run: Path) -> Path:
    """The folders of Transformers' Trainer with DeepSpeed: weights, and DeepSpeed's folder and tracker."""
    for step in (2, 4):
        own = zero_run / f"checkpoint-{step}"
        shutil.copytree(zero_run / ZERO, own / ZERO)
        (own / "latest").write_text(ZERO)
        test_audit_safetensors.written(own / "model.safetensors", {"weight": torch.ones(2, 3)})
    without(ZERO, "latest")(zero_run)
    return zero_run


def test_a_folder_of_the_trainer_is_one_checkpoint(trainer_run: Path, capsys: Say) -> None:
    status, verdicts, last = audited(trainer_run, capsys)
    assert (status, verdicts) == (0, {"checkpoint-2": WHOLE, "checkpoint-4": WHOLE})
    assert last.startswith(f"resume from: {trainer_run / 'checkpoint-'}".removesuffix("-"))
    assert last.endswith(" (step 2); no tracker names a checkpoint")
    assert ZERO not in last
    first, *others = lines_of(capsys, trainer_run / "checkpoint-4", status=0)
    assert first.startswith(f"{trainer_run / 'checkpoint-4'}: WHOLE (deepspeed zero, ")
    assert not [line for line in others if "resume from" in line]


def test_a_run_can_have_the_name_of_a_unit(zero_run: Path, capsys: Say) -> None:
    run = zero_run.rename(zero_run.with_name("checkpoint-7"))
    shutil.copytree(run / ZERO, run / "global_step3")
    assert audited(run, capsys)[1].keys() == {ZERO, "global_step3"}


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(content)


@pytest.mark.parametrize(
    ("make", "verdict", "named"),
    [
        *(
            (write(name, b"damaged"), DAMAGED, name)
            for name in ("model.safetensors", f"{ZERO}/mp_rank_00_model_states.pt")
        ),
        (write("latest", b"global_step4"), INCOMPLETE, "global_step4"),
    ],
)
def test_damage_in_a_part_is_the_units(make: Change, verdict: str, named: str, trainer_run: Path, capsys: Say) -> None:
    make(trainer_run / "checkpoint-4")
    status, verdicts, last = audited(trainer_run, capsys)
    assert (status, verdicts) == (1, {"checkpoint-2": WHOLE, "checkpoint-4": verdict})
    assert last.startswith(f"resume from: {trainer_run / 'checkpoint-2'} ")
    main(["audit", "--json", str(trainer_run)])
    (found,) = [c for c in json.loads(capsys.readouterr().out)["checkpoints"] if c["verdict"] == verdict]
    assert named in {finding["array"] for finding in found["findings"]}
