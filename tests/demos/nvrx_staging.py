"""step while NVRx saves CPU state"""

from pathlib import Path

from trainers import nvrx_saving, show
from trainers.ranks import results


def run(folder: Path) -> str:
    torn = results(nvrx_saving.save_and_step, 1, folder / "checkpoint", {})[0]
    return f"{torn} of {nvrx_saving.TENSORS} tensors are those of a later step, and no error" if torn else ""


if __name__ == "__main__":
    show(run, f"all {nvrx_saving.TENSORS} tensors are those of the save")
