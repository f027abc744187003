"""sharding_type_default: a caller of the real megatron-core that names no format saves in one that the release has."""

from pathlib import Path

import pytest

from test_reshardable_padding_save import results
from upstream import affected, newest_affected, with_fix, without_fix

FIX = "sharding_type_default"
AFFECTED = affected(FIX)
NEWEST = newest_affected(FIX)[1]
EXACT = {"plain": "bit-equal"}


def resumed(
    version: str, delivery: str, folder: Path, kind: str = "default", load: Path | None = None
) -> dict[str, str]:
    return results(version, delivery, folder, "plain", ranks=2, kind=kind, load=load)


@without_fix(FIX, AFFECTED)
def test_upstream_refuses_its_own_default(version: str, delivery: str, tmp_path: Path) -> None:
    found = resumed(version, delivery, tmp_path)["plain"]
    assert found.startswith("save died")
    assert "flattened" in found


@with_fix(FIX, AFFECTED)
def test_a_resume_is_bit_equal(version: str, delivery: str, tmp_path: Path) -> None:
    assert resumed(version, delivery, tmp_path) == EXACT


@pytest.mark.slow
def test_what_is_saved_is_dp_reshardable_to_a_run_without_the_fix(tmp_path: Path) -> None:
    resumed(NEWEST, "hook", tmp_path)
    assert resumed(NEWEST, "none", tmp_path, "dp_reshardable", load=tmp_path) == EXACT
    assert resumed(NEWEST, "none", tmp_path, load=tmp_path)["plain"].startswith("load died")


@pytest.mark.slow
def test_a_dp_reshardable_checkpoint_loads_by_default(tmp_path: Path) -> None:
    resumed(NEWEST, "none", tmp_path, "dp_reshardable")
    assert resumed(NEWEST, "hook", tmp_path, load=tmp_path) == EXACT
