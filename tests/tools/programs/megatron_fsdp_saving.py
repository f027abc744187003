"""Train with Megatron-FSDP, and save as Megatron-LM does, in `fsdp_dtensor`: megatron_fsdp_saving.py FOLDER"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainers import fake_gpu, megatron_lm
from trainers import megatron_training as mt

RANKS, STEPS = 2, 3


def hook_as_on_a_gpu() -> None:
    """Run the hooks of a backward pass in the mode of the GPU stub, which is not active there."""
    register = torch.Tensor.register_post_accumulate_grad_hook

    def registered(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
        def run(own: torch.Tensor) -> None:
            with fake_gpu.FG():
                hook(own)

        return register(parameter, run)

    torch.Tensor.register_post_accumulate_grad_hook = registered


def model_of(config: Any) -> Any:
    """Two linear layers without biases: a rank with an empty part of a parameter has no states for it."""
    from megatron.core.transformer.module import MegatronModule

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.a = torch.nn.Linear(16, 33, bias=False)
            self.b = torch.nn.Linear(33, 7, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.b(torch.relu(self.a(x)))
            return found

    return Model().to(torch.bfloat16).cuda()


def trained() -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    torch.manual_seed(1)
    config = mt.transformer_config(torch.bfloat16)
    sharding = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    model = FullyShardedDataParallel(config, sharding, model_of(config), fsdp_unit_modules=[torch.nn.Linear])
    options: dict[str, Any] = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0}
    options |= {"bf16": True, "params_dtype": torch.bfloat16, "use_distributed_optimizer": True}
    optimizer = get_megatron_optimizer(OptimizerConfig(**options), [model])
    for iteration in range(STEPS):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(iteration)).to(torch.bfloat16).cuda()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        torch.autograd.backward([optimizer.scale_loss(model(x).float().pow(2).mean())])
        model.finish_grad_sync()
        optimizer.step()
    return model, optimizer


def save(rank: int, folder: str) -> None:
    checkpointing = megatron_lm.import_training()
    megatron_lm.start(1, 1)
    args = megatron_lm.arguments(Path(folder), 1, 1, ckpt_format="fsdp_dtensor", use_megatron_fsdp=True)
    args.use_distributed_optimizer = True
    model, optimizer = trained()
    megatron_lm.save(checkpointing, model, args, optimizer)


if __name__ == "__main__":
    hook_as_on_a_gpu()
    megatron_lm.import_training()
    mt.spawn(save, RANKS, sys.argv[1])
