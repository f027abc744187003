"""abort a written save, then save again"""

import time
from pathlib import Path
from typing import Any

from trainers import nvrx_saving, show
from trainers.ranks import results

NUMEL, PATIENCE = 100, 60  # seconds


def run(folder: Path) -> str:
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


if __name__ == "__main__":
    show(run, "both tensors load as they were saved")
