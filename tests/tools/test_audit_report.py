"""The audit's text: findings grouped by cause, the cause first, in lines that fit a terminal."""

import shutil
from pathlib import Path

import pytest

import dcp_checkpoints
from ckpt_patches.audit.audit import Report, audit
from ckpt_patches.audit.report import text_report
from ckpt_patches.cli import main
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import Checkpoint
from ckpt_patches.formats.damages import Finding
from megatron_checkpoints import ZARR, written
from zero_checkpoints import trained


def text(*findings: Finding, notes: bool = False) -> list[str]:
    report = Report(Checkpoint(Path("run/global_step3"), "deepspeed zero", 3), findings)
    return text_report.as_text(report, notes=notes).splitlines()


def lost(name: str, detail: str = "") -> Finding:
    return Finding(damages.LOST_MASTER, name, detail, "rank 0", 5, 9)


def without_a_rank(kind: str, tmp_path: Path) -> Path:
    path = Path(shutil.copytree(trained("0.19.8", kind)[kind], tmp_path / "global_step2"))
    next(path.glob("*rank_3_*optim_states.pt")).unlink()
    return path


@pytest.mark.parametrize("kind", ["stage2", "stage3"])
def test_a_missing_rank_comes_before_what_follows_from_it(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = without_a_rank(kind, tmp_path)
    assert {finding.kind for finding in audit(path).findings} >= {damages.MISSING_RANK, damages.FRAGMENTS}
    assert main(["audit", str(path)]) == 1
    first, counts, head, rank, fragments, *sentences = capsys.readouterr().out.splitlines()
    assert first == f"{path}: DAMAGED (deepspeed zero, step 2, 8 data-parallel ranks)"
    assert counts.startswith("  2 kinds of damage in ")
    assert head.split() == ["damage", "where", "detail"]
    assert rank.split() == ["missing_rank", "rank", "3", "of", "8"]
    assert fragments.split()[0] == "fragments"
    assert fragments.endswith("  can follow from missing_rank")
    assert " ".join(sentences).startswith("  missing_rank: ")
    assert "fragments:" not in " ".join(sentences)


def test_a_missing_file_of_many_tensors_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(shutil.copytree(dcp_checkpoints.saved() / "strided", tmp_path / "step-3"))
    (path / "__1_0.distcp").unlink()
    tensors = [finding.array for finding in audit(path).findings if finding.kind is damages.BAD_FILE]
    assert len(tensors) > 5
    assert main(["audit", str(path)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  bad_file ")]
    assert line.split(maxsplit=3)[1:] == [
        tensors[0],
        f"(+{len(tensors) - 1})",
        "__1_0.distcp: No such file or directory",
    ]


def test_findings_are_sorted_by_severity_and_cause() -> None:
    lines = text(
        Finding(damages.UNUSUAL, "f", detail="odd"),
        lost("c"),
        Finding(damages.RARE, "n"),
        Finding(damages.MIXED_RANKS, "b"),
        Finding(damages.BAD_FILE, "a", detail="truncated"),
    )
    assert lines[1] == "  3 kinds of damage in 3 places, 1 kind of suspicion in 1 place"
    rows = [line.split()[0] for line in lines[2:8]]
    assert rows == ["damage", "bad_file", "mixed_ranks", "lost_master", "suspicion", "unusual"]
    shown = [line.split()[:2] for line in text(lost("c"), Finding(damages.RARE, "n"), notes=True)]
    assert ["note", "where"] in shown
    assert ["rare", "n"] in shown


def test_lines_fit_80_columns_and_names_stay_distinct() -> None:
    names = [f"model.language_model.decoder.layers.{n}.self_attention.linear_qkv.weight" for n in range(12)]
    for end in ("", ".of_a_matrix.that.has_a_long_name"):
        found = [
            lost(f"{name}{end}", f"{n} of the elements of it are " + "wrong " * 20) for n, name in enumerate(names)
        ]
        lines = text(*found)
        rows = [line for line in lines if line.startswith("  lost_master ")]
        assert len(rows) == 10
        assert rows[-1].split()[1:] == ["and", "3", "more", "(--json)"]
        assert len({row.split()[1] for row in rows}) == 10
        assert all(len(line) <= 80 for line in lines) or all(names[n] in row for n, row in enumerate(rows[:9]))
    assert max(map(len, text(lost(names[0] * 3, "long " * 100)))) == 80


def test_notes_are_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in written(ZARR).whole[-2:]:
        shutil.copytree(path, tmp_path / path.name)
    notes = sum(len(audit(path).findings) for path in tmp_path.iterdir())
    assert notes > 1
    main(["audit", str(tmp_path)])
    out = capsys.readouterr().out
    assert out.count("hidden (show: --notes)") == 1
    assert f"2 WHOLE; {notes} notes hidden (show: --notes)\n" in out
    main(["audit", "--notes", str(tmp_path)])
    assert "--notes" not in capsys.readouterr().out


def test_a_rank_beyond_those_of_the_save_is_named(tmp_path: Path) -> None:
    path = Path(shutil.copytree(trained("0.19.8", "stage2")["stage2"], tmp_path / "global_step2"))
    file = next(path.glob("*rank_7_*optim_states.pt"))
    shutil.copy(file, file.with_name(file.name.replace("rank_7", "rank_9")))
    details = [finding.detail for finding in audit(path).findings if finding.kind is damages.MIXED_RANKS]
    assert details == ["of rank 9, and the save has 8 ranks"]
