"""The real layer-wise distributed optimizer, as Muon uses it: each data-parallel rank holds complete parameters.

Torch's SGD with momentum steps the matrices in place of Muon, which has a state of the same name but is on no package
index; Adam steps the rest.
"""

from typing import Any

import torch
import torch.distributed as dist

from trainers import stub_fused_adam
from trainers.gpt_training import gathered


def make(config: Any, models: list[Any]) -> Any:
    """In place of `get_megatron_optimizer`."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    dist.all_gather = gathered
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
