"""Copy CPU tensors before an asynchronous save returns, because its worker shares the trainer's memory.

https://github.com/NVIDIA/nvidia-resiliency-ext/pull/376
"""

import ast

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, NotNeeded, Source

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/nvidia-resiliency-ext/pull/376",),
    symptom="a save contains tensors of later steps",
    releases=(("0.4.1", newest("nvidia-resiliency-ext")),),
    stacks="async saves of CPU state: CPU offload, `step` of torch's optimizers",
    silent=True,
    test="tests/checkpointing/unit/test_nvrx_staging.py",
)

VIEWS_ONLY = """Makes sure we perform a `clone` only if we detect incontiguous storage,
so that we don't blow up host memory unnecessarily."""
ALL = "A persistent worker receives them in shared memory, which the next step changes."
TITLES = ("Clone if we detect incontiguous storage for CPU tensors", "Clone tensors on the CPU")


@fix.edit("nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async", independent=True)
def clone_cpu_tensors(source: Source) -> None:
    """Upstream clones only views; a persistent worker gets all other CPU tensors in shared memory."""
    clone = _resolving(source, source.function("FileSystemWriterAsync.prepare_write_data"))
    described = ast.get_docstring(clone) or ""
    is_cloned = source.has("ten.clone()", within=clone) and not source.has("is_view", within=clone)
    if is_cloned and VIEWS_ONLY not in described:
        raise NotNeeded
    if not is_cloned:
        _clone_always(source, clone)
    if VIEWS_ONLY in described:
        text = described.replace(VIEWS_ONLY, ALL).replace(*TITLES)
        source.replace(clone.body[0], f'"""{text}\n"""')


def _clone_always(source: Source, clone: Function) -> None:
    is_view, returned = source.one("is_view = ...", within=clone), clone.body[-1]
    alone, flagged = (
        "return ten.clone() if is_view else ten",
        "return (ten.clone() if is_view else ten), False",
    )
    text = source.text(returned)
    if text not in (alone, flagged):
        raise NoMatch(f"expected `{alone}` at the end of {clone.name}, found `{text}`")
    cloned = "return ten.clone()" if text == alone else "return ten.clone(), False"
    source.replace(is_view, cloned, last=returned, about="clone if they are views")


@fix.edit("nvidia_resiliency_ext.checkpointing.utils", independent=True)
def copy_what_torch_saves(source: Source) -> None:
    """`TorchAsyncCheckpoint` stages with `to("cpu")`, which does not copy tensors on the CPU."""
    stage = source.function("preload_tensors")
    source.skip_if('in_var.detach().to("cpu", non_blocking=non_blocking, copy=True)', within=stage)
    call = source.one('in_var.detach().to("cpu", non_blocking=non_blocking)', within=stage)
    source.add_keyword(call, "copy", "True")


def _resolving(source: Source, prepare: Function) -> Function:
    """The nested function that processes each tensor; 0.6 renamed it. Raises NoMatch."""
    names = ("_clone_if_needed", "_clone_or_dequantize_if_needed")
    found = [one for one in source.all_of(ast.FunctionDef, prepare) if one.name in names]
    if len(found) != 1:
        raise NoMatch(
            f"expected {' or '.join(names)} in {prepare.name}, found {len(found)} of them"
        )
    return found[0]
