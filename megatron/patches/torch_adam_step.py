"""Load an optimizer state of torch's Adam: its `step` is in the param groups, and each parameter needs one of its own.

https://github.com/NVIDIA/Megatron-LM/issues/1842
"""

import ast

from ckpt_patches.fix import Fix
from ckpt_patches.source import AlreadyThere, NoMatch, NotConcerned, Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/issues/1842",
        "https://github.com/NVIDIA/Megatron-LM/issues/1820",
    ),
    affected="megatron-core 0.9.0 to main, without Apex and Transformer Engine",
    test="tests/unit_tests/dist_checkpointing/test_torch_adam_step.py",
)

DISTRIB_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"


@fix.edit(DISTRIB_OPTIMIZER)
def load_without_step(source: Source) -> None:
    """The tensors of a checkpoint hold no `step`; the state that they are copied into does."""
    if b"HAVE_APEX_OR_TE" not in source.data:
        raise NotConcerned  # this release does not run without Apex or Transformer Engine
    loops = [node for node in source.all_of(ast.For) if source.text(node.iter) == "dst_tensors"]
    if not loops:
        raise NoMatch("expected `for key in dst_tensors`, found none")
    if all(source.all("key == 'step'", within=loop) for loop in loops):
        raise AlreadyThere
    for loop in loops:
        skip_step = """if key == "step":
    continue  # loaded with the param groups"""
        source.insert_before(loop.body[0], skip_step)


@fix.edit(DISTRIB_OPTIMIZER)
def one_step_each(source: Source) -> None:
    """torch adds 1 in place for each parameter: with one tensor for all, a step counts as many."""
    if b"HAVE_APEX_OR_TE" not in source.data:
        raise NotConcerned
    if source.all("s['step'] = step.clone()"):
        raise AlreadyThere
    source.replace(source.one("s['step'] = step").value, "step.clone()")


@fix.edit(DISTRIB_OPTIMIZER)
def save_without_step(source: Source) -> None:
    """These sharded formats take every key of the state for a tensor of the parameter's size."""
    if b"HAVE_APEX_OR_TE" not in source.data:
        raise NotConcerned
    names = ("get_parameter_state_fs_bucket_space", "sharded_param_state_fs_model_space")
    methods = [f"DistributedOptimizer.{name}" for name in names]
    functions = [source.function(method) for method in methods if source.has_function(method)]
    affected = [function for function in functions if not source.all("'step'", within=function)]
    if not affected:
        raise AlreadyThere
    for function in affected:
        assignments = [
            node for node in source.all_of(ast.Assign, function) if source.text(node.targets[0]) == "tensors"
        ]
        if len(assignments) != 1:
            raise NoMatch(f"expected `tensors = ...` once in {function.name}, found it {len(assignments)} times")
        source.insert_after(assignments[0], 'tensors.pop("step", None)  # saved with the param groups')
