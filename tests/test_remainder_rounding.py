"""remainder_rounding: apex before its checkpoints had main parameters."""

from pathlib import Path

import edits
from ckpt_patches.engine.plan import Outcome
from upstream import newest_affected, tree

FIX = "remainder_rounding"
MODULE = "apex.contrib.optimizers.distributed_fused_adam"


def test_apex_without_masters_in_its_state_is_left_alone(tmp_path: Path) -> None:
    """Apex without main parameters in its state needs no fix. All of its commits have version 0.1."""
    copy = edits.copy_of(tree(*newest_affected(FIX)), FIX, tmp_path)
    edits.rewrite(copy, MODULE, "state_dict_v2", "state_dict")
    edits.rewrite(copy, MODULE, "state_dict_format", "format")
    edits.check_not_needed(copy, FIX)


def test_another_name_of_the_load_is_missed(tmp_path: Path) -> None:
    copy = edits.copy_of(tree(*newest_affected(FIX)), FIX, tmp_path)
    edits.rewrite(copy, MODULE, "state_dict_v2", "state_dict_v3")
    assert edits.plan(copy, FIX)[0].outcome is Outcome.NO_MATCH
