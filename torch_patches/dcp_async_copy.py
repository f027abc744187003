"""Copy every tensor before `dcp.async_save` returns: those on the CPU, sharded tensors and scalar DTensors.

https://github.com/pytorch/pytorch/issues/144657
"""

import ast

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import torch

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/pytorch/pytorch/issues/144657",
        "https://github.com/pytorch/pytorch/pull/145408",
    ),
    symptom="`dcp.async_save` writes tensors of a later step",
    releases=(("2.3.1", newest("torch")),),
    stacks="to 2.6: CPU tensors; 2.7: sharded tensors; later: scalar DTensors",
    silent=True,
    test="test/distributed/checkpoint/test_dcp_async_copy.py",
)

# Both return some tensors as they are.
STAGING = ("_offload_state_dict_to_cpu", "_create_cpu_state_dict")


def _own_tensors(staged: "Any", state_dict: "Any") -> "Any":
    """
    Returns a staged state dict with copies of the tensors that are still those of `state_dict`.
    """
    if isinstance(staged, torch.Tensor):
        is_empty = hasattr(staged, "local_shards") and not staged.local_shards()
        if staged is not state_dict or is_empty:
            return staged
        return staged.detach().to("cpu", copy=True)
    if isinstance(staged, dict):
        return {k: _own_tensors(v, state_dict[k]) for k, v in staged.items()}
    if isinstance(staged, (list, tuple)):
        return type(staged)(map(_own_tensors, staged, state_dict))
    return staged


@fix.edit(
    "torch.distributed.checkpoint.staging", independent=True, releases=(("2.4.1", newest("torch")),)
)
def own_staged_tensors(source: Source) -> None:
    """The stager of torch's own writers. Torch 2.3 has no stagers."""
    _own(source, source.function("BlockingAsyncStager.stage"))
    source.insert_function_before("BlockingAsyncStager", _own_tensors)
    if not source.imports("torch"):
        of_torch = [
            node
            for node in source.all_of(ast.ImportFrom, having="torch")
            if str(node.module).startswith("torch.")
        ]
        source.insert_before(min(of_torch, key=lambda node: node.lineno), "import torch")


@fix.edit(
    "torch.distributed.checkpoint.state_dict_saver",
    independent=True,
    releases=(("2.3.1", "2.8.0"),),
)
def own_tensors_without_a_stager(source: Source) -> None:
    """All saves of torch 2.3; up to 2.8, saves by a writer that is no stager."""
    save = source.function("async_save")
    _own(source, save)
    source.insert_function_before(source.function("_stateful_to_state_dict"), _own_tensors)


def _own(source: Source, function: Function) -> None:
    """Let the function pass on what staging returns through `_own_tensors`."""
    made = _made(source, function)
    if not made:
        raise NoMatch(f"expected {' or '.join(STAGING)} in {function.name}, found neither")
    calls = len(source.all("_own_tensors(...)", within=function))
    owned = [number < calls for number in range(len(made))]
    has_torch = source.imports("torch")  # often without the fix, too
    source.skip_if(_own_tensors, *owned, *([] if has_torch else [False]))
    for statement in made:
        source.replace(statement, _owned(source, statement))


def _made(source: Source, function: Function) -> list[ast.Return | ast.Assign]:
    """The statements that return or assign a staged state dict."""
    statements: list[ast.Return | ast.Assign] = [*source.all_of(ast.Return, function)]
    statements += source.all_of(ast.Assign, function)
    calls = [call for name in STAGING for call in source.all(f"{name}(...)", within=function)]
    return [statement for statement in statements if statement.value in calls]


def _owned(source: Source, statement: ast.Return | ast.Assign) -> str:
    """The statements in place of one that stages."""
    assert isinstance(statement.value, ast.Call)
    before, argument = "", source.text(statement.value.args[0])
    call = source.text(statement.value)
    if argument != "state_dict":  # torch 2.3
        before, call = f"state_dict = {argument}\n", call.replace(argument, "state_dict")
    if isinstance(statement, ast.Return):
        return f"{before}staged = {call}\nreturn _own_tensors(staged, state_dict)"
    staged = source.text(statement.targets[0])
    return f"{before}{staged} = {call}\n{staged} = _own_tensors({staged}, state_dict)"
