"""The map of data flows has every fix at the stage of its bug, and matches its tables."""

import itertools
import re
from xml.etree import ElementTree

import pytest

import map_page
from ckpt_patches.engine.registry import CORE, DEEPSPEED, FIXES, TARGETS
from upstream import REPOSITORY


def shown() -> list[str]:
    texts = ElementTree.parse(map_page.PICTURE).iter()
    return [str(text.text) for text in texts if text.get("class") == "code fix"]


@pytest.mark.parametrize("fix", FIXES)
def test_a_fix_is_on_the_map(fix: str) -> None:
    assert shown().count(fix) == len(map_page.SITS[fix])


def test_the_map_has_no_other_fix() -> None:
    assert {*map_page.SITS, *shown()} <= set(FIXES)


def test_the_picture_is_what_the_command_makes() -> None:
    assert map_page.PICTURE.read_text(encoding="utf-8") == map_page.drawing(), "make pictures"


@pytest.mark.parametrize("fix", FIXES)
def test_a_fix_sits_where_code_is_that_it_edits(fix: str) -> None:
    package = TARGETS[FIXES[fix][0]]
    assert map_page.SITS[fix]
    for name in map_page.SITS[fix]:
        stage = map_page.STAGES[name]
        assert stage.package == package
        assert set(stage.modules) & set(FIXES[fix]), name


def test_every_stage_that_runs_upstreams_code_is_of_use() -> None:
    """A fix edits each module that is on the map."""
    edited = {module for modules in FIXES.values() for module in modules}
    for stage in map_page.STAGES.values():
        assert set(stage.modules) <= edited, stage.title


def test_arrows_are_between_stages_of_one_package() -> None:
    for begin, end in map_page.ARROWS:
        assert map_page.STAGES[begin].package == map_page.STAGES[end].package
    reached = {name for arrow in map_page.ARROWS for name in arrow}
    assert reached == map_page.STAGES.keys()


@pytest.mark.parametrize("package", [CORE, DEEPSPEED])
def test_no_box_lies_on_another_and_no_line_leaves_its_box(package: str) -> None:
    placed = list(map_page.boxes(package, 0).values())
    for one, other in itertools.combinations(placed, 2):
        below = one.y + one.height <= other.y or other.y + other.height <= one.y
        assert below or one.x + map_page.BOX <= other.x or other.x + map_page.BOX <= one.x
    for box in placed:
        assert all(len(line.text) * line.letter <= map_page.BOX - 2 * map_page.PAD for line in box.lines)


def test_the_index_of_the_documentation_shows_it() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    assert re.search(r"!\[[^]]+\]\(map\.svg\)", index)
