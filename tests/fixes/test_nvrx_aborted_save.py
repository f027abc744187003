"""nvrx_aborted_save: a save after an aborted one writes its own tensors."""

import time
from pathlib import Path
from typing import Any

from trainers.lazy import nvrx_saving
from trainers.ranks import results
from upstream import proof

test_tensors_are_saved_under_the_names_of_others, test_both_tensors_load_as_they_were_saved = proof(
    __file__, "are those of the other name, and no error"
)


# What the ranks run

NUMEL, PATIENCE = 100, 60  # seconds


def bug(folder: Path) -> str:
    wrong = results(abort_and_save, 1, folder)[0]
    return f"{wrong} of 2 tensors are those of the other name, and no error" if wrong else ""


def abort_and_save(rank: int, folder: Path) -> int:
    """Save two tensors, abort, and save them in another order. Returns how many load wrong."""
    import torch

    first, second = torch.full((NUMEL,), 1.0), torch.full((NUMEL,), 2.0)
    with nvrx_saving.calls() as calls:
        aborted = nvrx_saving.request({"x": first, "y": second}, folder / "aborted")
        calls.schedule_async_request(aborted)
        wait_for_report(aborted)
        calls.close(abort=True)
        restarted = type(calls)()
        restarted.schedule_async_request(nvrx_saving.request({"y": second, "x": first}, folder / "saved"))
        restarted.maybe_finalize_async_calls(blocking=True)
        restarted.close()
    saved = {"x": first, "y": second}
    loaded = nvrx_saving.load(folder / "saved", saved)
    return sum(not torch.equal(loaded[name], saved[name]) for name in saved)


def wait_for_report(request: Any) -> None:
    """Wait until the worker has put its write results into the queue in its arguments."""
    deadline = time.time() + PATIENCE
    while time.time() < deadline and request.async_fn_args[2].empty():
        time.sleep(0.05)
