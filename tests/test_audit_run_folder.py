"""A run's folder: the audit reports every save, and the one to resume from."""

import json
import shutil
from pathlib import Path

import pytest

import zero_resumes
from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, UNKNOWN, WHOLE, audit
from ckpt_patches.cli import main
from megatron_checkpoints import ZARR, written
from test_audit import names
from zero_checkpoints import trained

ZERO = "global_step2"


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


def audited(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str], str]:
    """The exit status, the verdicts by folder name, and the last line."""
    status = main(["audit", str(run)])
    *_, last = capsys.readouterr().out.splitlines()
    assert main(["audit", "--json", str(run)]) == status
    found = json.loads(capsys.readouterr().out)
    return status, {Path(one["path"]).name: one["verdict"] for one in found["checkpoints"]}, last


def test_a_complete_run(zero_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = f"resume from: {zero_run / ZERO} (step 2); latest names it"
    assert audited(zero_run, capsys) == (0, {ZERO: WHOLE}, last)


def test_a_run_without_a_tracker(zero_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (zero_run / "latest").unlink()
    last = f"resume from: {zero_run / ZERO} (step 2); no tracker names a checkpoint"
    assert audited(zero_run, capsys) == (0, {ZERO: WHOLE}, last)


def test_an_interrupted_save_of_deepspeed_is_incomplete(zero_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (zero_run / "global_step3").mkdir()
    shutil.copy(zero_run / ZERO / "mp_rank_00_model_states.pt", zero_run / "global_step3")
    (zero_run / "latest").write_text("global_step3")
    last = f"resume from: {zero_run / ZERO} (step 2); latest names global_step3, which is INCOMPLETE"
    assert audited(zero_run, capsys) == (1, {ZERO: WHOLE, "global_step3": INCOMPLETE}, last)


def test_an_interrupted_save_of_megatron_is_incomplete(megatron_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, last_one = sorted(path for path in megatron_run.iterdir() if path.is_dir())
    for name in ("metadata.json", "common.pt"):
        (last_one / name).unlink()
    status, verdicts, last = audited(megatron_run, capsys)
    assert (status, verdicts) == (1, {before.name: WHOLE, last_one.name: INCOMPLETE})
    assert last.endswith(f"; latest_checkpointed_iteration.txt names {last_one.name}, which is INCOMPLETE")


@pytest.mark.parametrize("name", ["global_step9", "iter_0000009"])
def test_an_empty_folder_of_a_save_is_incomplete(zero_run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (zero_run / name).mkdir()
    assert names(audit(zero_run / name)) == {"incomplete_save"}
    assert audited(zero_run, capsys)[:2] == (1, {ZERO: WHOLE, name: INCOMPLETE})


def test_a_tracker_that_names_nothing_is_reported(zero_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (zero_run / "latest").write_text("global_step7")
    last = f"resume from: {zero_run / ZERO} (step 2); latest names global_step7, which is INCOMPLETE"
    assert audited(zero_run, capsys) == (1, {ZERO: WHOLE, "global_step7": INCOMPLETE}, last)


@pytest.mark.parametrize("text", ["", "../elsewhere", "x" * 10_000, "\x00"], ids=["empty", "outside", "long", "nul"])
def test_a_tracker_that_is_no_name_is_incomplete(zero_run: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (zero_run / "latest").write_text(text)
    status, verdicts, last = audited(zero_run, capsys)
    assert (status, verdicts["latest"]) == (1, INCOMPLETE)
    assert len(last) < 500


def test_symlinked_folders_are_followed_once(
    zero_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(zero_run / ZERO, elsewhere)
    next(elsewhere.glob("*optim_states.pt")).write_bytes(b"damaged")
    (zero_run / "global_step4").symlink_to(elsewhere)
    (zero_run / "loop").symlink_to(zero_run)
    (zero_run / "twin").symlink_to(elsewhere)
    assert audited(zero_run, capsys)[:2] == (1, {ZERO: WHOLE, "global_step4": DAMAGED})


def test_a_link_out_of_the_folder_is_not_recommended(
    zero_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    (zero_run / "latest").write_text("pretrained")
    assert audited(zero_run, capsys)[2].startswith(f"resume from: {zero_run / 'pretrained'} ")


def test_no_checkpoint_to_resume_from(zero_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next((zero_run / ZERO).glob("*optim_states.pt")).write_bytes(b"damaged")
    status, verdicts, last = audited(zero_run, capsys)
    assert (status, verdicts) == (1, {ZERO: DAMAGED})
    assert last == f"resume from: no checkpoint in {zero_run} is complete; latest names {ZERO}, which is DAMAGED"


def test_an_unfinished_folder_of_a_tool_is_incomplete(zero_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(zero_run / ZERO, zero_run / "universal.unfinished")
    assert audited(zero_run, capsys)[:2] == (1, {ZERO: WHOLE, "universal.unfinished": INCOMPLETE})


def test_one_checkpoint_has_no_line_on_the_run(zero_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(zero_run / ZERO)]) == 0
    assert "resume from" not in capsys.readouterr().out


def test_a_checkpoint_without_zero_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage-0 checkpoint in fp16 is WHOLE, and one in bf16 lacks the optimizer state: see bf16_stage0_state."""
    bf16, fp16 = "stage0-2", "stage0_fp16-2"
    saved = zero_resumes.trained("0.18.4", "none", bf16, fp16)
    for case in (bf16, fp16):
        shutil.copytree(saved / case / ZERO, tmp_path / "run" / case / ZERO)
    reports = {case: audit(tmp_path / "run" / case / ZERO) for case in (bf16, fp16)}
    assert {case: report.verdict for case, report in reports.items()} == {bf16: DAMAGED, fp16: WHOLE}
    assert names(reports[bf16], notes=True) == {"missing_state"}
    assert reports[fp16].checkpoint.step == 2  # the file has 3: DeepSpeed creates the state with an extra step


def test_a_folder_of_another_format_is_unknown(zero_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with a save's name but files of an unknown format is UNKNOWN."""
    (zero_run / "global_step5").mkdir()
    (zero_run / "global_step5" / "model.gguf").write_bytes(b"")
    assert audited(zero_run, capsys)[:2] == (3, {ZERO: WHOLE, "global_step5": UNKNOWN})
