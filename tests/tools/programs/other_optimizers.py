"""Train with other optimizers than Adam on 2 ranks, convert with this project's converter, and load on 2 and 3 ranks.

    other_optimizers OUT CASE...      a case is an optimizer and a stage, such as Lion-1

Prints by case which states in the converted files differ from the live ones, and which differ after a load.
"""

import json
import sys
from pathlib import Path

import torch

from ckpt_patches.convert.convert import Options, convert
from trainers import deepspeed_training as dt
from trainers import optimizers
from trainers.deepspeed_state import kind_of

SAVED, LOADED = 2, (2, 3)  # ranks


def not_live(folder: Path) -> list[str]:
    """States that are live or in a file only, or differ. Steps and settings are compared after a load."""
    truth = torch.load(folder / dt.TRUTH, weights_only=False)
    live = {key: value for key, value in truth.items() if kind_of(key) in ("fp32", "state")}
    files = {
        f"{path.parent.name}.{path.stem}": path
        for path in (folder / dt.UNIVERSAL / "zero").glob("*/*.pt")
        if path.stem != "step"
    }
    wrong = sorted(live.keys() ^ files.keys())
    for key in live.keys() & files.keys():
        value = torch.load(files[key])
        value = value["param"] if isinstance(value, dict) else value
        wrong += [] if value.flatten().to(live[key].dtype).equal(live[key]) else [key]  # Muon's momentum is in bf16
    return wrong


def main() -> None:
    out, cases = Path(sys.argv[1]), sys.argv[2:]
    dt.results(optimizers.train_and_keep, SAVED, out, cases, SAVED)
    for case in cases:
        convert(out / case / dt.TAG, out / case / dt.UNIVERSAL, Options(workers=1))
    loads = [dt.results(optimizers.load, ranks, out, cases, ranks, dt.UNIVERSAL)[0] for ranks in LOADED]
    resumed = dt.results(optimizers.load, SAVED, out, cases, SAVED, dt.TAG)[0]
    found = {
        case: {"not live": not_live(out / case), "loads": [own[case] for own in loads], "resumed": resumed[case]}
        for case in cases
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
