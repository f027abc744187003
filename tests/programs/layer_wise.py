"""Train a small GPT with the real layer-wise distributed optimizer on CPU ranks, save it in torch_dist, and resume it.

Each data-parallel rank holds complete parameters. Torch's SGD with momentum steps the matrices in place of Muon, which
has a state of the same name but is on no package index; Adam steps the rest. `save` writes OUT/checkpoint and the live
state; `resume` prints JSON: the parts of the loaded state that differ from it.

    layer_wise.py save|resume OUT [--tp 1] [--dp 2] [--ep 1] [--experts] [--of-each 2]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gpt_resume
from program_arguments import parsed
from trainers import judge, stub_fused_adam
from trainers import megatron_training as mt
from trainers.gpt_training import gathered
from trainers.megatron_state import Run, live

STEPS = 3


def main() -> None:
    options = parsed({"what": str, "out": Path}, tp=1, dp=2, ep=1, experts=False, of_each=2)
    vars(options).update(pp=1, fp32=False, inner="fused", optimizer="whole")
    dist.all_gather = gathered
    work = save if options.what == "save" else resume
    mt.spawn(work, options.tp * options.dp, options, tensor_parallel=options.tp)


def build(options: argparse.Namespace) -> tuple[Any, Any]:
    import megatron.core.optimizer

    as_it_is = megatron.core.optimizer.get_megatron_optimizer
    megatron.core.optimizer.get_megatron_optimizer = layer_wise
    try:
        return gpt_resume.build(options)
    finally:
        megatron.core.optimizer.get_megatron_optimizer = as_it_is


def layer_wise(config: Any, models: list[Any]) -> Any:
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    named = list(models[0].named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "embedding" not in name]
    others = [p for name, p in named if not any(p is matrix for matrix in matrices)]
    by_decay = [p for p in others if p.dim() > 1], [p for p in others if p.dim() == 1]
    optimizers = [
        torch.optim.SGD([group(own, 1.0) for own in by_expert(matrices)], lr=1e-2, momentum=0.9),
        stub_fused_adam.FusedAdam(
            [group(own, decay) for own, decay in zip(by_decay, (1.0, 0.0), strict=True) if own], lr=1e-2
        ),
    ]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return LayerWiseDistributedOptimizer(optimizers, config, groups, init_state_fn_list=[init_sgd, init_adam])


def by_expert(parameters: list[Any]) -> list[list[Any]]:
    apart = [[p for p in parameters if getattr(p, "allreduce", True) == shared] for shared in (True, False)]
    return [own for own in apart if own]


def group(parameters: list[Any], wd_mult: float) -> dict[str, Any]:
    """A param group with the keys by which Megatron distinguishes groups."""
    expert = not getattr(parameters[0], "allreduce", True)
    own = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": expert, "is_decoupled_lr": False}
    return {"params": parameters, **own, "max_lr": 1e-2, "min_lr": 0.0, "default_config": True}


def init_sgd(optimizer: Any, config: Any = None) -> None:
    for own in optimizer.param_groups:
        for parameter in own["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def init_adam(optimizer: Any, config: Any = None) -> None:
    for own in optimizer.param_groups:
        for parameter in own["params"]:
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[parameter].setdefault(name, torch.zeros_like(parameter))


def save(rank: int, options: argparse.Namespace) -> None:
    model, optimizer = build(options)
    for number in range(STEPS):
        gpt_resume.step(model, optimizer, number)
    run = {"args": argparse.Namespace(iteration=STEPS, bf16=True), "iteration": STEPS, "checkpoint_version": 3.0}
    state = gpt_resume.sharded(options, model, optimizer, is_loading=False)
    mt.write({**state, **run}, options.out / "checkpoint", "torch_dist")
    saved = live(Run(model, optimizer, None))
    if rank == 0:
        torch.save(saved, options.out / "saved.pt")


def resume(rank: int, options: argparse.Namespace) -> None:
    from megatron.core import dist_checkpointing

    model, optimizer = build(options)
    state = gpt_resume.sharded(options, model, optimizer, is_loading=True)
    loaded = dist_checkpointing.load(state, str(options.out / "checkpoint"))
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    saved = torch.load(options.out / "saved.pt", weights_only=False)
    differ = judge.on_any_rank(judge.different(live(Run(model, optimizer, None)), saved))
    if rank == 0:
        print(json.dumps({"states": len(saved), "differ": differ}))


if __name__ == "__main__":
    main()
