"""The audit's HTML page: it has the rows of the text with their remedies, and escapes all names."""

import os
import re
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_patches.audit.audit import DAMAGED, WHOLE, audit
from ckpt_patches.cli import main
from crafted_files import copied
from megatron_checkpoints import ZARR, written
from test_audit import lose_both_moments, lose_master, put_nan
from zero_checkpoints import trained

HOSTILE = '<script>alert(\'&"1")<\n\x1b[2J'


class Parsed(HTMLParser):
    """The text and the elements of a page. All elements must be closed, nothing runs, and nothing is loaded."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""  # one line per piece of text
        self.feed(page.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []
        policies = [own["content"] for _, own in self.elements if own.get("http-equiv") == "Content-Security-Policy"]
        assert [str(policy).startswith("default-src 'none'") and "script" not in str(policy) for policy in policies]
        assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in self.elements}
        attributes = {key for _, own in self.elements for key in own}
        assert not {key for key in attributes if key in ("src", "style") or key.startswith("on")}
        assert not re.search(r"url\(|@import|\x1b", page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + "\n"


@pytest.fixture
def zarr(tmp_path: Path) -> Path:
    return copied(written(ZARR).whole[-1], tmp_path)


def page_of(*paths: Path, status: int = 1) -> Parsed:
    to = paths[0].parent / "page.html"
    assert main(["audit", *map(str, paths), "--html", str(to)]) == status
    return Parsed(to)


def test_each_checkpoint_and_each_finding_is_on_the_page_with_what_to_do(zarr: Path) -> None:
    for damage in (lose_master, lose_both_moments, put_nan):
        damage(zarr)
    whole, zero = written(ZARR).whole[-1], trained("0.16.2", "stage2", "stage3")["stage2"]
    found = page_of(zarr, whole, zero)
    lines, running = " ".join(found.text.split("\n")), found.text.replace("\n", "")
    for finding in audit(zarr).findings:  # notes too, as the checkpoint is damaged
        for words in (finding.kind.name, finding.kind.meaning, finding.kind.remedy, finding.array, finding.detail):
            assert words.replace("`", "") in running
    assert re.search(rf"{re.escape(str(zarr))}: {DAMAGED}\s+megatron zarr", lines)
    for path, kind in ((whole, "megatron zarr"), (zero, "deepspeed zero")):
        assert re.search(rf"{re.escape(str(path))}\s+{WHOLE}\s+{kind}", lines)
    assert "3 checkpoints: 1 DAMAGED, 2 WHOLE" in found.text


def lose_the_moments_of_a_rank(path: Path) -> Path:
    """Overwrite both moments with zeros where rank 3 wrote them."""
    for shard in audit(path).checkpoint.shards:
        for role in ("exp_avg", "exp_avg_sq"):
            for extent in shard.streams[role].extents if role in shard.streams else ():
                if "pp_rank_3_" in extent.path:
                    with open(extent.path, "r+b") as file:
                        file.seek(extent.offset)
                        file.write(bytes(extent.nbytes))
    return path


def test_the_answer_is_on_top_then_the_saves_by_step_then_what_is_damaged(tmp_path: Path) -> None:
    save = copied(trained("0.19.8", "stage1")["stage1"], tmp_path / "run")
    damaged = lose_the_moments_of_a_rank(shutil.copytree(save, save.with_name("global_step3")))
    next(shutil.copytree(save, save.with_name("global_step1")).glob("*optim_states.pt")).unlink()
    found = page_of(save.parent)
    texts = (
        "3 checkpoints: 2 DAMAGED, 1 WHOLE",
        f"Resume from: {save} (step 2)",
        f"Load it: tag {save.name} in {save.parent}\n",
        f"In a script: ckpt-patches resume-from {save.parent} prints its path\n",
        f"To repair a newer one: ckpt-patches repair {damaged} --output NEW --from {save}\n",
        "global_step1 DAMAGED",
        "global_step2 WHOLE",
        "global_step3 DAMAGED",
        f"{damaged}: DAMAGED",
    )
    places = [found.text.find(text) for text in texts]
    assert -1 not in places
    assert places == sorted(places)
    assert [own["class"] for tag, own in found.elements if tag == "li"] == ["bad", "good chosen", "bad"]


def test_the_grid_has_the_rank_whose_elements_are_lost(zarr: Path, tmp_path: Path) -> None:
    path = lose_the_moments_of_a_rank(copied(trained("0.16.2", "stage2", "stage3")["stage2"], tmp_path))
    found = page_of(path)
    assert [own for tag, own in found.elements if own.get("class") == "grid"]
    lost = {f.array.rpartition(".")[0] for f in audit(path).findings if f.kind.name == "lost_moment"}
    assert sum(own.get("class") == "bad" for tag, own in found.elements if tag == "td") == len(lost) >= 2
    lose_master(zarr)  # of one parameter, and no rank is known
    assert not [own for tag, own in page_of(zarr).elements if own.get("class") == "grid"]


def test_a_name_is_no_markup(zarr: Path, tmp_path: Path) -> None:
    lose_master(zarr)
    named = zarr.rename(tmp_path / os.fsdecode(b"<script>'\n\xff"))
    assert "<script>'" in page_of(named).text
    dcp.save({"model": {HOSTILE: torch.tensor([1.0, float("nan")])}}, checkpoint_id=tmp_path / "tensors")
    assert '<script>alert(\'&"1")<' in page_of(tmp_path / "tensors").text


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


def test_a_page_replaces_the_one_before_only_as_a_whole(zarr: Path, tmp_path: Path) -> None:
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
    assert f"{zarr}: {DAMAGED}" in Parsed(to).text
