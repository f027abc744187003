"""Keep the staged data of an asynchronous save unchanged: hold staged tensors, clone shared CPU tensors.

https://github.com/NVIDIA/Megatron-LM/issues/2288
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch

ASYNC_UTILS = "megatron.core.dist_checkpointing.strategies.async_utils"

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/issues/2288",),
    symptom="a save contains data of a later step or another tensor",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="asynchronous saves; from 0.17.0 `--async-strategy mcore`",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_async_save_staging.py",
)


def _own_tensors(staged: object) -> object:
    """Return staged write buckets in which shared CPU tensors are cloned.

    Staging does not copy tensors that are already on the CPU, so the worker would use the
    trainer's own memory.
    """
    if isinstance(staged, (list, tuple)) and type(staged) in (list, tuple):
        return type(staged)(map(_own_tensors, staged))
    if isinstance(staged, torch.Tensor) and staged.device.type == "cpu" and staged.is_shared():
        return staged.clone()
    return staged


@fix.edit(ASYNC_UTILS, independent=True, releases=(("0.12.0", "0.16.1"),))
def hold_staged_tensors(source: Source) -> None:
    """A forked writer shares pinned memory with the trainer; without a reference, torch reuses it."""
    schedule = source.function("TemporalAsyncCaller.schedule_async_call")
    close = source.function("TemporalAsyncCaller.close")
    stage = "async_fn_args[1] = async_req.preload_fn()"
    source.skip_if("self.preloaded_holder = async_fn_args[1]", within=schedule)  # since 0.17
    source.skip_if(
        "self._staged = async_fn_args[1]", ("self._staged = None", close), within=schedule
    )
    source.insert_after(
        source.one(stage, within=schedule),
        "self._staged = async_fn_args[1]  # until the writer has ended",
    )
    source.insert_after(source.one("self.process = None", within=close), "self._staged = None")


@fix.edit(ASYNC_UTILS, independent=True)
def own_shared_tensors(source: Source) -> None:
    """The trainer waits only until a persistent worker has staged; steps change tensors during the write."""
    loop = source.function("PersistentAsyncCaller.async_loop")
    source.skip_if("_own_tensors(item.preload_fn())", _own_tensors, within=loop)
    stage = source.one("async_fn_args[1] = item.preload_fn()", within=loop)
    source.replace(stage.value, "_own_tensors(item.preload_fn())")
    source.insert_function_before("PersistentAsyncCaller", _own_tensors)
