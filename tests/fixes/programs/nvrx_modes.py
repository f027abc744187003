"""Save state on the CPU with each kind of NVRx worker, and step meanwhile.

nvrx_modes.py OUT

Prints as JSON, by kind, how many of 48 tensors have values of a later step, and by how many bytes the trainer's memory
grows while a save of BYTES in CPU tensors is pending.
"""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from trainers import nvrx_saving
from trainers.ranks import results

import torch  # isort: skip  after the GPU stub

BYTES, TENSORS = 64 << 20, 16


def main(out: Path) -> None:
    found: dict[str, Any] = {}
    for name, options in kinds().items():
        (found[name],) = results(nvrx_saving.save_and_step, 1, out / name, options)
    (found["bytes"],) = results(bytes_of_a_save, 1, out / "bytes")
    print(json.dumps(found))


def kinds() -> dict[str, dict[str, Any]]:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

    found: dict[str, dict[str, Any]] = {"persistent": {"persistent": True}, "temporary": {"persistent": False}}
    if "cpu_shm_mode" in inspect.signature(AsyncCallsQueue.__init__).parameters:  # since 0.6
        found["shared memory"] = {"persistent": True, "cpu_shm_mode": True}
    return found


def bytes_of_a_save(rank: int, checkpoint: Path) -> int:
    """The growth of the trainer's private and shared memory when its request is staged, in bytes."""
    state = {str(number): torch.ones(BYTES // TENSORS // 4) for number in range(TENSORS)}
    with nvrx_saving.calls() as calls:
        before = resident()
        calls.schedule_async_request(nvrx_saving.request(state, checkpoint))
        grown = resident() - before
        calls.maybe_finalize_async_calls(blocking=True)
    return grown


def resident() -> int:
    """Resident bytes of this process, including shared ones; see proc(5), statm."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main(Path(sys.argv[1]))
