"""The record of `make writers` has all writers, with the right verdicts of the audit, and the page shows it."""

import pytest

import generated
from ckpt_patches.audit.audit import DAMAGED, WHOLE
from writers import page, record
from writers.rows import WRITERS

pytestmark = pytest.mark.quick


def test_all_writers_are_recorded() -> None:
    assert {name: (*found["cases"],) for name, found in record.read().items()} == {
        n: w.cases for n, w in WRITERS.items()
    }


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_recorded_is_of_the_pinned_release(name: str) -> None:
    assert WRITERS[name].requirement == f"{name}=={record.read()[name]['on'][name]}"


@pytest.mark.parametrize("name", WRITERS)
def test_saves_are_sound_and_their_damage_is_found(name: str) -> None:
    for case in record.read()[name]["cases"].values():
        assert case["as saved"] == WHOLE
        assert all(case[change].startswith(DAMAGED) for change in record.CHANGES)
        assert case["step"] == 3 or case["format"].endswith("weights alone")


def test_the_page_is_that_of_the_record() -> None:
    assert generated.block(page.PAGE.read_text(), page.BLOCK) == page.section().splitlines(), "tests/writers/page.py"
