"""The audit's HTML page: it has the rows of the text with their remedies, and escapes all names."""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ckpt_patches.audit.audit import DAMAGED, WHOLE, Report, audit
from ckpt_patches.audit.report import page
from ckpt_patches.cli import main
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import Checkpoint, Shard, Stream
from ckpt_patches.formats.damages import Finding
from megatron_checkpoints import ZARR, written
from test_audit import copied, lose_both_moments, lose_master, names, put_nan
from zero_checkpoints import trained

HOSTILE = '<script>alert(\'&"1")</script>\u202e\x1b[2J'


class Parsed(HTMLParser):
    """The text and the elements of a page. All elements must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""  # one line per piece of text
        self.running = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + "\n"
            self.running += data


@pytest.fixture
def zarr(tmp_path: Path) -> Path:
    return copied(written(ZARR).whole[-1], tmp_path)


def arrays(count: int, *findings: Finding) -> Report:
    """A report on arrays of 1000 elements each."""
    shards = [Shard(f"layer{n}", "", (1000,), {"master": Stream(f"master.{n}", "float32", ())}) for n in range(count)]
    return Report(Checkpoint(Path("iter_0000003"), "Megatron zarr", 3, shards=shards), findings)


def lost(array: int, begin: int, end: int, kind: damages.FindingKind = damages.LOST_MASTER) -> Finding:
    return Finding(kind, f"master.{array}", "", "", begin, end)


def parsed(*reports: Report) -> Parsed:
    return Parsed(page.page(list(reports), [], "today"))


def test_each_finding_is_on_the_page_with_what_it_means_and_what_to_do(zarr: Path) -> None:
    for damage in (lose_master, lose_both_moments, put_nan):
        damage(zarr)
    report = audit(zarr)
    found = parsed(report)
    assert len(names(report)) >= 3
    for finding in report.findings:  # notes too, as the checkpoint is damaged
        for words in (finding.kind.name, finding.kind.meaning, finding.kind.remedy, finding.array, finding.detail):
            assert words.replace("`", "") in found.running


def test_the_table_has_every_checkpoint_with_its_verdict(zarr: Path, tmp_path: Path) -> None:
    whole, zero = written(ZARR).whole[-1], trained("0.16.2", "stage2", "stage3")["stage2"]
    lose_master(zarr)
    to = tmp_path / "page.html"
    assert main(["audit", str(zarr), str(whole), str(zero), "--html", str(to)]) == 1
    found = Parsed(to.read_text(encoding="utf-8"))
    lines = " ".join(found.text.split("\n"))
    assert re.search(rf"{re.escape(str(zarr))}: {DAMAGED}\s+megatron zarr", lines)
    for path, kind in ((whole, "megatron zarr"), (zero, "deepspeed zero")):
        assert re.search(rf"{re.escape(str(path))}\s+{WHOLE}\s+{kind}", lines)
    assert "3 checkpoints: 1 DAMAGED, 2 WHOLE" in found.text


def test_the_answer_is_on_top_then_the_saves_by_step_then_what_is_damaged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save = trained("0.16.2", "stage2", "stage3")["stage2"]
    for step in (8, 9, 10):
        shutil.copytree(save, run / f"global_step{step}")
    lose_the_moments_of_a_rank(run / "global_step10")
    to = tmp_path / "page.html"
    assert main(["audit", str(run), "--html", str(to)]) == 1
    found = Parsed(to.read_text(encoding="utf-8"))
    places = [
        found.text.index(text)
        for text in (
            "3 checkpoints: 1 DAMAGED, 2 UNKNOWN",
            f"Resume from: no checkpoint in {run} is WHOLE",
            "global_step8 UNKNOWN",
            "global_step9 UNKNOWN",
            "global_step10 DAMAGED",
            f"{run / 'global_step10'}: DAMAGED",
            f"{run / 'global_step9'}: UNKNOWN",
        )
    ]
    assert places == sorted(places)


def test_the_save_to_resume_from_is_marked(tmp_path: Path) -> None:
    save = copied(trained("0.16.2", "stage2", "stage3")["stage2"], tmp_path / "run")
    damaged = shutil.copytree(save, save.with_name("global_step1"))
    next(damaged.glob("*optim_states.pt")).unlink()
    to = tmp_path / "page.html"
    assert main(["audit", str(save.parent), "--html", str(to)]) == 1
    found = Parsed(to.read_text(encoding="utf-8"))
    assert [own["class"] for tag, own in found.elements if tag == "li"] == ["bad", "good chosen"]
    assert f"Resume from: {save} (step 2)" in found.text
    assert f"Load it: tag {save.name} in {save.parent}\n" in found.text
    assert f"In a script: ckpt-patches resume-from {save.parent} prints its path\n" in found.text


def test_the_newest_damaged_save_has_the_command_that_repairs_it(tmp_path: Path) -> None:
    save = copied(trained("0.19.8", "stage1")["stage1"], tmp_path / "run")
    lose_the_moments_of_a_rank(shutil.copytree(save, save.with_name("global_step3")))
    to = tmp_path / "page.html"
    assert main(["audit", str(save.parent), "--html", str(to)]) == 1
    repair = f"ckpt-patches repair {save.with_name('global_step3')} --output NEW --from {save}"
    assert f"To repair a newer one: {repair}\n" in Parsed(to.read_text(encoding="utf-8")).text


def lose_the_moments_of_a_rank(path: Path) -> None:
    """Overwrite both moments with zeros where rank 3 wrote them."""
    for shard in audit(path).checkpoint.shards:
        for role in ("exp_avg", "exp_avg_sq"):
            for extent in shard.streams[role].extents if role in shard.streams else ():
                if "pp_rank_3_" in extent.path:
                    with open(extent.path, "r+b") as file:
                        file.seek(extent.offset)
                        file.write(bytes(extent.nbytes))


def test_the_grid_has_the_rank_whose_elements_are_lost(tmp_path: Path) -> None:
    path = copied(trained("0.16.2", "stage2", "stage3")["stage2"], tmp_path)
    lose_the_moments_of_a_rank(path)
    report = audit(path)
    found = page.odd_by_rank(report)
    assert len(found) >= 2
    for by_rank in found.values():
        assert {rank for rank, (odd, _) in by_rank.items() if odd} == {"rank 3"}
        assert all(odd <= every for odd, every in by_rank.values())
    shown = parsed(report)
    assert [own for tag, own in shown.elements if own.get("class") == "grid"]
    assert sum(own.get("class") == "bad" for tag, own in shown.elements if tag == "td") == len(found)


def test_no_grid_for_one_parameter_or_without_ranks() -> None:
    assert "grid" not in page.page([arrays(3, lost(0, 0, 10))], [], "today").partition("</style>")[2]
    assert "grid" not in page.page([arrays(3, lost(0, 0, 10), lost(1, 0, 10))], [], "today").partition("</style>")[2]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [([], 0), ([(0, 5)], 3), ([(0, 5), (1, 4)], 3), ([(4, 9), (2, 3)], 5), ([(0, 99)], 6), ([(20, 30)], 0)],
)
def test_the_elements_in_overlapping_ranges_are_counted_once(ranges: list[tuple[int, int]], expected: int) -> None:
    assert page.union(ranges, 2, 8) == expected


def test_nothing_runs_and_nothing_is_loaded(zarr: Path) -> None:
    lose_master(zarr)
    found = parsed(audit(zarr))
    policy = next(own["content"] for tag, own in found.elements if own.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "script" not in policy
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in found.elements}
    assert not [
        own for _, own in found.elements if {"src", "style"} & own.keys() or any(key[:2] == "on" for key in own)
    ]
    assert "url(" not in page.STYLE
    assert "@import" not in page.STYLE


def hostile() -> Report:
    """A report in which every text from the checkpoint is a script."""
    report = arrays(3, Finding(damages.BAD_FILE, HOSTILE, HOSTILE, HOSTILE, 0, 10))
    stream = next(iter(report.checkpoint.shards[0].streams.values()))._replace(array=HOSTILE)
    report.checkpoint.shards[0] = dataclasses.replace(
        report.checkpoint.shards[0], label=HOSTILE, streams={"master": stream}
    )
    report.checkpoint.path = Path("folder") / HOSTILE.replace("/", "|")
    report.checkpoint.format = HOSTILE
    return report


def test_a_name_is_no_markup() -> None:
    report = hostile()
    text = page.page([report], [], HOSTILE)
    found = Parsed(text)
    assert "script" not in {tag for tag, _ in found.elements}
    assert found.text.count('<script>alert(\'&"1")') >= 5
    assert len(found.elements) == len(parsed(arrays(3, lost(0, 0, 10))).elements)
    assert text.isascii() or "\u202e" not in text
    assert "\x1b" not in text


def test_a_name_in_a_folder_is_no_markup(zarr: Path, tmp_path: Path) -> None:
    lose_master(zarr)
    named = zarr.rename(tmp_path / os.fsdecode(b"<script>'\n\xff"))
    to = tmp_path / "page.html"
    assert main(["audit", str(named), "--html", str(to)]) == 1
    found = Parsed(to.read_bytes().decode("utf-8"))
    assert "script" not in {tag for tag, _ in found.elements}
    assert "<script>'" in found.text


# The file


def test_a_page_that_cannot_be_written_is_refused_before_the_audit(
    zarr: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("missing/page.html", "."):
        assert main(["audit", str(zarr), "--html", str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert "--html" in said.err
        assert said.out == ""
    assert os.listdir(tmp_path) == [zarr.name]


def test_a_page_replaces_the_one_before_only_as_a_whole(
    zarr: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "page.html"
    to.write_text("the one before")
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); import signal; "
    limited += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from ckpt_patches.cli import main; "
    limited += f"raise SystemExit(main(['audit', {str(zarr)!r}, '--workers', '1', '--html', {str(to)!r}]))"
    ended = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "File too large" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert to.read_text() == "the one before"
    assert sorted(os.listdir(tmp_path)) == sorted([zarr.name, "page.html"])


def test_a_page_is_written_although_the_reader_of_the_pipe_has_gone(zarr: Path, tmp_path: Path) -> None:
    lose_master(zarr)
    to = tmp_path / "page.html"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        command = [sys.executable, "-m", "ckpt_patches", "audit", str(zarr), "--html", str(to)]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 128 + signal.SIGPIPE
    assert b"Traceback" not in done.stderr
    assert f"{zarr}: {DAMAGED}" in Parsed(to.read_text(encoding="utf-8")).text
