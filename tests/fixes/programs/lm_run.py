"""A training with the real megatron.training on CPU ranks, which proofs of its fixes start, save and resume."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers import megatron_lm
from trainers import megatron_training as mt

SAMPLES = 8  # per step


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


def start(folder: Path, ckpt_format: str = "torch_dist", **arguments: Any) -> Run:
    """Start Megatron-LM, which saves to a folder and loads from it, unless the arguments name others."""
    checkpointing = megatron_lm.import_training()
    arguments = {
        "use_distributed_optimizer": True,
        "bf16": True,
        "ckpt_format": ckpt_format,
        "use_dist_ckpt": ckpt_format != "torch",
        **arguments,
    }
    args = megatron_lm.arguments(folder, 1, 1, **arguments)
    megatron_lm.start(1, 1)
    mt.use_inner_optimizer("fused")
    checkpointing.get_args = lambda: args
    checkpointing.update_num_microbatches = lambda **_: None  # its schedule is not set up here
    model, optimizer = mt.build(settings={"min_lr": 1e-4})
    return Run(checkpointing, args, model, optimizer, scheduler(optimizer))


def scheduler(optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-4, lr_warmup_steps=4, lr_decay_steps=80, lr_decay_style="linear",
        start_wd=0.1, end_wd=0.1, wd_incr_steps=80, wd_incr_style="constant",
    )  # fmt: skip
