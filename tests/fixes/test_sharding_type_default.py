"""sharding_type_default: a save without a format is `dp_reshardable`."""

from pathlib import Path

import pytest

from test_reshardable_padding_save import run
from trainers.lazy import mt
from upstream import newest_affected, proof

test_the_save_fails, test_a_resume_goes_on_bit_for_bit = proof(
    __file__, "CheckpointingException: ShardedTensor.flattened_range"
)


# Further cases

FIX = "sharding_type_default"
NEWEST = newest_affected(FIX)[1]
EXACT = {"plain": ""}
BUCKETS = "dp_reshardable"


def run_plain(what: str, delivery: str, folder: Path, kind: str = "default") -> dict[str, str]:
    return run(what, NEWEST, delivery, folder, "plain", ranks=2, kind=kind)


@pytest.mark.slow
def test_what_is_saved_is_dp_reshardable_to_a_run_without_the_fix(tmp_path: Path) -> None:
    assert run_plain("save", "hook", tmp_path) == EXACT
    assert run_plain("load", "none", tmp_path, BUCKETS) == EXACT
    assert run_plain("load", "none", tmp_path) != EXACT


@pytest.mark.slow
def test_a_dp_reshardable_checkpoint_loads_by_default(tmp_path: Path) -> None:
    assert run_plain("save", "none", tmp_path, BUCKETS) == EXACT
    assert run_plain("load", "hook", tmp_path) == EXACT


# What the ranks run


def bug(folder: Path) -> str:
    return mt.resumed("default", mt.build, folder / "checkpoint", steps=3)
