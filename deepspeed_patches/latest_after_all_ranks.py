"""Write `latest` only after all ranks have written their files.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4960
"""

import ast

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, NotNeeded, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import torch

ENGINE = "deepspeed.runtime.engine"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4960",),
    symptom="a restart fails: `latest` names a checkpoint that a rank did not finish",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="ZeRO 1 and 2",
    silent=False,
    test="tests/unit/checkpoint/test_latest_after_all_ranks.py",
)

SAVE = "DeepSpeedEngine.save_checkpoint"
COMMIT_LATER = "DeepSpeedEngine._commit_decoupled_checkpoint"  # since 0.17.1, for writes in the background

BARRIER = "dist.barrier()"
WAIT = f"""# Other ranks may still be writing, and may fail at it.
{BARRIER}"""


@fix.edit(ENGINE)
def wait_for_all_ranks(source: Source) -> None:
    """Upstream waits only after it has written `latest`."""
    saves = functions(source)
    source.skip_if(*(waits(source, function) for function in saves))
    for function in saves:
        source.insert_before(statement_that_names(source, function), WAIT)


def _announce_barrier() -> "Any":
    """Announce in the store of the process group that this rank has the barrier before `latest` is written."""
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        store.set(f"ckpt_patches/latest_after_all_ranks.1/{torch.distributed.get_rank()}", "it is there")
        return store
    except Exception:
        return None  # no group yet, or one without a store: nothing is checked


def _check_all_ranks_have_barrier() -> None:
    """Raise RuntimeError on all ranks with this barrier if one lacks it: they would wait for it forever.

    Checks once. Rank 0 looks for all announcements, the others for its result, so a rank sends few messages.
    """
    from datetime import timedelta

    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    checked = _check_all_ranks_have_barrier.__dict__.setdefault("checked", set())
    if ranks < 2 or ranks in checked or torch.distributed.get_backend() == "fake":
        return
    store = _announce_barrier()
    if store is None:
        return
    key = "ckpt_patches/latest_after_all_ranks.1"
    announced, result = [f"{key}/{rank}" for rank in range(ranks)], f"{key}/all {ranks}"
    found = "not all ranks have it"
    try:
        if torch.distributed.get_rank() == 0:
            store.wait(announced, timedelta(seconds=30))
            store.set(result, "have it")
        else:
            store.wait([result], timedelta(seconds=40))
        there = [True]
    except RuntimeError:  # without rank 0, or if it was late, each rank looks for itself
        there = [store.check([one]) for one in announced] if hasattr(store, "check") else []  # torch before 2.3
    if there and all(there):
        checked.add(ranks)
        return
    if there:
        found = f"{sum(there)} of {ranks} ranks have it, rank {there.index(False)} has not"
    raise RuntimeError(
        f"latest_after_all_ranks: {found}. Ranks with and without this fix wait for each other forever: expected it "
        "on all or on none. Install the same training-checkpoint-patches on all ranks, with the same CKPT_PATCHES "
        "and CKPT_PATCHES_SKIP"
    )


ANNOUNCE, CHECK = "_announce_barrier()", "_check_all_ranks_have_barrier()"


@fix.edit(ENGINE, independent=True, ours_alone=True)
def agree_first(source: Source) -> None:
    """A rank without this barrier (another image or skip list) would wait in another one. Not in a patch for upstream:
    there, all ranks run the same code.
    """
    saves, init = functions(source), source.function("DeepSpeedEngine.__init__")
    has_own = source.has(ANNOUNCE, init) or any(source.has(CHECK, function) for function in saves)
    if not has_own and all(waits(source, function) for function in saves):
        raise NotNeeded
    added = (_announce_barrier, _check_all_ranks_have_barrier)
    source.skip_if((ANNOUNCE, init), *((CHECK, function) for function in saves), *added)
    source.insert_after(init.body[-1], ANNOUNCE)
    for function in saves:
        source.insert_at_start(function, CHECK)
    for brought in added:
        source.insert_function_before("DeepSpeedEngine", brought)


def functions(source: Source) -> list[Function]:
    """The methods that write `latest`."""
    later = source.function_of(COMMIT_LATER, ("0.17.1", newest("deepspeed")))
    return [source.function(SAVE), *([later] if later else [])]


def statement_that_names(source: Source, function: Function) -> ast.If:
    """The `if` of the rank that writes `latest`. Raises NoMatch."""
    branches = [branch for branch in source.all_of(ast.If, function) if opens_latest(source, branch.body)]
    if len(branches) != 1:
        raise NoMatch(f"expected one `if` that writes `latest` in {function.name}, found {len(branches)}")
    return branches[0]


def opens_latest(source: Source, statements: list[ast.stmt]) -> bool:
    """Whether one of them writes `latest`; by `latest_replaced` it is a call."""
    writes = [statement for statement in statements if isinstance(statement, ast.With | ast.Expr)]
    return any(source.has("os.path.join(..., 'latest')", statement) for statement in writes)


def waits(source: Source, function: Function) -> bool:
    """Whether a barrier is directly before the statement that writes `latest`."""
    statement = statement_that_names(source, function)
    blocks = [function.body, *(branch.body for branch in source.all_of(ast.If, function))]
    return any(source.has(BARRIER, block[block.index(statement) - 1]) for block in blocks if statement in block)
