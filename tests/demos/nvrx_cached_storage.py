"""move the tensors between saves of constant structure"""

from pathlib import Path

from trainers import nvrx_saving, show
from trainers.ranks import results

TENSORS, NUMEL = 8, 100


def run(folder: Path) -> str:
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


if __name__ == "__main__":
    show(run, f"all {TENSORS} tensors of each save are its own")
