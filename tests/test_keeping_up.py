"""`make upstream`: what it reports between two records of a package, and what it records of a tree."""

import shutil
from pathlib import Path

import pytest

from ckpt_patches.engine.registry import NVRX
from keeping_up import Seen, Subject, planned, report, seen
from upstream import newest, tree

TITLE = "deepspeed, main"
BEFORE: Seen = {
    "version": "0123456789 of 2026-01-01",
    "plans": {"a": "applies (m, deepspeed.one)", "b": "no match - one.py: expected x", "c": "not present (-)"},
    "shown": {"a": "works"},
}
HEAD = f"- {TITLE}: 0123456789 of 2026-01-01 -> abcdefabcd of 2026-01-08"


def later(**plans: str) -> Seen:
    return {**BEFORE, "version": "abcdefabcd of 2026-01-08", "plans": {**BEFORE["plans"], **plans}}


def test_what_is_as_recorded_is_not_reported() -> None:
    assert report(TITLE, BEFORE, BEFORE) == []
    assert report(TITLE, BEFORE, later()) == [HEAD]


@pytest.mark.parametrize(
    ("fix", "words", "kind"),
    [
        ("b", "applies (m, deepspeed.one)", "matched"),
        ("a", "applies (m1, deepspeed.one)", "moved"),
        ("a", "applies (m, deepspeed.two)", "moved"),
        ("a", "already there (t)", "fixed upstream"),
        ("a", "not present (-)", "not present"),
        ("a", "no match - one.py: expected x", "no match"),
        ("b", "no match - one.py: expected y", "no match"),
    ],
)
def test_another_plan_is_reported(fix: str, words: str, kind: str) -> None:
    line = f"- `{fix}`, {TITLE}: {kind}: {BEFORE['plans'][fix]} -> {words}"
    assert report(TITLE, BEFORE, later(**{fix: words})) == [HEAD, line]


def test_what_does_not_work_any_more_is_reported() -> None:
    now = {**later(), "shown": {"a": "the bug shows with the fix: lost"}}
    assert report(TITLE, BEFORE, now) == [HEAD, f"- `a`, {TITLE}: the bug shows with the fix: lost"]
    assert report(TITLE, now, {**now, "shown": {"a": "works"}})[-1] == f"- `a`, {TITLE}: works"


def test_a_first_look_counts_and_names_what_does_not_work() -> None:
    now = {**BEFORE, "shown": {"a": "could not run: no zarr"}}
    counted = "1 applies, 1 no match, 1 not present"
    assert report(TITLE, {}, now) == [
        f"- {TITLE} 0123456789 of 2026-01-01: first look: {counted}",
        f"- `b`, {TITLE}: no match - one.py: expected x",
        f"- `a`, {TITLE}: could not run: no zarr",
    ]


def test_a_file_that_is_gone_is_no_match(tmp_path: Path) -> None:
    version = newest("nvidia-resiliency-ext")
    there = Subject(NVRX, TITLE, version, tree("nvidia-resiliency-ext", version))
    works = dict.fromkeys(("nvrx_aborted_save", "nvrx_cached_storage", "nvrx_dead_worker", "nvrx_staging"), "works")
    before = seen(there, {"version": version, "shown": works})
    assert before["plans"].keys() == works.keys()
    assert all(words.startswith("applies (m") for words in before["plans"].values())
    shutil.copytree(there.root / "nvidia_resiliency_ext", tmp_path / "nvidia_resiliency_ext")
    next(tmp_path.rglob("filesystem_async.py")).unlink()
    lines = list(planned(TITLE, before, seen(Subject(NVRX, TITLE, version, tmp_path), before)))
    assert lines
    assert all(": no match: applies (m" in line and str(tmp_path) not in line for line in lines)
