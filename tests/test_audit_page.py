"""The audit's HTML page: it has every finding with its remedy, and escapes all names."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ckpt_patches.audit import damages
from ckpt_patches.audit.audit import DAMAGED, REPAIRED, WHOLE, Report, audit
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.report import page, plot_layout, recommend
from ckpt_patches.cli import main
from megatron_checkpoints import ZARR, written
from test_audit import IN_ZARR, copied, lose_both_moments, lose_master, names, put_nan, state
from test_audit_pictures import arrays, lost
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
        self.commands: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)
        if tag == "pre":
            self.commands.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + "\n"
            self.running += data
        if "pre" in self.open:
            self.commands[-1] += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


@pytest.fixture
def zarr(tmp_path: Path) -> Path:
    return copied(written(ZARR).whole[-1], tmp_path)


def parsed(*reports: Report) -> Parsed:
    return Parsed(page.page(list(reports), "today"))


def test_each_finding_is_on_the_page_with_what_it_means_and_what_to_do(zarr: Path) -> None:
    for damage in (lose_master, lose_both_moments, put_nan):
        damage(zarr)
    report = audit(zarr)
    found = parsed(report)
    assert len(names(report)) >= 3
    for finding in report.findings:
        for words in (finding.kind.name, finding.kind.meaning, finding.kind.remedy, finding.array, finding.detail):
            assert words.replace("`", "") in found.running


def test_the_table_has_every_checkpoint_with_its_verdict(zarr: Path, tmp_path: Path) -> None:
    whole, zero = written(ZARR).whole[-1], trained("0.16.2", "stage2", "stage3")["stage2"]
    lose_master(zarr)
    to = tmp_path / "page.html"
    assert main(["audit", str(zarr), str(whole), str(zero), "--html", str(to)]) == 1
    found = Parsed(to.read_text(encoding="utf-8"))
    lines = " ".join(found.text.split("\n"))
    for path, verdict, kind in (
        (zarr, DAMAGED, "megatron zarr"),
        (whole, WHOLE, "megatron zarr"),
        (zero, WHOLE, "deepspeed zero"),
    ):
        assert re.search(rf"{verdict}\s+{re.escape(str(path))}\s+{kind}", lines)
    assert "3 checkpoints: 1 DAMAGED, 2 WHOLE" in found.text
    links = {own["href"] for tag, own in found.elements if tag == "a"}
    assert links == {f"#{own['id']}" for tag, own in found.elements if tag == "section"}


def test_a_page_of_a_whole_checkpoint(tmp_path: Path) -> None:
    to = tmp_path / "page.html"
    assert main(["audit", str(written(ZARR).whole[-1]), "--html", str(to)]) == 0
    found = Parsed(to.read_text(encoding="utf-8"))
    assert "1 checkpoint: 1 WHOLE" in found.text
    assert "It can be resumed from." in found.text
    assert found.count("figure") == 0


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
    report = arrays(3, Finding(damages.BAD_FILE, HOSTILE, HOSTILE, 0, 10, HOSTILE))
    stream = next(iter(report.checkpoint.shards[0].streams.values()))._replace(array=HOSTILE)
    report.checkpoint.shards[0] = dataclasses.replace(
        report.checkpoint.shards[0], label=HOSTILE, streams={"master": stream}
    )
    report.checkpoint.path = Path("folder") / HOSTILE.replace("/", "|")
    report.checkpoint.format = HOSTILE
    return report


def test_a_name_is_no_markup() -> None:
    report = hostile()
    text = page.page([report], HOSTILE)
    found = Parsed(text)
    assert len(parsed(arrays(3, lost(0, 0, 10))).elements) > 30
    assert "script" not in {tag for tag, _ in found.elements}
    assert found.text.count('<script>alert(\'&"1")') >= 5
    assert text.isascii() or "\u202e" not in text
    assert "\x1b" not in text


def test_a_name_in_a_folder_is_no_markup(zarr: Path, tmp_path: Path) -> None:
    lose_master(zarr)
    named = zarr.rename(tmp_path / os.fsdecode(b"<script>'\n\xff"))
    to = tmp_path / "page.html"
    assert main(["audit", str(named), "--html", str(to)]) == 1
    found = Parsed(to.read_bytes().decode("utf-8"))
    assert "script" not in {tag for tag, _ in found.elements}
    said = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {found.commands[0]}"], capture_output=True, check=True
    ).stdout.split(b"\0")
    assert said[2] == os.fsencode(named)


def test_a_thousand_findings_are_folded_by_kind() -> None:
    report = arrays(1000, *(lost(n, 0, 10) for n in range(999)), lost(999, 5, 6, damages.NOT_FINITE))
    found = parsed(report)
    folded = [own for tag, own in found.elements if tag == "details"]
    assert len(folded) == 2
    assert not any("open" in own for own in folded)
    assert "999 places" in found.text
    assert all(re.search(rf"^master\.{n}$", found.text, re.M) for n in range(1000))
    assert all("open" in own for tag, own in parsed(arrays(2, lost(0, 0, 9))).elements if tag == "details")


def test_the_picture_has_a_mark_for_each_hole_in_its_colour(zarr: Path) -> None:
    lose_master(zarr)
    put_nan(zarr)
    found = parsed(audit(zarr))
    for kind, at, width in (("lost_master", 100 / 576, 100 / 576), ("not_finite", None, 0.004)):
        own = plot_layout.colour(kind)
        marks = [mark for tag, mark in found.elements if tag == "rect" and mark["fill"] == own and "x" in mark]
        assert len(marks) == 1
        assert float(marks[0]["width"] or 0) / page.LENGTH == pytest.approx(width, abs=1e-4)
        assert at is None or float(marks[0]["x"] or 0) / page.LENGTH == pytest.approx(at, abs=1e-4)


# The commands


def test_the_command_of_the_page_repairs(zarr: Path, tmp_path: Path) -> None:
    lose_master(zarr)
    command = parsed(audit(zarr)).commands[0]
    assert main(shlex.split(command)[1:]) == 0
    assert audit(tmp_path / f"{zarr.name}-repaired").verdict == REPAIRED


@pytest.mark.parametrize("change", [one[0] for one in IN_ZARR], ids=lambda change: change.__name__)
def test_the_page_has_a_command_for_a_repair_where_repair_does_one(
    zarr: Path, change: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    change(zarr)
    report = audit(zarr)
    commands = [shlex.split(command) for command in parsed(report).commands]
    repairs = [command for command in commands if command[:2] == ["ckpt-patches", "repair"]]
    if repairs:
        assert main(repairs[0][1:]) == 0
    else:
        assert main(["repair", str(zarr), "--output", str(zarr.parent / "new")]) == 2
        refused = "is WHOLE" if report.verdict == WHOLE else "cannot be repaired, and nothing was written"
        assert refused in capsys.readouterr().err


def test_moments_are_taken_from_an_older_whole_checkpoint_of_the_same_audit(zarr: Path, tmp_path: Path) -> None:
    older = Path(shutil.copytree(written(ZARR).whole[-2], tmp_path / "it's older"))
    lose_both_moments(zarr)
    report = audit(zarr)
    assert "--from" not in parsed(report).commands[0]
    assert "--from OLDER" in parsed(report).text
    command = shlex.split(parsed(report, audit(older)).commands[0])
    assert command[-2:] == ["--from", str(older)]
    assert main(command[1:]) == 0


def test_what_cannot_be_repaired_has_no_command_for_it(tmp_path: Path) -> None:
    path = copied(trained("0.16.2", "stage2", "stage3")["stage2"], tmp_path)
    next(path.glob("*_optim_states.pt")).unlink()
    report = audit(path)
    found = parsed(report)
    assert not [command for command in found.commands if "ckpt-patches repair" in command]
    assert "It cannot be repaired" in found.text
    twin = dataclasses.replace(audit(trained("0.16.2", "stage2", "stage3")["stage2"]))
    assert f"Resume from {twin.checkpoint.path.name}" in parsed(report, twin).text


def test_a_reason_why_a_repair_would_be_refused_is_told(zarr: Path) -> None:
    lose_master(zarr)
    report = audit(zarr)
    weightless = [
        dataclasses.replace(s, streams={k: v for k, v in s.streams.items() if k != "weight"})
        for s in report.checkpoint.shards
    ]
    report.checkpoint.shards = weightless
    assert "does not have the model's own weights" in parsed(report).text


def test_a_format_that_today_does_not_load_has_the_command_to_migrate(zarr: Path, tmp_path: Path) -> None:
    command = shlex.split(parsed(audit(zarr)).commands[0])
    assert command[:3] == ["ckpt-patches", "migrate", str(zarr)]
    assert main(command[1:]) == 0
    assert parsed(audit(Path(command[-1]))).commands == []


@pytest.mark.parametrize(
    ("sharding", "named", "is_old"),
    [
        ("fully_sharded_model_space", False, True),
        ("fully_sharded_bucket_space", True, True),
        ("dp_zero_gather_scatter", False, True),
        ("dp_zero_gather_scatter", True, False),
        ("fully_reshardable", True, False),
    ],
)
def test_so_has_a_state_in_torch_dist_that_they_do_not_load(
    sharding: str, named: bool, is_old: bool, zarr: Path
) -> None:
    report = audit(zarr)
    report.checkpoint.format = "megatron torch_dist"
    report.checkpoint.sharding, report.checkpoint.names_sharding = sharding, named
    assert any("ckpt-patches migrate" in command for command in parsed(report).commands) == is_old


def test_commands_are_quoted() -> None:
    words = ["a b", "$(rm -rf x)", "it's", "-x", os.fsdecode(b"\xff'\n\\"), "ü"]
    line = recommend.line("printf", "%s\\0", *words)
    assert line.isprintable()
    said = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout
    assert said == b"".join(os.fsencode(word) + b"\0" for word in words)


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
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); import signal; "
    limited += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from ckpt_patches.cli import main; "
    limited += f"raise SystemExit(main(['audit', {str(zarr)!r}, '--workers', '1', '--html', {str(to)!r}]))"
    ended = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "File too large" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert to.read_text() == "the one before"
    assert sorted(os.listdir(tmp_path)) == sorted([zarr.name, "page.html"])


def test_a_page_needs_no_matplotlib(zarr: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    lose_master(zarr)
    assert main(["audit", str(zarr), "--html", str(tmp_path / "page.html")]) == 1
    assert state("fp32_param") in (tmp_path / "page.html").read_text(encoding="utf-8")
