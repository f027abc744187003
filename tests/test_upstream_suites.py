"""upstream_suites.py joins and compares outcomes of upstream's tests correctly; upstream's tests are not run here."""

import json
from typing import Any

import generated
import upstream_suites as suites


def test_worst_of_the_ranks_counts() -> None:
    one = {"a": ("passed", ""), "b": ("passed", ""), "c": ("skipped", "why")}
    other = {"a": ("failed", "why"), "b": ("passed", "")}
    assert suites.joined([one, other]) == {"a": ("failed", "why"), "b": ("passed", "")}


def test_nothing_of_a_rank_is_nothing_of_a_test() -> None:
    assert suites.joined([{"a": ("passed", "")}, {}]) == {}


def test_tests_are_compared_by_name() -> None:
    found = {
        "without": {"a": ("passed", ""), "b": ("failed", "x")},
        "with": {"a": ("failed", "y"), "b": ("passed", "")},
    }
    assert suites.counts(found["without"]) == suites.counts(found["with"])
    assert set(suites.differences(found)) == {"a", "b"}


def recorded() -> dict[str, Any]:
    return dict(json.loads(suites.RECORD.read_text(encoding="utf-8")))


def test_page_has_what_is_recorded() -> None:
    page = suites.PAGE.read_text(encoding="utf-8")
    assert generated.filled(page, suites.blocks(recorded())) == page, "python tests/upstream_suites.py"


def test_a_fixs_own_test_fails_without_it_and_passes_with_it() -> None:
    """Each recorded test fails without its fix and passes with only that fix, in upstream's own harness."""
    rows = [row for suite in recorded().values() for row in suite.get("own", [])]
    assert {row["fix"] for row in rows} >= set(recorded()["deepspeed"]["fixes"])
    assert [row for row in rows if not suites.fails_without(row)] == []
