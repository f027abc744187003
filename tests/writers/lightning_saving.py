"""Lightning's Trainer with sharded checkpoints: `lightning_saving.py FOLDER fsdp2`. It starts its own ranks.

Its strategy for FSDP1 requires a GPU.
"""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from writers.small_model import LENGTH, RANKS, STEPS, TOKENS, SmallModel, fsdp2, loss_of


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = SmallModel()

    def configure_model(self) -> None:
        fsdp2(self.inner, mesh=self.device_mesh["data_parallel"])

    def training_step(self, tokens: list[torch.Tensor], _: int) -> torch.Tensor:
        return loss_of(self.inner, tokens[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        samples = torch.utils.data.TensorDataset(torch.randint(0, TOKENS, (RANKS * 4 * STEPS, LENGTH)))
        return torch.utils.data.DataLoader(samples, batch_size=4)


def main(folder: str) -> None:
    lightning.seed_everything(0)
    sizes = {"data_parallel_size": RANKS, "tensor_parallel_size": 1}
    strategy = ModelParallelStrategy(save_distributed_checkpoint=True, process_group_backend="gloo", **sizes)
    quiet = dict.fromkeys(("enable_checkpointing", "logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=STEPS, **quiet)
    trainer.fit(Module())
    trainer.save_checkpoint(Path(folder, f"step_{STEPS}"))


if __name__ == "__main__":
    main(sys.argv[1])
