"""What a fix inserts that changes which collectives a save or a load calls: the ranks agree first that all have it.

A rank without it, of another image or with another skip list, calls upstream's collectives, and all ranks would wait
for each other until the process group gives up. This is not part of a change for upstream, where all ranks run the same
code: the edits that bring it are marked `ours_alone`.
"""

from collections.abc import Iterable

from ckpt_patches.engine.source import Function, NotConcerned, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast

    import torch


def _announce_fix(fix: str) -> None:
    """Tell all ranks, in the store of the process group, that this one has a fix."""
    if torch.distributed.is_initialized():
        store = torch.distributed.distributed_c10d._get_default_store()
        store.set(f"ckpt_patches/{fix}/{torch.distributed.get_rank()}", "it is there")


def _check_all_ranks_have_fix(fix: str, ranks: "list[int]") -> None:
    """Raise a RuntimeError, on all of these ranks that have a fix, if one of them has not; once for the same ranks.

    The first rank that comes here looks for half a minute whether all have announced it, and leaves
    in the store what it has found; so each rank has some messages, however many there are.
    """
    from datetime import timedelta

    checked = _check_all_ranks_have_fix.__dict__.setdefault("checked", set())
    if len(ranks) < 2 or (fix, tuple(ranks)) in checked:
        return
    _announce_fix(fix)
    store = torch.distributed.distributed_c10d._get_default_store()
    place = f"ckpt_patches/{fix} on {hash(tuple(ranks))}"  # of integers: the same in each process
    if store.add(f"{place}/comers", 1) == 1:
        announced = [f"ckpt_patches/{fix}/{rank}" for rank in ranks]
        try:
            store.wait(announced, timedelta(seconds=30))
            store.set(f"{place}/found", "all")
        except RuntimeError:
            there = [store.check([key]) for key in announced]
            missing = ranks[there.index(False)]
            store.set(f"{place}/found", f"{sum(there)} of {len(ranks)} ranks have it, rank {missing} has not")
    store.wait([f"{place}/found"], timedelta(seconds=50))
    found = store.get(f"{place}/found").decode()
    if found != "all":
        raise RuntimeError(
            f"{fix}: {found}. With and without this fix ranks wait for each other for ever: expected it on all or on "
            "none. Install the same training-checkpoint-patches on all ranks, with the same CKPT_PATCHES and "
            "CKPT_PATCHES_SKIP"
        )
    checked.add((fix, tuple(ranks)))


FUNCTIONS = (_announce_fix, _check_all_ranks_have_fix)


def insert_agreement(
    source: Source,
    fix: str,
    *,
    by_upstream: bool,
    announce: "ast.stmt | None",
    check: Iterable[Function],
    ranks: str,
    before: "ast.stmt",
) -> None:
    """Announce a fix behind one statement, if there is one so early; check it where functions start.

    Args:
        source: the module.
        fix: its name.
        by_upstream: whether what the fix changes is in the source already.
        announce: a statement that every rank has run long before it saves.
        check: the functions that call other collectives with the fix.
        ranks: an expression in them, the list of the ranks that call these collectives.
        before: a definition of the module, which the functions come before.

    Raises:
        NotConcerned: it is by upstream, and so on all ranks.
        AlreadyThere: the agreement is there.
        NoMatch: a part of it is.
    """
    announcement = f'_announce_fix("{fix}")'
    call = f'_check_all_ranks_have_fix("{fix}", {ranks})'
    parts = {
        **source.functions_there("", *FUNCTIONS),
        **{f"{call} in {function.name}": source.has(call, function) for function in check},
        **({announcement: source.has(announcement)} if announce is not None else {}),
    }
    if by_upstream and not any(parts.values()):
        raise NotConcerned
    source.check_parts(parts)
    if announce is not None:
        source.insert_after(announce, announcement)
    for method in check:
        source.insert_at_start(method, call)
    for function in FUNCTIONS:
        source.insert_function_before(before, function)
