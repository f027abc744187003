"""README.md and the pages beside it have the required content in the required order. test_pages runs their commands."""

import re
from pathlib import Path

import pytest

from ckpt_patches.demo.run import demonstrations
from ckpt_patches.engine.fix import load
from ckpt_patches.engine.registry import FIXES
from upstream import REPOSITORY

pytestmark = pytest.mark.quick

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
SECTIONS = [
    "Checking checkpoints",
    "Which bugs hit my release?",
    "Three ways to apply a fix",
    "Switches",
    "Support",
]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def test_the_sections_are_in_order_and_short() -> None:
    lines = README.splitlines()
    assert re.findall(r"^## (.*)$", README, re.M) == SECTIONS
    assert len(lines) <= 80
    assert lines.index(f"## {SECTIONS[0]}") < 40


def test_the_pitch_has_three_sentences_and_the_quick_start_five_lines() -> None:
    _, pitch, quick_start, *_ = README.split("\n\n")
    assert len(re.findall(r"\.(?=\s|$)", pitch)) == 3
    fence, *block, end = quick_start.splitlines()
    assert (fence, end) == ("```console run", "```")
    assert len(block) == 5
    assert block[0].startswith("$ pip install")
    assert block[1] == "$ ckpt-patches status"


def test_the_bugs_of_a_release_are_found_by_command_and_by_page() -> None:
    section = README.partition(f"## {SECTIONS[1]}")[2].partition("\n## ")[0]
    assert "`ckpt-patches list --for megatron-core==0.16.1`" in section
    assert "(docs/symptoms.md)" in section
    silent = sum(load(name).silent for name in FIXES)
    assert round(3 * silent / len(FIXES)) == 2


def test_the_end_has_support_reports_security_and_affiliation_in_order() -> None:
    end = README.partition(f"## {SECTIONS[-1]}")[2]
    parts = [
        "Hardly run on GPUs",
        "Python 3.10",
        "project URL",
        "SECURITY.md",
        "Not affiliated with NVIDIA",
    ]
    places = [end.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)
    assert (REPOSITORY / "SECURITY.md").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_units_are_binary(page: Path) -> None:
    """Sizes use KiB, MiB and GiB, as in the output of all tools."""
    assert re.findall(r"\b\d[\d.,]* ?[kKMGT]B\b", page.read_text(encoding="utf-8")) == []


def test_ci_runs_the_tests_and_the_demo() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in script if line.startswith("make ")] == [
        f"make {part}" for part in ("test", "fixes", "demo", "rest", "older")
    ]
    assert demonstrations().keys() == FIXES.keys()


def test_the_sign_off_for_deepspeed_is_documented() -> None:
    page = (REPOSITORY / "docs" / "patches.md").read_text(encoding="utf-8")
    assert "--signoff" in page


def test_the_number_of_fixes_is_theirs() -> None:
    (number,) = re.findall(r"(\d+)\s+fixes, no fork", README)
    assert int(number) == len(FIXES)
