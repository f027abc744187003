"""Create the states of an optimizer that has looked at them before its first step, so that a load restores them.

https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/checkpoint/state_dict.py
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/checkpoint/state_dict.py",
    ),
    symptom="a resume without an error, and the optimizer has none of its states",
    releases=(("2.2.2", newest("torch")),),
    stacks="`get_state_dict` or `get_optimizer_state_dict`; schedule-free optimizers",
    silent=True,
    test="test/distributed/checkpoint/test_dcp_touched_state.py",
)

HAS_STATE = "any(state != {} for state in optim.state.values())"


@fix.edit("torch.distributed.checkpoint.state_dict")
def an_empty_state_is_none(source: Source) -> None:
    """`optim.state` is a defaultdict: to look up the state of a parameter makes an empty one."""
    init = source.function("_init_optim_state")
    source.skip_if(HAS_STATE, within=init)
    source.replace(source.branch("optim.state", within=init).test, HAS_STATE)
