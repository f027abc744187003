"""sharding_type_default: the save of a caller that names no format is `dp_reshardable` for all readers."""

from pathlib import Path

import pytest

from test_reshardable_padding_save import results
from upstream import newest_affected

FIX = "sharding_type_default"
NEWEST = newest_affected(FIX)[1]
EXACT = {"plain": "bit-equal"}


def resumed(
    version: str, delivery: str, folder: Path, kind: str = "default", load: Path | None = None
) -> dict[str, str]:
    return results(version, delivery, folder, "plain", ranks=2, kind=kind, load=load)


@pytest.mark.slow
def test_what_is_saved_is_dp_reshardable_to_a_run_without_the_fix(tmp_path: Path) -> None:
    resumed(NEWEST, "hook", tmp_path)
    assert resumed(NEWEST, "none", tmp_path, "dp_reshardable", load=tmp_path) == EXACT
    assert resumed(NEWEST, "none", tmp_path, load=tmp_path)["plain"].startswith("load died")


@pytest.mark.slow
def test_a_dp_reshardable_checkpoint_loads_by_default(tmp_path: Path) -> None:
    resumed(NEWEST, "none", tmp_path, "dp_reshardable")
    assert resumed(NEWEST, "hook", tmp_path, load=tmp_path) == EXACT
