"""bf16_stage0_gradients: what a step of the real DeepSpeed leaves, on 2 and 3 ranks.

What comes of it in a resume is in test_bf16_stage0_state.py.
"""

from upstream import demonstrate, releases, with_fix, without_fix

FIX = "bf16_stage0_gradients"

# No release of the default run has the bug.
AFFECTED = releases("deepspeed", oldest="0.17.6", newest="0.18.5") or ["0.18.5"]


@without_fix(FIX, AFFECTED)
def test_upstream_keeps_the_gradients(version: str, delivery: str) -> None:
    assert demonstrate(FIX, delivery, version).bug


@with_fix(FIX, AFFECTED)
def test_no_gradients_are_left(version: str, delivery: str) -> None:
    assert not demonstrate(FIX, delivery, version).bug
