"""param_remainders: the real megatron-core in formats that gather main parameters, and the audit of its checkpoints."""

from pathlib import Path

import pytest

from ckpt_patches.audit.audit import UNKNOWN, WHOLE, audit
from upstream import newest_affected, run_lines, tree

NEWEST = newest_affected("param_remainders")[1]


def line(delivery: str, what: str, folder: Path, kind: str, *options: str, ranks: int = 2) -> dict[str, object]:
    where = {"tree": tree("megatron-core", NEWEST), "delivery": delivery}
    (found,) = run_lines("param_remainders", what, folder, "--ranks", str(ranks), "--format", kind, *options, **where)
    return found


@pytest.mark.parametrize("kind", ["fully_reshardable", pytest.param("torch", marks=pytest.mark.long)])
def test_they_load_on_other_ranks_with_remainders_and_without(kind: str, tmp_path: Path) -> None:
    assert line("none", "save", tmp_path, kind, "--remainders") == {"differ": [], "error": ""}
    ranks = 1 if kind == "fully_reshardable" else 2
    for options in (("--remainders",), ()):
        assert line("hook", "load", tmp_path, kind, *options, ranks=ranks) == {"differ": [], "error": ""}
    assert len(line("none", "load", tmp_path, kind, ranks=ranks)["differ"]) == 4  # type: ignore[arg-type]


@pytest.mark.long
def test_dp_reshardable_keeps_their_type_and_loads_without_remainders(tmp_path: Path) -> None:
    line("none", "save", tmp_path, "dp_reshardable", "--remainders")
    for options in (("--remainders",), ()):
        assert line("hook", "load", tmp_path, "dp_reshardable", *options) == {"differ": [], "error": ""}


def test_main_params_are_refused_by_a_run_that_keeps_remainders(tmp_path: Path) -> None:
    line("none", "save", tmp_path, "fully_reshardable")
    found = line("hook", "load", tmp_path, "fully_reshardable", "--remainders")
    assert str(found["error"]).startswith("ValueError: expected remainders of main parameters")
    assert audit(tmp_path / "fully_reshardable").verdict == WHOLE


def test_the_audit_calls_them_unknown_and_not_damaged(tmp_path: Path) -> None:
    line("none", "save", tmp_path, "fully_reshardable", "--remainders")
    found = audit(tmp_path / "fully_reshardable")
    assert found.verdict == UNKNOWN
    told = [finding for finding in found.findings if "whole numbers of 16 bits" in finding.detail]
    assert len(told) == 4  # one per parameter
    assert {finding.kind.name for finding in found.findings if finding.kind.severity != "note"} == {"not_judged"}
