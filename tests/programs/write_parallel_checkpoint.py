"""Write checkpoints of tensor- and pipeline-parallel models in DeepSpeed's format, as Megatron-DeepSpeed and AutoTP do.

    write_parallel_checkpoint.py OUT CASE...        OUT/CASE/global_step7

A parameter is given by its slices, one per tensor-parallel rank. All numbers differ, except in equal slices. A number
as a case means that many data-parallel ranks, without padding. For it and the report's cases, `truth.pt` lies beside
the checkpoint.
"""

import argparse
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.tensor_fragment import fragment_address

TAG = "global_step7"
KEYS = ("fp32", "exp_avg", "exp_avg_sq")
Slices = list[torch.Tensor]
Stage = Mapping[str, list[tuple[int, ...]]]  # by parameter, the shape of each tensor-parallel slice


@dataclass
class Case:
    stages: list[Stage]  # by pipeline stage
    info: dict[str, Any]
    dp: int = 3
    zero_stage: int = 1
    equal: tuple[str, ...] = ()  # patterns of parameters whose slices are equal on all ranks
    step: Callable[[], Any] = lambda: torch.tensor(7.0)
    module: dict[str, torch.Tensor] | None = field(default_factory=dict)
    has_truth: bool = False


def even(tp: int, **shapes: tuple[int, ...]) -> dict[str, list[tuple[int, ...]]]:
    """The same shape on every tensor-parallel rank; __ in a name is a dot."""
    return {name.replace("__", "."): [shape] * tp for name, shape in shapes.items()}


LAYER = {
    "{}__norm__weight": (6,),
    "{}__attention__qkv__weight": (9, 6),
    "{}__attention__qkv__bias": (9,),
    "{}__attention__dense__weight": (6, 4),
    "{}__attention__dense__bias": (6,),
    "{}__mlp__swiglu__weight": (8, 6),
}
EMBEDDING = {"word_embeddings__weight": (6, 6)}


def layer(number: int) -> dict[str, tuple[int, ...]]:
    return {name.format(f"layers__{number}"): shape for name, shape in LAYER.items()}


PATTERNS = {
    "tp_replicated_parameter_patterns": [r".*norm\.weight"],
    "parameter_to_average_patterns": [r".*dense\.bias"],
    "parameter_with_row_parallelism_patterns": [r".*dense\.weight"],
    "vocabulary_parameter_patterns": [r"word_embeddings\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*swiglu\.weight"],
    "pipeline_replicated_parameter_patterns": [r"word_embeddings\.weight"],
    "original_vocab_size": 11,
}


def sub_params(name: str, shape: Sequence[Any], dim: int) -> dict[str, Any]:
    return {"patterns": [name], "shape": shape, "partition_dim": dim}


SUB_PARAMS = {
    "fused": sub_params(r"fused\.weight", ((8, 4, 4), 6), 0),
    "columns": sub_params(r"columns\.weight", (6, (8, 4)), 1),
}
FUSED = even(2, fused__weight=(8, 6), columns__weight=(6, 6), norm__weight=(6,))


def megatron() -> Case:
    """Two pipeline stages with tied embeddings, two tensor-parallel ranks, every kind of parameter."""
    first = even(2, empty__weight=(0, 6), **EMBEDDING, **layer(0))
    last = even(2, **EMBEDDING, **layer(1), final_norm__weight=(6,), head__bias=(1,))
    return Case(
        [first, last], {"universal_checkpoint_version": 0.2, **PATTERNS}, equal=(r".*norm\.weight",), module=None
    )


def megatron_fp16() -> Case:
    """One pipeline stage, steps as numbers, and weights without optimizer state."""
    case = megatron()
    info = {k: v for k, v in case.info.items() if k != "pipeline_replicated_parameter_patterns"}
    weights = {
        "rotary.inv_freq": torch.rand(4),
        "frozen.weight": torch.randn(5, 3).bfloat16(),
        "frozen.half": torch.randn(300, 70).half(),
        "position_ids": torch.arange(9),
        "mask": torch.tensor([True, False]),
        "scale": torch.tensor(0.5, dtype=torch.float64),
        "word_embeddings.weight": torch.zeros(6, 6).half(),
    }
    return Case(case.stages[:1], info, dp=5, equal=case.equal, step=lambda: 7, module=weights)


def fused() -> Case:
    """Sub-parameters in the metadata format up to version 0.3."""
    info = {"universal_checkpoint_version": 0.2, "parameter_with_sub_params": list(SUB_PARAMS.values())}
    return Case([FUSED], {**info, "tp_replicated_parameter_patterns": [r"norm\.weight"]}, equal=(r"norm\.weight",))


def fused_counted() -> Case:
    """The number of sub-parameters in place of their widths, as AutoTP writes it from 0.18.9 to 0.19.5."""
    described = [sub_params(r"^counted\.weight$", (4, -1), 0)]
    info = {"universal_checkpoint_version": 0.3, "parameter_with_sub_params": described}
    return Case([even(2, counted__weight=(8, 6))], info)


def fused_bias() -> Case:
    """A bias that is split like its weight, which AutoTP did not record before 0.19.6."""
    described = [sub_params(r"^fused\.weight$", ((8, 4, 4), -1), 0)]
    info = {"universal_checkpoint_version": 0.3, "parameter_with_sub_params": described}
    return Case([even(2, fused__weight=(8, 6), fused__bias=(8,))], info)


def fused_uneven() -> Case:
    """Sub-parameters in the format of version 0.4: the width of every share."""
    widths = {r"fused\.weight": [[5, 3, 0], [2, 2, 1]], r"columns\.weight": [[2, 2, 1], [0, 0, 2]]}
    described = [sub_params(r"fused\.weight", [(8, 5), 6], 0), sub_params(r"columns\.weight", [6, (5, 2)], 1)]
    shapes: Stage = {
        "fused.weight": [(7, 6), (5, 6), (1, 6)],
        "columns.weight": [(6, 2), (6, 2), (6, 3)],
        "plain.weight": [(3, 6), (2, 6), (2, 6)],
        "rows.weight": [(6, 3), (6, 2), (6, 2)],
        "none.weight": [(4, 2), (0, 2), (0, 2)],
    }
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_sub_params": described,
        "sub_param_shard_widths": widths,
        "parameter_with_row_parallelism_patterns": [r"rows\.weight"],
    }
    return Case([shapes], info)


def affine() -> Case:
    """AutoTP's maps, with the patterns for earlier releases as well."""
    from deepspeed.checkpoint import affine as maps

    split = {
        "rows.weight": maps.contiguous_split_map((6, 9), [5, 4], 1),
        "plain.weight": maps.contiguous_split_map((7, 6), [4, 3], 0),
        "fused.weight": maps.sub_param_map((9, 4), (5, 4), [[3, 2], [2, 2]], 0),
        "shared.weight": maps.segmented_map((4, 8), [(6, False), (2, True)], 1, 2, [[4, 2]]),
        "gathered.weight": maps.block_gather_map((16, 3), {0: [0, 1, 5, 4], 1: [2, 3, 6, 7]}, 2, 0),
        "norm.weight": maps.replicated_map((6,), 2),
    }
    shapes = {name: [found.shard_shapes[rank] for rank in range(2)] for name, found in split.items()}
    params = {f"^{re.escape(name)}$": found.to_dict() for name, found in split.items()}
    info = {
        "universal_checkpoint_version": 0.4,
        "affine_map": {"version": 1, "params": params},
        "parameter_with_row_parallelism_patterns": [r"^rows\.weight$"],
        "tp_replicated_parameter_patterns": [r"^norm\.weight$"],
        "vocabulary_parameter_patterns": [r"^plain\.weight$"],
        "original_vocab_size": 7,
    }
    return Case([shapes], info, equal=("norm.weight",))


def large(zero_stage: int, dp: int) -> Case:
    """194 parameters, 100 million elements: 1.2 GB of state, or 1.6 MB per rank at DP=768."""
    hidden, vocab = 512, 4000
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (vocab, hidden), "final_norm.weight": (hidden,)}
    for number in range(32):
        for name, shape in {
            "qkv.weight": (3 * hidden, hidden),
            "out.weight": (hidden, hidden),
            "up.weight": (4 * hidden, hidden),
            "down.weight": (hidden, 4 * hidden),
            "norm1.weight": (hidden,),
            "norm2.weight": (hidden,),
        }.items():
            shapes[f"layers.{number}.{name}"] = shape
    stage = {name: [shape] for name, shape in shapes.items()}
    return Case([stage], {"universal_checkpoint_version": 0.2}, dp, zero_stage)


def data_parallel(dp: int, shapes: dict[str, tuple[int, ...]], zero_stage: int = 1) -> Case:
    """Data-parallel ranks only; the step is a number, as in FusedAdam."""
    info = {"universal_checkpoint_version": 0.2}
    return Case([even(1, **shapes)], info, dp, zero_stage, step=lambda: 7, has_truth=True)


def dp768() -> Case:
    """As reported: 65 vectors of 4096 elements are 266,240, padded to 267,264: partitions of 348, 1024 of padding."""
    return data_parallel(768, {**{f"norms__{i}__weight": (4096,) for i in range(65)}, "weight": (2, 2)})


def dp768_stage3() -> Case:
    """4096 elements are 6 per rank, on 683 ranks; the last of these holds 4."""
    return data_parallel(768, {"norm__weight": (4096,)}, zero_stage=3)


def of_ranks(dp: int) -> Case:
    return data_parallel(dp, {"weight": (20 * dp - 100,), "bias": (37,), "scale": (63,)})


def zero3(case: Case) -> Case:
    case.zero_stage = 3
    return case


CASES: dict[str, Callable[[], Case]] = {
    "megatron": megatron,
    "megatron_fp16": megatron_fp16,
    "fused": fused,
    "fused_counted": fused_counted,
    "fused_bias": fused_bias,
    "fused_uneven": fused_uneven,
    "affine": affine,
    "zero3_uneven": lambda: zero3(fused_uneven()),
    "zero3_affine": lambda: zero3(affine()),
    "large_stage1": lambda: large(1, 768),
    "large_stage3": lambda: large(3, 64),
    "dp768": dp768,
    "dp768_stage3": dp768_stage3,
}


def values(case: Case) -> dict[str, dict[str, Slices]]:
    """Random slices by parameter and key."""
    found: dict[str, dict[str, Slices]] = {}
    for stage in case.stages:
        for name, shapes in stage.items():
            equal = any(re.match(pattern, name) for pattern in case.equal)
            for key in KEYS:
                slices = [torch.randn(shape) for shape in shapes]
                if key == "exp_avg_sq":  # a mean of squares
                    slices = [slice.abs() for slice in slices]
                found.setdefault(name, {}).setdefault(key, slices[:1] * len(slices) if equal else slices)
    make_shared_equal(found)
    return found


def make_shared_equal(found: dict[str, dict[str, Slices]]) -> None:
    """Make the last two columns of `shared.weight` equal on both ranks."""
    for slices in found.get("shared.weight", {}).values():
        slices[1][:, -2:] = slices[0][:, -2:]


class Group:
    """A flattened parameter group of one tensor-parallel rank, padded to a multiple of 2 * dp."""

    def __init__(self, tensors: Mapping[str, Mapping[str, torch.Tensor]], dp: int) -> None:
        self.sizes = {name: states["fp32"].numel() for name, states in tensors.items()}
        numel = sum(self.sizes.values())
        self.partition = math.ceil(numel / (2 * dp)) * 2
        self.padding = self.partition * dp - numel
        self.flat = {
            key: torch.cat([*(states[key].flatten() for states in tensors.values()), torch.zeros(self.padding)])
            for key in KEYS
        }

    def part(self, key: str, rank: int) -> torch.Tensor:
        return self.flat[key].narrow(0, rank * self.partition, self.partition).clone()

    def fragments(self, rank: int) -> "OrderedDict[str, fragment_address]":
        found, begin, first = OrderedDict(), 0, rank * self.partition
        for name, size in self.sizes.items():
            low, high = max(begin, first), min(begin + size, first + self.partition)
            if low < high or (size == 0 and first <= begin < first + self.partition):
                found[name] = fragment_address(numel=high - low, start=low - first)
            begin += size
        return found


def write(out: Path, case: Case) -> None:
    out.mkdir(parents=True)
    found = values(case)
    for pp, stage in enumerate(case.stages):
        tp_degree = len(next(iter(stage.values())))
        for tp in range(tp_degree):
            local = {name: {key: found[name][key][tp] for key in KEYS} for name in stage}
            # With and without weight decay.
            matrices = {name: states for name, states in local.items() if states["fp32"].dim() > 1}
            vectors = {name: states for name, states in local.items() if states["fp32"].dim() <= 1}
            groups = [group for group in (matrices, vectors) if group]
            (write_stage_3 if case.zero_stage == 3 else write_stage_1)(out, case, pp * tp_degree + tp, groups)
            if len(case.stages) > 1:  # layer files of a pipeline; their content does not matter
                torch.save({}, out / f"layer_{pp + 1:02d}-model_{tp:02d}-model_states.pt")
    if case.has_truth:
        truth = {name: {key: slices[0] for key, slices in states.items()} for name, states in found.items()}
        torch.save(truth, out.parent / "truth.pt")


def write_stage_1(out: Path, case: Case, mp: int, groups: Sequence[Any]) -> None:
    flat = [Group(group, case.dp) for group in groups]
    for rank in range(case.dp):
        moments = [{key: group.part(key, rank) for key in KEYS[1:]} for group in flat]
        state = {
            "base_optimizer_state": {
                "state": {i: {"step": case.step(), **moment} for i, moment in enumerate(moments)},
                "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "params": [i]} for i in range(len(flat))],
            },
            "single_partition_of_fp32_groups": [group.part("fp32", rank).requires_grad_() for group in flat],
            "zero_stage": 1,
            "group_paddings": [group.padding if rank == case.dp - 1 else 0 for group in flat],
            "partition_count": [case.dp] * len(flat),
            "clip_grad": 1.0,
            "param_slice_mappings": [group.fragments(rank) for group in flat],
            "ds_version": "0.16.2",
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_version": "0.16.2"}, out / name)
    torch.save(model_states(case, groups), out / f"mp_rank_{mp:02d}_model_states.pt")


def write_stage_3(out: Path, case: Case, mp: int, groups: Sequence[Any]) -> None:
    parts = [{key: zero3_parts(group, key, case.dp) for key in KEYS} for group in groups]
    for rank in range(case.dp):
        flat = [{key: states[key][rank].clone() for key in KEYS} for states in parts]
        state = {
            "zero_stage": 3,
            "partition_count": case.dp,
            "optimizer_state_dict": {
                "state": {i: {"step": case.step(), **{k: part[k] for k in KEYS[1:]}} for i, part in enumerate(flat)},
                "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "params": [i]} for i in range(len(flat))],
            },
            "fp32_flat_groups": [part["fp32"] for part in flat],
        }
        name = f"zero_pp_rank_{rank}_mp_rank_{mp:02d}"
        torch.save({"optimizer_state_dict": state}, out / f"bf16_{name}_optim_states.pt")
        torch.save(model_states(case, groups), out / f"{name}_model_states.pt")


def zero3_parts(group: Mapping[str, Mapping[str, torch.Tensor]], key: str, dp: int) -> torch.Tensor:
    """By rank, an equal part of each parameter, concatenated."""
    padded = [torch.nn.functional.pad(s[key].flatten(), (0, -s[key].numel() % dp)) for s in group.values()]
    return torch.cat([flat.view(dp, -1) for flat in padded], dim=1)


def weight(case: Case, states: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The weight; at stage 3 the empty placeholder of a parameter that is not gathered."""
    return torch.empty(0, dtype=torch.bfloat16) if case.zero_stage == 3 else states["fp32"].bfloat16()


def model_states(case: Case, groups: Sequence[Mapping[str, Mapping[str, torch.Tensor]]]) -> dict[str, Any]:
    tp_degree = len(next(iter(case.stages[0].values())))
    module = case.module
    if module is not None:
        module = {**module, **{name: weight(case, states) for group in groups for name, states in group.items()}}
    return {
        "module": module,
        "param_shapes": [
            OrderedDict((name, states["fp32"].shape) for name, states in group.items()) for group in groups
        ],
        "dp_world_size": case.dp,
        "mp_world_size": tp_degree * len(case.stages),
        "checkpoint_parallel_dimensions": {"pp_degree": len(case.stages), "tp_degree": tp_degree},
        "lr_scheduler": None,
        "iteration": 7,
        "global_steps": 7,
        "skipped_steps": 0,
        "args": argparse.Namespace(hidden_size=6, params_dtype=torch.bfloat16),
        "ds_config": {},
        "universal_checkpoint_info": case.info,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="+")
    args = parser.parse_args()
    for name in args.cases:
        torch.manual_seed(0)
        write(args.out / name / TAG, of_ranks(int(name)) if name.isdecimal() else CASES[name]())


if __name__ == "__main__":
    main()
