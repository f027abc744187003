"""The audit's picture of damaged ranges: its layout, and the file."""

import colorsys
import dataclasses
import os
import re
from pathlib import Path

import pytest

from ckpt_patches.audit import damages
from ckpt_patches.audit.audit import Report, audit
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.readers.checkpoint import Checkpoint, Owner, Shard, Stream
from ckpt_patches.audit.report import plot, plot_layout
from ckpt_patches.cli import main
from megatron_checkpoints import ZARR, written
from test_audit import copied, lose_both_moments, lose_master, put_nan, remove_chunk, state
from zero_checkpoints import trained


@pytest.fixture
def zarr(tmp_path: Path) -> Path:
    return copied(written(ZARR).whole[-1], tmp_path)


def arrays(count: int, *findings: Finding, owners: tuple[Owner, ...] = (), ranks: int | None = None) -> Report:
    """A report on arrays of 1000 elements each."""
    shards = [
        Shard(f"layer{n}", "", (1000,), {"master": Stream(f"master.{n}", "float32", ())}, owners) for n in range(count)
    ]
    return Report(Checkpoint(Path("iter_0000003"), "Megatron zarr", 3, data_parallel=ranks, shards=shards), findings)


def lost(array: int, begin: int, end: int, kind: damages.FindingKind = damages.LOST_MASTER) -> Finding:
    return Finding(kind, f"master.{array}", "", begin, end)


def test_the_picture_has_what_was_lost_where_it_was_lost(zarr: Path) -> None:
    lose_master(zarr)
    drawn = plot_layout.panel(audit(zarr))
    assert [bar.label for bar in drawn.bars] == [f"{state('fp32_param')} 0.0"]
    (mark,) = drawn.bars[0].marks
    assert (mark.begin * 576, mark.end * 576) == pytest.approx((100, 200))
    assert mark.finding.kind is damages.LOST_MASTER


def test_the_title_has_checkpoint_step_and_verdict(zarr: Path) -> None:
    lose_master(zarr)
    title = plot_layout.panel(audit(zarr)).title
    assert title.startswith(f"{zarr.name}: DAMAGED (")
    assert "step 3" in title


@pytest.mark.parametrize("kind", plot_layout.COLOURS)
def test_no_damage_is_green(kind: str) -> None:
    """No damage is green or a greenish blue, as green is for WHOLE."""
    red, green, blue = (int(plot_layout.colour(kind)[at : at + 2], 16) for at in (1, 3, 5))
    assert green <= max(red, blue)
    hue = 360 * colorsys.rgb_to_hsv(red, green, blue)[0]
    assert not 70 < hue < 200


@pytest.mark.parametrize("kind", ["bad_file", "missing_chunk", "short_chunk", "long_chunk"])
def test_a_damaged_file_is_red(kind: str) -> None:
    red, green, blue = (int(plot_layout.colour(kind)[at : at + 2], 16) for at in (1, 3, 5))
    hue = 360 * colorsys.rgb_to_hsv(red, green, blue)[0]
    assert hue < 20 or hue > 340


def test_every_kind_that_can_lie_in_an_array_has_a_colour_of_its_own(zarr: Path) -> None:
    assert len(set(plot_layout.COLOURS.values()) | {plot_layout.OTHER}) == len(plot_layout.COLOURS) + 1
    assert plot_layout.COLOURS.keys() <= damages.KINDS.keys()
    for damage in (lose_master, lose_both_moments, put_nan, remove_chunk):
        damage(zarr)
        report = audit(zarr)
        shown = {mark.finding.kind.name for bar in plot_layout.panel(report).bars for mark in bar.marks}
        assert shown <= plot_layout.COLOURS.keys()
        assert [kind for kind, _ in plot_layout.legend([plot_layout.panel(report)])] == [
            k for k in damages.KINDS if k in shown
        ]


def test_of_a_thousand_arrays_the_damaged_are_drawn_and_the_others_counted() -> None:
    report = arrays(1000, *(lost(n, 0, 10 + n) for n in range(500, 512)))
    drawn = plot_layout.panel(report)
    assert [bar.label for bar in drawn.bars] == [f"master.{n}" for n in range(511, 499, -1)]
    assert drawn.rest == ("and 988 whole arrays",)


def test_damage_comes_before_suspicion() -> None:
    drawn = plot_layout.panel(arrays(3, lost(0, 0, 900, damages.OTHER_MASTERS), lost(1, 5, 10)))
    assert [bar.label for bar in drawn.bars] == ["master.1", "master.0"]
    assert drawn.rest == ("and 1 whole array",)


def test_more_than_are_legible_are_counted() -> None:
    drawn = plot_layout.panel(arrays(1000, *(lost(n, 0, 10) for n in range(1000))))
    assert len(drawn.bars) == plot_layout.MOST_BARS
    assert drawn.rest == (f"and {1000 - plot_layout.MOST_BARS} more with findings",)


def test_a_note_is_not_drawn() -> None:
    assert plot_layout.panel(arrays(2, lost(0, 0, 10, damages.NO_GRADIENT))).bars == ()


def test_what_was_not_read_is_not_called_whole() -> None:
    drawn = plot_layout.panel(arrays(9, Finding(damages.UNREADABLE, "file")))
    assert drawn.rest == ("and 9 arrays without a finding", "and 1 finding of no single array")


def test_one_element_of_many_can_be_seen() -> None:
    for at in (0, 500, 999):
        (mark,) = plot_layout.panel(arrays(1, lost(0, at, at + 1))).bars[0].marks
        assert 0 <= mark.begin < mark.end <= 1
        assert mark.end - mark.begin == pytest.approx(plot_layout.LEAST_WIDTH)
        assert mark.begin <= (at + 0.5) / 1000 <= mark.end


def test_a_finding_without_a_range_is_of_the_whole_array_and_pale() -> None:
    (mark,) = plot_layout.panel(arrays(1, Finding(damages.BAD_FILE, "master.0"))).bars[0].marks
    assert (mark.begin, mark.end, mark.is_exact) == (0, 1, False)


def test_no_mark_is_hidden_by_a_wider_or_a_pale_one() -> None:
    pale, wide, narrow = Finding(damages.BAD_FILE, "master.0"), lost(0, 0, 500), lost(0, 9, 10, damages.NOT_FINITE)
    drawn = plot_layout.panel(arrays(1, narrow, pale, wide)).bars[0]
    assert [mark.finding for mark in drawn.marks] == [pale, wide, narrow]


def test_boundaries_are_those_of_the_ranks_that_wrote() -> None:
    owners = (Owner("rank 0", 0, 300), Owner("rank 1", 300, 1000))
    assert plot_layout.panel(arrays(1, lost(0, 5, 9), owners=owners, ranks=4)).bars[0].boundaries == (0.3,)


def test_boundaries_of_an_even_division_are_drawn_where_a_hole_fits_them() -> None:
    assert plot_layout.panel(arrays(1, lost(0, 250, 500), ranks=4)).bars[0].boundaries == (0.25, 0.5, 0.75)
    assert plot_layout.panel(arrays(1, lost(0, 251, 500), ranks=4)).bars[0].boundaries == ()
    assert plot_layout.panel(arrays(1, lost(0, 0, 1000), ranks=4)).bars[0].boundaries == ()


def test_boundaries_of_a_real_zero_checkpoint(tmp_path: Path) -> None:
    path = copied(trained("0.16.2", "stage2", "stage3")["stage2"], tmp_path)
    report = audit(path)
    shard = next(shard for shard in report.checkpoint.shards if len(shard.owners) > 1)
    finding = Finding(damages.LOST_MASTER, shard.streams["master"].array, shard.label, 0, 1)
    (bar,) = plot_layout.panel(dataclasses.replace(report, findings=(finding,))).bars
    assert bar.boundaries == tuple(owner.begin / shard.numel for owner in shard.owners[1:])


# The file


def test_a_picture_of_the_holes(zarr: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lose_master(zarr)
    picture = tmp_path / "holes.png"
    assert main(["audit", str(zarr), "--plot", str(picture)]) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_says_in_words_what_it_shows(zarr: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lose_master(zarr)
    put_nan(zarr)
    picture = tmp_path / "holes.svg"
    assert main(["audit", str(zarr), str(written(ZARR).whole[0]), "--plot", str(picture)]) == 1
    text = picture.read_text()
    for words in (f"{zarr.name}: DAMAGED", "lost_master", "not_finite", "and 1 complete checkpoint"):
        assert f"<!-- {words}" in text
    assert re.search("<!-- and [0-9]+ whole arrays -->", text)
    for kind in ("lost_master", "not_finite"):
        assert text.count(plot_layout.colour(kind)) >= 2  # in the bar and in the legend


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    """Names with dollar signs are drawn literally: matplotlib would parse them as formulas, and fail."""
    pytest.importorskip("matplotlib")
    named = Stream("$\\frac$\u202e", "float32", ())
    report = arrays(1, Finding(damages.BAD_FILE, named.array))
    report.checkpoint.path = Path("run$\\nothing$\udcff")
    report.checkpoint.shards[0] = dataclasses.replace(report.checkpoint.shards[0], streams={"master": named})
    picture = tmp_path / "holes.svg"
    assert plot.draw([report], picture) == 1
    text = picture.read_text()
    assert "<!-- $\\frac$\\u202e -->" in text
    assert "<!-- run$\\nothing$\\udcff: DAMAGED" in text


def test_a_picture_of_whole_checkpoints_says_so(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "holes.svg"
    assert main(["audit", str(written(ZARR).whole[-1]), "--plot", str(picture)]) == 0
    assert "<!-- and 1 complete checkpoint -->" in picture.read_text()


def test_a_picture_that_cannot_be_written_leaves_nothing_half(zarr: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lose_master(zarr)
    folder = tmp_path / "taken.png"
    folder.mkdir()
    assert main(["audit", str(zarr), "--plot", str(folder)]) == 2
    assert sorted(os.listdir(tmp_path)) == sorted([zarr.name, "taken.png"])


def test_an_ending_that_is_no_pictures_is_refused_before_the_audit(
    zarr: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["audit", str(zarr), "--plot", "holes.txt"]) == 2
    said = capsys.readouterr()
    assert "expected a file that ends in one of" in said.err
    assert said.out == ""
