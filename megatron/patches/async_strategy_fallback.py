"""Save asynchronously with megatron-core's own writers if nvidia-resiliency-ext is not installed.

https://github.com/radixark/miles/pull/2816
"""

import ast

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Source

fix = Fix(
    __name__,
    upstream=("https://github.com/radixark/miles/pull/2816",),
    symptom="the first asynchronous save fails: ModuleNotFoundError, nvidia-resiliency-ext",
    releases=(("0.17.0", newest("megatron-core")),),
    stacks="asynchronous saves without nvidia-resiliency-ext",
    test="tests/unit_tests/dist_checkpointing/test_async_strategy_fallback.py",
)

FALL_BACK = """warnings.warn(
    "expected nvidia-resiliency-ext for `async_strategy`=nvrx, found no compatible one:"
    " asynchronous saves go on with mcore. All ranks need the same packages:"
    " install it, or set `async_strategy` to mcore."
)
imports = _import_mcore_async()
async_strategy = "mcore"
"""


@fix.edit("megatron.core.dist_checkpointing.strategies.torch")
def fall_back_to_mcore(source: Source) -> None:
    """Upstream first imports it when the first save starts, hours after the start of training."""
    choose = source.function("get_async_strategy")  # since 0.17
    tries = source.all_of(ast.Try, choose)
    if len(tries) != 1 or len(tries[0].handlers) != 1:
        raise NoMatch(f"expected one `try` with one handler in {choose.name}")
    (handler,) = tries[0].handlers
    source.skip_if("_import_mcore_async()", within=handler)
    if len(handler.body) != 1 or not isinstance(handler.body[0], ast.Raise):
        raise NoMatch(f"expected one `raise` in the handler of {choose.name}")
    source.replace(handler.body[0], FALL_BACK.rstrip())
