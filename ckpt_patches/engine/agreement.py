"""Code for fixes that change which collectives a save or load calls: it first checks that all ranks have the fix.

A rank without the fix (another image, another skip list) calls upstream's collectives. Then all ranks would wait for
each other until the process group times out. A patch for upstream omits this check, because there all ranks run the
same code: its edits are marked `ours_alone`.
"""

from collections.abc import Iterable

from ckpt_patches.engine.source import Function, NotNeeded, Part, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast

    import torch


def _announce_fix(fix: str) -> None:
    """Announce in the store of the process group that this rank has a fix."""
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        store.set(f"ckpt_patches/{fix}/{torch.distributed.get_rank()}", "it is there")
    except Exception:
        pass  # no group yet, or one without a store: nothing is checked


def _check_all_ranks_have_fix(fix: str, patience: int) -> None:
    """Raise RuntimeError on all ranks that have a fix if one of them lacks it. Checks once.

    The first rank to arrive checks that all have announced the fix, and writes the result to the
    store. So each rank sends a constant number of messages.

    Args:
        fix: its name, optionally followed by a dot and the version of the ranks' protocol.
        patience: seconds that a rank may be late.
    """
    from datetime import timedelta

    if not torch.distributed.is_initialized():
        return
    ranks = torch.distributed.get_world_size()
    checked = _check_all_ranks_have_fix.__dict__.setdefault("checked", set())
    if ranks < 2 or (fix, ranks) in checked:
        return
    checked.add((fix, ranks))
    _announce_fix(fix)
    announced = [f"ckpt_patches/{fix}/{rank}" for rank in range(ranks)]
    place = f"ckpt_patches/{fix} on {ranks}"
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        first = store.add(f"{place}/comers", 1) == 1
    except Exception:
        return  # a store without queries, such as that of a dry-run group
    if torch.distributed.get_backend() == "fake":
        return
    looked = f"{place}/looked"
    try:
        if first:
            store.wait(announced, timedelta(seconds=patience))
            store.set(looked, "all have it")
        else:
            store.wait([looked], timedelta(seconds=patience + 10))
        if store.get(looked) == b"all have it":
            return
    except RuntimeError:
        if first:
            store.set(looked, "not all")  # the others check for themselves: a rank may have been late
    found = "not all ranks have it"
    if hasattr(store, "check"):  # torch before 2.3 can only wait for a key
        there = [store.check([key]) for key in announced]
        if all(there):
            return
        found = f"{sum(there)} of {ranks} ranks have it, rank {there.index(False)} has not"
    checked.discard((fix, ranks))
    raise RuntimeError(
        f"{fix.partition('.')[0]}: {found}. Ranks with and without this fix wait for each other forever: expected it "
        "on all or on none. Install the same training-checkpoint-patches on all ranks, with the same CKPT_PATCHES "
        "and CKPT_PATCHES_SKIP"
    )


FUNCTIONS = (_announce_fix, _check_all_ranks_have_fix)


def insert_agreement(
    source: Source,
    fix: str,
    *,
    by_upstream: bool,
    announce: "ast.stmt | None",
    check: Iterable[Function],
    patience: int,
    before: str,
) -> None:
    """Insert the announcement of a fix after a statement, and the check at the start of functions.

    Args:
        source: the module.
        fix: its name, optionally followed by a dot and the version of the ranks' protocol.
        by_upstream: whether upstream already has the fix's changes.
        announce: a statement that every rank runs long before it saves, or None.
        check: the functions in which the fix changes the collectives.
        patience: seconds that a rank without an earlier announcement may come after the first one.
        before: a class of the module; the inserted functions go before it.

    Raises:
        NotNeeded: the source has the check, or upstream has the changes, so all ranks have them.
    """
    announcement = f'_announce_fix("{fix}")'
    call = f'_check_all_ranks_have_fix("{fix}", {patience})'
    parts: list[Part] = [*((call, function) for function in check), *FUNCTIONS]
    parts += [announcement] if announce is not None else []
    if by_upstream and not source.has(announcement) and not any(source.has(call, function) for function in check):
        raise NotNeeded
    source.skip_if(*parts)
    if announce is not None:
        source.insert_after(announce, announcement)
    for method in check:
        source.insert_at_start(method, call)
    for function in FUNCTIONS:
        source.insert_function_before(before, function)
