"""Train a small GPT with the real megatron-core on CPU ranks, save it, and resume it, in another release or layout.

The model has two layers with SwiGLU, a padded vocabulary and an embedding that is also the output layer; with
`--experts` each layer has two experts, or `--of-each` many. `save` writes OUT/checkpoint, and the state of each
model-parallel rank then and two steps later; `resume` loads a checkpoint and prints JSON: for the "loaded" state, and
the state two steps "after", "bit-equal" or the differences. If other model-parallel ranks saved it, `resume` saves the
loaded state in OUT/again, and with --save-as in any case, in that format.

    gpt_resume.py save|resume OUT [--checkpoint FOLDER] [--format fully_sharded_model_space] [--backend torch_dist]
        [--save-as dp_reshardable] [--tp 1] [--pp 1] [--ep 1] [--dp 2] [--experts] [--of-each 2] [--fp32]
        [--inner fused|torch]
        [--optimizer distributed|whole|none]

A `whole` optimizer is not distributed: each rank has all of its state. With `none` only the model's weights are saved.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gpt_training
from program_arguments import parsed
from trainers import megatron_training as mt

STEPS_BEFORE, STEPS_AFTER = 3, 2


def main() -> None:
    options = parsed(
        {"what": str, "out": Path}, checkpoint=Path, format="fully_sharded_model_space", backend="torch_dist",
        save_as="", tp=1, pp=1, ep=1, dp=2, experts=False, of_each=2, fp32=False, inner="fused",
        optimizer="distributed",
    )  # fmt: skip
    ranks = options.tp * options.pp * options.dp
    parallel = {"tensor_parallel": options.tp, "pipeline_parallel": options.pp}
    mt.spawn(save if options.what == "save" else resume, ranks, options, **parallel)


# The options of `gpt_training` that are the same in every run.
PLAIN = {
    "cp": 1, "instances": 1, "algorithm": "adam", "min_lr": None, "offload": None, "bucket": 0, "clipping": True,
    "gated": True,
    **dict.fromkeys(
        (
            "overlap", "precision_aware", "decoupled_rate", "mup", "fp32_norms", "untied", "biases", "frozen",
            "zero_initialized", "overflow", "learned_positions", "fsdp2",
        ),
        False,
    ),
}  # fmt: skip


def build(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model under Megatron's DDP, and its optimizer."""
    from megatron.core import parallel_state

    chosen = {
        **PLAIN,
        **{name: getattr(options, name) for name in ("tp", "pp", "inner", "optimizer")},
        "ep": options.ep if options.experts else 0,
        "experts": options.of_each,
        "dtype": "fp32" if options.fp32 else "bf16",
    }
    parallel_state.destroy_model_parallel()
    gpt_training.initialize(chosen)
    return gpt_training.build(chosen, seed=0)


def step(model: Any, optimizer: Any, number: int) -> None:
    """One step; all data-parallel ranks have the same tokens, so that other numbers of ranks take the same step."""
    gpt_training.step(model, optimizer, number, shared=2)


def everything(model: Any, optimizer: Any, kind: str) -> dict[str, torch.Tensor]:
    """Each weight, main parameter and moment of this model-parallel rank, in fp32, and the groups' settings."""
    found = mt.weights(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for own in getattr(optimizer, "chained_optimizers", [optimizer]) if kind != "none" else []:
        if kind == "whole":
            found.update(whole_state(own, names))
            continue
        for parameter, (group, order) in sorted(own.model_param_group_index_map.items(), key=lambda kv: names[kv[0]]):
            main = own.optimizer.param_groups[group]["params"][order]
            state, owned = own.optimizer.state[main], own._get_model_param_range_map(parameter)["param"]
            for key in ("param", "exp_avg", "exp_avg_sq"):
                full = found.setdefault(f"{names[parameter]}.{key}", torch.zeros(parameter.numel()))
                shard = state.get("master_param", main) if key == "param" else state[key]
                full[owned.start : owned.end] = shard.detach().float()
        for number, group in enumerate(own.optimizer.param_groups):
            for key in ("lr", "weight_decay", "step", "wd_mult", "lr_mult", "eps"):
                if group.get(key) is not None and group["params"]:
                    mine = (float(group[kind]) for kind in (key,))
                    multiplier = group.get("wd_mult", number)
                    found[f"{key} of {multiplier} {group.get('is_expert_parallel')}"] = torch.tensor(list(mine))
    return found


def whole_state(own: Any, names: dict[Any, str]) -> dict[str, torch.Tensor]:
    """The state of an optimizer that is not distributed, from its groups of 16-bit weights and main parameters."""
    found = {}
    masters = getattr(own, "fp32_from_float16_groups", []), getattr(own, "float16_groups", [])
    pairs = [pair for groups in zip(*masters, strict=True) for pair in zip(*groups, strict=True)]
    alone = [parameter for group in own.optimizer.param_groups for parameter in group["params"] if parameter in names]
    for main, parameter in [*pairs, *zip(alone, alone, strict=True)]:
        found[f"{names[parameter]}.param"] = main.detach().float()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{names[parameter]}.{key}"] = own.optimizer.state[main][key].float()
    for group in own.optimizer.param_groups:
        found[f"settings of {group.get('wd_mult')}"] = torch.tensor([group["lr"], group["weight_decay"], group["step"]])
    return {f"whole {name}": tensor for name, tensor in found.items()}


def summed(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The states summed over the ranks with the same parameters: each holds its part, and zeros elsewhere."""
    together: dict[str, torch.Tensor] = {}
    for where, other in mt.gathered((place(), found)):
        for name, tensor in other.items():
            # Experts belong to one expert-parallel rank; all other states are sharded over these ranks as well.
            if where != place() and (".experts." in name or where.rpartition("-")[0] != place().rpartition("-")[0]):
                continue
            is_state = name.endswith((".param", ".exp_avg", ".exp_avg_sq"))
            together[name] = together[name] + tensor if is_state and name in together else tensor
    return together


def place() -> str:
    """The model-parallel position of this rank."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    return "-".join(map(str, (*ranks, parallel_state.get_expert_model_parallel_rank())))


def sharded(options: argparse.Namespace, model: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    of_model = model.module.sharded_state_dict()
    if options.optimizer == "none":
        return {"model": of_model}
    if options.optimizer == "whole":
        return {"model": of_model, "optimizer": optimizer.sharded_state_dict(of_model, is_loading=is_loading)}
    name = options.format
    chosen: dict[str, Any] = {"sharding_type": name}
    if "kwargs" in str(optimizer.sharded_state_dict.__code__.co_varnames) or name.endswith("reshardable"):
        chosen = {"metadata": {"distrib_optim_sharding_type": name, "chained_optim_avoid_prefix": True}}
    if not name.endswith("reshardable"):
        import inspect

        if "metadata" not in inspect.signature(mt.inner(optimizer).sharded_state_dict).parameters:
            chosen = {"sharding_type": name}
    return {"model": of_model, "optimizer": optimizer.sharded_state_dict(of_model, is_loading=is_loading, **chosen)}


def save(rank: int, options: argparse.Namespace) -> None:
    model, optimizer = build(options)
    for number in range(STEPS_BEFORE):
        step(model, optimizer, number)
    state = sharded(options, model, optimizer, is_loading=False)
    mt.write({**state, "args": argparse.Namespace(iteration=3)}, options.out / "checkpoint", options.backend)
    saved = summed(everything(model, optimizer, options.optimizer))
    for number in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        step(model, optimizer, number)
    after = summed(everything(model, optimizer, options.optimizer))
    file = options.out / f"{layout(options)}-{place()}.pt"
    if place() not in mt.gathered(place())[:rank]:
        torch.save((saved, after), file)
    dist.barrier()


def layout(options: argparse.Namespace) -> str:
    return f"tp{options.tp}-pp{options.pp}-ep{options.ep}"


def resume(rank: int, options: argparse.Namespace) -> None:
    from megatron.core import dist_checkpointing

    model, optimizer = build(options)
    state = sharded(options, model, optimizer, is_loading=True)
    loaded = dist_checkpointing.load(state, str(options.checkpoint))
    model.module.load_state_dict(loaded["model"])
    if "optimizer" in loaded:
        optimizer.load_state_dict(loaded["optimizer"])
    file = options.out / f"{layout(options)}-{place()}.pt"
    if options.save_as or not file.exists():
        options.format = options.save_as or options.format
        state = sharded(options, model, optimizer, is_loading=False)
        mt.write(state, options.out / "again", options.backend)
        if rank == 0:
            print(json.dumps({"result": "saved again"}))
        return
    expected = torch.load(file)
    found = [summed(everything(model, optimizer, options.optimizer))]
    for number in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        step(model, optimizer, number)
    found.append(summed(everything(model, optimizer, options.optimizer)))
    differ = [different(before, after) for before, after in zip(expected, found, strict=True)]
    everybody = mt.gathered(differ)
    if rank == 0:
        names = [sorted({name for own in everybody for name in own[number]}) for number in range(2)]
        results = [f"differs: {own}" if own else "bit-equal" for own in names]
        print(json.dumps(dict(zip(("loaded", "after"), results, strict=True))))


def different(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    return [n for n in left.keys() | right.keys() if n not in left or n not in right or not left[n].equal(right[n])]


if __name__ == "__main__":
    main()
