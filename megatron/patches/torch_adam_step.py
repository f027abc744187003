"""Load the step of torch's Adam from the param groups, and give each parameter its own step tensor.

https://github.com/areal-project/AReaL/issues/132
"""

import ast
from collections.abc import Sequence

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, NotNeeded, Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/areal-project/AReaL/issues/132",
        "https://github.com/areal-project/AReaL/issues/142",
    ),
    symptom="`KeyError: 'step'` at a resume, or a step count that runs ahead",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="distributed optimizer without Apex and Transformer Engine",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_torch_adam_step.py",
)

DISTRIB_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
# The method of a sharded format that reads the state, and the one in which a later release drops the step.
SAVES = {
    "get_parameter_state_fs_bucket_space": "sharded_param_state_fs_bucket_space",
    "get_parameter_state_dp_reshardable": "sharded_param_state_dp_reshardable",
    "sharded_param_state_fs_model_space": "sharded_param_state_fs_model_space",
}


SKIP_STEP = """if key == "step":
    continue  # loaded with the param groups"""


def methods(source: Source, names: Sequence[str]) -> list[Function]:
    """The optimizer's methods with these names, as far as this release has them."""
    full = [f"DistributedOptimizer.{name}" for name in names]
    return [source.function(name) for name in full if source.has_function(name)]


@fix.edit(DISTRIB_OPTIMIZER)
def load_without_step(source: Source) -> None:
    """A checkpoint's tensors do not include `step`; the state that they are copied into does."""
    load = source.function("DistributedOptimizer._set_main_param_and_optimizer_states")
    loops = [
        loop for loop in source.all_of(ast.For, load) if source.text(loop.iter) == "dst_tensors"
    ]
    if not loops:
        raise NoMatch("expected `for key in dst_tensors`, found none")
    source.skip_if(*((SKIP_STEP, loop) for loop in loops))
    for loop in loops:
        source.insert_before(loop.body[0], SKIP_STEP)


@fix.edit(DISTRIB_OPTIMIZER)
def one_step_each(source: Source) -> None:
    """torch adds 1 in place per parameter: with one shared tensor, each step counts once per parameter."""
    load = source.function("DistributedOptimizer.load_state_dict")
    source.skip_if("s['step'] = step.clone()", within=load)
    source.replace(source.one("s['step'] = step", within=load).value, "step.clone()")


@fix.edit(DISTRIB_OPTIMIZER, independent=True, releases=(("0.12.0", "0.15.3"),))
def save_without_step(source: Source) -> None:
    """These sharded formats treat every key of the state as a tensor of the parameter's size."""
    pairs = [methods(source, pair) for pair in SAVES.items()]
    affected = [
        pair[0]
        for pair in pairs
        if pair and not any(source.all("'step'", within=method) for method in pair)
    ]
    if any(pairs) and not affected:
        raise NotNeeded
    for function in affected:
        assignments = [
            node
            for node in source.all_of(ast.Assign, function)
            if source.text(node.targets[0]) == "tensors"
        ]
        if len(assignments) != 1:
            raise NoMatch(
                f"expected `tensors = ...` once in {function.name}, found it {len(assignments)} times"
            )
        source.insert_after(
            assignments[0], 'tensors.pop("step", None)  # saved with the param groups'
        )
