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


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "loaded_by"), [("hook", "none"), ("none", "hook")])
def test_it_is_dp_reshardable_to_a_run_without_the_fix_and_from_one(
    saved_by: str, loaded_by: str, tmp_path: Path
) -> None:
    version, kinds = newest_affected("sharding_type_default")[1], {"hook": "default", "none": "dp_reshardable"}
    for what, delivery in (("save", saved_by), ("load", loaded_by)):
        found = run(what, version, delivery, tmp_path, "plain", ranks=2, kind=kinds[delivery])
        assert found == {"plain": ""}


# What the ranks run


def bug(folder: Path) -> str:
    return mt.resumed("default", mt.build, folder / "checkpoint", steps=3)
