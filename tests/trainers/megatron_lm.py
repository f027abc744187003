"""Save and load with the real `megatron.training`, as Megatron-LM's scripts do, on CPU ranks."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainers import megatron_training as mt
from trainers import stub_imports

SEED = 123
SAMPLES = 8  # per step of a `Run`


def import_training() -> Any:
    """`megatron.training.checkpointing`, even if modules that its package imports are missing."""
    mt.import_packages()
    mt.without_transformer_engine()
    stub_imports.install()
    from megatron.training import checkpointing

    return checkpointing


def start(tensor: int, expert: int, expert_tensor: int | None = None, context: int = 1) -> None:
    """Begin a run: initialize its parallel state and seed its RNG states."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        context_parallel_size=context,
    )
    model_parallel_cuda_manual_seed(SEED)


def arguments(folder: Path, tensor: int, expert: int, expert_tensor: int | None = None, **more: Any) -> Any:
    """The arguments of a script that saves to a folder and loads from it."""
    from megatron.training.arguments import parse_args

    found, sys.argv = sys.argv, [sys.argv[0]]
    try:
        args = parse_args(ignore_unknown_args=True)
    finally:
        sys.argv = found
    ranks = dist.get_world_size()
    vars(args).update(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor or tensor,
        world_size=ranks,
        data_parallel_size=ranks // tensor,
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        add_position_embedding=True,
        vocab_file=None,
        consumed_train_samples=0,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        seed=SEED,
        save=str(folder),
        load=str(folder),
        ckpt_format="torch_dist",
        use_dist_ckpt=True,
        phase_transition_iterations=None,
        async_strategy="mcore",
        save_tokenizer_assets=False,
    )
    vars(args).update(more)
    return args


def save(
    checkpointing: Any,
    model: Any,
    args: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    iteration: int = 1,
    **more: Any,
) -> None:
    checkpointing.get_args = lambda: args
    checkpointing.save_checkpoint(iteration, [model], optimizer, scheduler, 0, **more)


def load(checkpointing: Any, model: Any, args: Any, optimizer: Any = None, scheduler: Any = None, **more: Any) -> None:
    checkpointing.get_args = lambda: args
    checkpointing.update_num_microbatches = lambda **_: None  # its schedule is not set up here
    checkpointing.load_checkpoint([model], optimizer, scheduler, **more)


@dataclass(frozen=True)
class Run:
    """A process of Megatron-LM: its arguments, model, optimizer and scheduler."""

    checkpointing: Any  # the module
    args: Any
    model: Any
    optimizer: Any
    scheduler: Any

    def train(self, first: int, last: int) -> None:
        for iteration in range(first, last + 1):
            mt.step(self.model, self.optimizer, iteration)
            self.scheduler.step(increment=SAMPLES)

    def save(self, iteration: int, **more: Any) -> None:
        self.args.consumed_train_samples = SAMPLES * iteration
        self.checkpointing.save_checkpoint(iteration, [self.model], self.optimizer, self.scheduler, 0, **more)

    def load(self) -> int:
        """Load as the arguments say. Returns the iteration that Megatron-LM goes on from."""
        iteration, _ = self.checkpointing.load_checkpoint([self.model], self.optimizer, self.scheduler)
        return int(iteration)

    def state(self) -> dict[str, Any]:
        """Every weight, main parameter and moment."""
        return mt.everything(self.model, self.optimizer)

    def is_at(self, saved: dict[int, dict[str, Any]], *, weights: bool = False) -> int | None:
        """The iteration whose saved state (or weights) these are; None if they are of none of them."""
        own = mt.weights(self.model) if weights else self.state()
        equal = (at for at, state in saved.items() if all(state[name].equal(value) for name, value in own.items()))
        return next(equal, None)


def begin(folder: Path, tensor: int = 1, expert: int = 1, *, ckpt_format: str = "torch_dist", **more: Any) -> Run:
    """Start Megatron-LM, which saves to a folder and loads from it, unless the arguments name others."""
    checkpointing = import_training()
    more = {"use_distributed_optimizer": True, "bf16": True, **more}
    args = arguments(folder, tensor, expert, ckpt_format=ckpt_format, use_dist_ckpt=ckpt_format != "torch", **more)
    start(tensor, expert)
    mt.use_inner_optimizer("fused")
    checkpointing.get_args = lambda: args
    checkpointing.update_num_microbatches = lambda **_: None  # its schedule is not set up here
    model, optimizer = mt.build(settings={"min_lr": 1e-4})
    bounds = {"max_lr": 1e-2, "min_lr": 1e-4, "lr_warmup_steps": 4, "use_checkpoint_opt_param_scheduler": True}
    scheduler = mt.scheduler(optimizer, **bounds)
    return Run(checkpointing, args, model, optimizer, scheduler)
