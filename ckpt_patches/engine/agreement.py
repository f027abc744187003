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
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        store.set(f"ckpt_patches/{fix}/{torch.distributed.get_rank()}", "it is there")
    except Exception:
        pass  # no group yet, or one without a store: nobody is asked


def _check_all_ranks_have_fix(fix: str, ranks: "list[int] | None", patience: int) -> None:
    """Raise a RuntimeError, on all of these ranks that have a fix, if one of them has not; once for the same ranks.

    The first rank that comes here looks whether all have announced it, and leaves in the store that
    they have; so each rank has some messages, however many there are.

    Args:
        fix: its name, and behind a dot a number that changes with what ranks send each other.
        ranks: in the default process group; None for all of them.
        patience: seconds that a rank may be late.
    """
    from datetime import timedelta

    if not torch.distributed.is_initialized():
        return
    if ranks is None:
        ranks = list(range(torch.distributed.get_world_size()))
    checked = _check_all_ranks_have_fix.__dict__.setdefault("checked", set())
    if len(ranks) < 2 or (fix, tuple(ranks)) in checked:
        return
    checked.add((fix, tuple(ranks)))
    _announce_fix(fix)
    announced = [f"ckpt_patches/{fix}/{rank}" for rank in ranks]
    place = f"ckpt_patches/{fix} on {hash(tuple(ranks))}"  # of integers: the same in each process
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        first = store.add(f"{place}/comers", 1) == 1
    except Exception:
        return  # a store that cannot be asked, as that of a group for dry runs
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
            store.set(looked, "not all")  # the others look for themselves: one may have been late
    found = "not all ranks have it"
    if hasattr(store, "check"):  # torch before 2.3 cannot ask for a key without waiting for it
        there = [store.check([key]) for key in announced]
        if all(there):
            return
        found = f"{sum(there)} of {len(ranks)} ranks have it, rank {ranks[there.index(False)]} has not"
    checked.discard((fix, tuple(ranks)))
    raise RuntimeError(
        f"{fix.partition('.')[0]}: {found}. With and without this fix ranks wait for each other for ever: expected it "
        "on all or on none. Install the same training-checkpoint-patches on all ranks, with the same CKPT_PATCHES, "
        "CKPT_PATCHES_ENABLE and CKPT_PATCHES_SKIP"
    )


FUNCTIONS = (_announce_fix, _check_all_ranks_have_fix)


def insert_agreement(
    source: Source,
    fix: str,
    *,
    by_upstream: bool,
    announce: "ast.stmt | None",
    check: Iterable[Function],
    ranks: str,
    patience: int,
    before: "ast.stmt",
) -> None:
    """Announce a fix behind one statement, if there is one so early; check it where functions start.

    Args:
        source: the module.
        fix: its name, and behind a dot a number that changes with what ranks send each other.
        by_upstream: whether what the fix changes is in the source already.
        announce: a statement that every rank has run long before it saves.
        check: the functions that call other collectives with the fix.
        ranks: an expression in them, the list of the ranks that call these collectives; None for all.
        patience: seconds that a rank may come later than the first one, if it has not announced the fix before.
        before: a definition of the module, which the functions come before.

    Raises:
        NotConcerned: it is by upstream, and so on all ranks.
        AlreadyThere: the agreement is there.
        NoMatch: a part of it is.
    """
    announcement = f'_announce_fix("{fix}")'
    call = f'_check_all_ranks_have_fix("{fix}", {ranks}, {patience})'
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
