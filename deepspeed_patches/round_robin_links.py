"""Link parameters at their offsets in the flat buffer with `round_robin_gradients`.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/stage_1_and_2.py#L841
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NotNeeded, Source

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/stage_1_and_2.py#L841",),
    symptom="links, conversions and universal loads take other parameters' data",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="ZeRO 1 and 2 with `round_robin_gradients`",
    silent=True,
    test="tests/unit/checkpoint/test_round_robin_links.py",
)

GIVEN, IN_ORDER = "self.bit16_groups[i]", "self.round_robin_bit16_groups[i]"


@fix.edit("deepspeed.runtime.zero.stage_1_and_2")
def link_in_the_order_of_the_buffer(source: Source) -> None:
    """Upstream assumes that the buffer has the parameters in the order of the param group."""
    link = source.function("DeepSpeedZeroOptimizer._link_all_hp_params")
    given = source.all(GIVEN, within=link)
    if not given and source.has(IN_ORDER, within=link):
        raise NotNeeded
    for node in given or [source.one(GIVEN, within=link)]:
        source.replace(node, IN_ORDER)
