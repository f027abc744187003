"""Write the DP=768 checkpoint of the report, in the layouts of BF16_Optimizer and of ZeRO-3, with small matrices.

    write_dp768_checkpoint.py OUT              OUT/dp768/global_step10, OUT/dp768_stage3/global_step10
    write_dp768_checkpoint.py OUT RANKS...     OUT/RANKS/global_step10: of so many ranks, without padding

`truth.pt` lies beside each.

Stage 1: 65 vectors of 4096 elements are 266,240, padded to 267,264: partitions of 348, and 1024 of padding, recorded
on the last rank alone. Stage 3: 4096 elements are 6 a rank, on 683 ranks.
"""

import math
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.tensor_fragment import fragment_address

DP = 768
KEYS = ("fp32", "exp_avg", "exp_avg_sq")
TAG = "global_step10"
Shapes = dict[str, tuple[int, ...]]
Truth = dict[str, dict[str, torch.Tensor]]

STAGE1_GROUPS: list[Shapes] = [{f"norms.{i}.weight": (4096,) for i in range(65)}, {"weight": (2, 2)}]
STAGE3_GROUP: Shapes = {"norm.weight": (4096,)}  # 6 a rank, on 683 ranks; the last one holds 4


def values(shapes: Shapes) -> Truth:
    """No element is zero, so that padding cannot be taken for data."""
    return {name: {key: torch.rand(shape) + 1 for key in KEYS} for name, shape in shapes.items()}


def save(data: Any, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(data, folder / name)


def model_states(groups: list[Shapes], ranks: int) -> dict[str, Any]:
    return {
        "module": {},
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in groups],
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "lr_scheduler": None,
        "iteration": 10,
        "global_steps": 10,
        "skipped_steps": 0,
        "ds_config": {},
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }


def adam(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> dict[str, Any]:
    """As FusedAdam keeps it: the step is a number."""
    return {"step": 10, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


class FlatGroup:
    """One parameter group of stage 1: flattened, padded to two elements a rank or more, cut in equal partitions."""

    def __init__(self, truth: Truth, ranks: int) -> None:
        self.sizes = {name: states["fp32"].numel() for name, states in truth.items()}
        numel = sum(self.sizes.values())
        padded = math.ceil(numel / (2 * ranks)) * 2 * ranks
        self.partition, self.padding = padded // ranks, padded - numel
        padding = torch.zeros(self.padding)
        self.flat = [torch.cat([*(states[key].flatten() for states in truth.values()), padding]) for key in KEYS]

    def parts(self, rank: int) -> list[torch.Tensor]:
        return [flat.narrow(0, rank * self.partition, self.partition).clone() for flat in self.flat]

    def fragments(self, rank: int) -> "OrderedDict[str, fragment_address]":
        """Where each parameter's piece lies in a rank's partition."""
        found, begin, first = OrderedDict(), 0, rank * self.partition
        for name, size in self.sizes.items():
            low, high = max(begin, first), min(begin + size, first + self.partition)
            if low < high:
                found[name] = fragment_address(numel=high - low, start=low - first)
            begin += size
        return found


def write_stage1(out: Path, shapes_of_groups: list[Shapes], ranks: int) -> list[FlatGroup]:
    truths = [values(shapes) for shapes in shapes_of_groups]
    groups = [FlatGroup(truth, ranks) for truth in truths]
    for rank in range(ranks):
        parts = [group.parts(rank) for group in groups]
        optimizer = {
            "base_optimizer_state": {
                "state": {i: adam(*moments) for i, (_, *moments) in enumerate(parts)},
                "param_groups": [{"lr": 1e-4, "params": [i]} for i in range(len(groups))],
            },
            "single_partition_of_fp32_groups": [master for master, *_ in parts],
            "zero_stage": 1,
            "group_paddings": [group.padding if rank == ranks - 1 else 0 for group in groups],
            "partition_count": [ranks] * len(groups),
            "param_slice_mappings": [group.fragments(rank) for group in groups],
            "ds_version": "0.16.2",
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        save({"optimizer_state_dict": optimizer, "ds_version": "0.16.2"}, out / TAG, name)
    of_all = {name: states for truth in truths for name, states in truth.items()}
    weights = {name: states["fp32"].bfloat16() for name, states in of_all.items()}
    save({**model_states(shapes_of_groups, ranks), "module": weights}, out / TAG, "mp_rank_00_model_states.pt")
    save(of_all, out, "truth.pt")
    return groups


def write_stage3(out: Path) -> None:
    truth = values(STAGE3_GROUP)
    placeholders = {name: torch.empty(0, dtype=torch.bfloat16) for name in truth}
    parts: dict[str, list[torch.Tensor]] = {key: [] for key in KEYS}
    for key in KEYS:
        rows = []
        for states in truth.values():
            numel = states[key].numel()
            rows.append(torch.nn.functional.pad(states[key].flatten(), (0, -numel % DP)).view(DP, -1))
        parts[key] = list(torch.cat(rows, dim=1).contiguous())
    for rank in range(DP):
        master, *moments = (parts[key][rank].clone() for key in KEYS)
        optimizer = {
            "zero_stage": 3,
            "optimizer_state_dict": {"state": {0: adam(*moments)}, "param_groups": [{"lr": 1e-4, "params": [0]}]},
            "fp32_flat_groups": [master],
        }
        save({"optimizer_state_dict": optimizer}, out / TAG, f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        save({**model_states([STAGE3_GROUP], DP), "module": placeholders}, out / TAG, name)
    save(truth, out, "truth.pt")


def main() -> None:
    torch.manual_seed(0)
    out, *counts = sys.argv[1:]
    for ranks in map(int, counts):
        write_stage1(Path(out, str(ranks)), [{"weight": (20 * ranks - 100,), "bias": (37,), "scale": (63,)}], ranks)
    if not counts:
        groups = write_stage1(Path(out, "dp768"), STAGE1_GROUPS, DP)
        assert [(group.partition, group.padding) for group in groups] == [(348, 1024), (2, 1532)]
        write_stage3(Path(out, "dp768_stage3"))


if __name__ == "__main__":
    main()
