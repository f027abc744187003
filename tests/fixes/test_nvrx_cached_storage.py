"""nvrx_cached_storage: saves of a constant structure write the tensors of the step, wherever they are."""

from pathlib import Path

from trainers.lazy import nvrx_saving
from trainers.ranks import results
from upstream import proof

test_the_third_save_has_tensors_of_the_second, test_each_save_has_its_own_tensors = proof(
    __file__, "are those of the second, and no error"
)


# What the ranks run

TENSORS, NUMEL = 8, 100


def bug(folder: Path) -> str:
    repeated = results(save_thrice, 1, folder)[0]
    if not repeated:
        return ""
    return f"{repeated} of {TENSORS} tensors of the third save are those of the second, and no error"


def save_thrice(rank: int, folder: Path) -> int:
    """Save tensors that are newly allocated for each save, as with offloading. Returns how many are stale.

    The worker starts after the first save is prepared, and caches the second save's tensors.
    """
    import torch

    with nvrx_saving.calls() as calls:
        for step in range(1, 4):
            state = {f"w{number}": nvrx_saving.on_device(torch.full((NUMEL,), step)) for number in range(TENSORS)}
            asked = nvrx_saving.request(state, folder / str(step), use_cached_data_structure=True)
            calls.schedule_async_request(asked)
            calls.maybe_finalize_async_calls(blocking=True)
    loaded = nvrx_saving.load(folder / "3", {name: torch.empty(NUMEL, dtype=int) for name in state})
    return sum(not tensor.eq(3).all() for tensor in loaded.values())
