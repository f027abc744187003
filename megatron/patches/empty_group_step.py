"""Save the step of a param group that has no parameters on the saving rank, and load it where it is missing.

https://github.com/NVIDIA/TransformerEngine/issues/1986
"""

import ast
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/TransformerEngine/issues/1986",
        "https://github.com/NVIDIA/TransformerEngine/pull/3318",
    ),
    symptom="a param group counts its steps from 1 after a resume",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="distributed optimizer, FusedAdam; saved by 0.13.1 or earlier",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_empty_group_step.py",
)

DISTRIB_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
CALL = '_align_group_steps(state_dict["optimizer"]["param_groups"])'
EMPTY = "len(self.optimizer.state) == 0"
# Since 0.14.0 upstream takes the step of another group here.
UPSTREAM = 'len(g["params"]) > 0 and "step" in g'


def _align_group_steps(param_groups: "list[dict[str, Any]]") -> None:
    """Give groups without parameters on the saving rank the step of the others.

    The FusedAdam of Apex and Transformer Engine counts no step of an empty group, and only the
    param groups of one rank are saved. Loaded groups have no `params`; those without a step are
    filled.
    """
    steps = {
        int(group["step"])
        for group in param_groups
        if group.get("params", True) and group.get("step") is not None
    }
    if len(steps) != 1:
        return
    for group in param_groups:
        if not group.get("params", True) or group.get("step") is None:
            group["step"] = min(steps)


def _first_use(source: Source, load: Function) -> ast.stmt:
    """Return the first statement that needs the saved groups, or the allocation of states before it."""
    inner: ast.stmt = source.one("inner_state_dict = self.optimizer.state_dict()", within=load)
    allocations = [
        node
        for node in load.body
        if isinstance(node, ast.If) and source.has(EMPTY, within=node.test)
    ]
    return allocations[0] if allocations and allocations[0].lineno < inner.lineno else inner


@fix.edit(DISTRIB_OPTIMIZER)
def align_the_groups(source: Source) -> None:
    """A group without a step counts from 1, with another bias correction."""
    load, save = (
        source.function(f"DistributedOptimizer.{name}")
        for name in ("load_state_dict", "state_dict")
    )
    functions = [load] if source.has(UPSTREAM, within=save) else [load, save]
    source.skip_if(*((CALL, function) for function in functions), _align_group_steps)
    source.insert_before(_first_use(source, load), CALL)
    if save in functions:
        source.insert_before(source.loop("param_group", within=save), CALL)
    source.insert_function_before("DistributedOptimizer", _align_group_steps)
