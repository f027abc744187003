"""fused_adam_masters: apex without master weights, and one that uses those of bf16 weights."""

from pathlib import Path

import edits
from upstream import newest_affected, tree

FIX = "fused_adam_masters"
MODULE = "apex.optimizers.fused_adam"


def test_apex_without_master_weights_is_left_alone(tmp_path: Path) -> None:
    """The fix does not apply; the version cannot tell, as every commit has 0.1."""
    copy = edits.copy_of(tree(*newest_affected(FIX)), FIX, tmp_path)
    edits.rewrite(copy, MODULE, "        master_weights=False,\n", "")
    edits.check_not_needed(copy, FIX)


def test_masters_of_bf16_weights_are_not_left_out(tmp_path: Path) -> None:
    """The fix does not match apex#1731, whose master weights it would not save."""
    copy = edits.copy_of(tree(*newest_affected(FIX)), FIX, tmp_path)
    used = "g_bf.append(p.grad)\n"
    reason = edits.check_left_alone(
        copy, FIX, MODULE, used, f"{used}                    p_bf_master.append(p_master)\n"
    )
    assert "expected FusedAdam.step to update BF16 parameters without master weights" in reason
