"""Create the states of an optimizer that has looked at them before its first step, so that a load restores them.

https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/checkpoint/state_dict.py
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import copy
    from typing import Any

    _PARAMS = ""

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/checkpoint/state_dict.py",
    ),
    symptom="a resume without an error, and the optimizer has none of its states",
    releases=(("2.5.1", newest("torch")),),
    stacks="`get_state_dict` or `get_optimizer_state_dict`; schedule-free optimizers",
    silent=True,
    test="test/distributed/checkpoint/test_dcp_touched_state.py",
)

HAS_STATE = "any(state != {} for state in optim.state.values())"
REMEMBER = """# An optimizer that has looked up its states may count this step in its settings.
settings = _copied_settings(optim) if optim.state else []"""
RESTORE = """for param_group, own in zip(optim.param_groups, settings):
    param_group.update(own)"""


def _copied_settings(optim: "Any") -> "list[dict[str, Any]]":
    """
    Returns copies of the settings of the param groups.
    """
    return [
        {key: copy.deepcopy(value) for key, value in param_group.items() if key != _PARAMS}
        for param_group in optim.param_groups
    ]


@fix.edit("torch.distributed.checkpoint.state_dict")
def an_empty_state_is_none(source: Source) -> None:
    """`optim.state` is a defaultdict: to look up the state of a parameter makes an empty one."""
    init = source.function("_init_optim_state")
    if "raise RuntimeError" in source.text(init):
        raise NoMatch("expected `return` where there are gradients, found an error")  # before 2.5
    has_copy = source.imports("copy")
    own = (HAS_STATE, init), (RESTORE, init), ("settings = ...", init), _copied_settings
    source.skip_if(*own, *([] if has_copy else [False]))
    source.replace(source.branch("optim.state", within=init).test, HAS_STATE)
    step = source.one("optim.step(closure=None)", within=init)
    source.insert_before(step, REMEMBER)
    source.insert_after(step, RESTORE)
    source.insert_function_before(init, _copied_settings)
    if not has_copy:
        source.insert_before(source.one("import contextlib"), "import copy")
