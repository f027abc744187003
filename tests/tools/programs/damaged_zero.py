"""Copy a ZeRO checkpoint, each copy with one damage that no file checksum detects, to OUT/<name of the damage>.

damaged_zero.py CHECKPOINT OUT
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch


def take_rank_of_more(state: dict[str, Any]) -> None:
    state["partition_count"] = [2 * count for count in state["partition_count"]]


def take_rank_of_earlier_step(state: dict[str, Any]) -> None:
    for entry in state["base_optimizer_state"]["state"].values():
        entry["step"] -= 1


def overlap_fragments(state: dict[str, Any]) -> None:
    for mapping in state["param_slice_mappings"]:
        for address in mapping.values():
            address.numel += 1


def lose_fragment(state: dict[str, Any]) -> None:
    state["param_slice_mappings"][0].clear()


def lose_partition(state: dict[str, Any]) -> None:
    state["single_partition_of_fp32_groups"][0].data.zero_()


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    for damage in (take_rank_of_more, take_rank_of_earlier_step, overlap_fragments, lose_fragment, lose_partition):
        copy = Path(shutil.copytree(source, out / damage.__name__))
        (file,) = copy.glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt")
        content = torch.load(file, weights_only=False)  # the tests' own checkpoint
        damage(content["optimizer_state_dict"])
        torch.save(content, file)


if __name__ == "__main__":
    main()
