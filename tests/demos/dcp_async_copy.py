"""step while dcp.async_save writes"""

from pathlib import Path

from trainers import dcp_saving, show
from trainers.ranks import results


def run(folder: Path) -> str:
    later = results(dcp_saving.save_and_step, 1, folder)[0]
    count = f"{len(later)} of {len(dcp_saving.KINDS)} tensors"
    return f"{count} are those of a later step, and no error: {', '.join(later)}" if later else ""


if __name__ == "__main__":
    show(run, f"all {len(dcp_saving.KINDS)} tensors are those of the save")
