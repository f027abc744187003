"""TorchTitan's CheckpointManager, as its trainer calls it: `torchtitan_saving.py FOLDER fsdp2`."""

import sys
from typing import Any

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import OptimizersContainer, default_adamw

from writers.small_model import STEPS, SmallModel, fsdp2, on_ranks, take_steps


class Progress:
    """The trainer state that TorchTitan saves."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def save(folder: str) -> None:
    model, progress = fsdp2(SmallModel()), Progress()
    config = default_adamw()
    config.implementation = "for-loop"
    optimizers = OptimizersContainer(config, model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10)
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, interval=STEPS),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=folder,
    )
    for _ in range(STEPS):
        take_steps(model, optimizers, 1)
        schedulers.step()
        progress.step += 1
        manager.save(progress.step)
    manager.close()


if __name__ == "__main__":
    on_ranks(save, sys.argv[1])
