"""verl's FSDPCheckpointManager, as its workers call it: `verl_saving.py FOLDER fsdp1|fsdp2`."""

import sys
from pathlib import Path

import torch
from omegaconf import OmegaConf
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from writers.small_model import STEPS, fsdp1, fsdp2, on_ranks

ALL = ["model", "optimizer", "extra"]


class NoTokenizer:
    def save_pretrained(self, folder: str) -> None:
        """The model built here has no tokenizer."""


def model_of() -> torch.nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, **sizes))


def save(folder: str, kind: str) -> None:
    model = model_of()
    if kind == "fsdp1":
        model = fsdp1(model)
    else:
        fsdp2(model.model)
        torch.distributed.fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for _ in range(STEPS):
        tokens = torch.randint(0, 64, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    contents = OmegaConf.create({"save_contents": ALL, "load_contents": ALL})
    manager = FSDPCheckpointManager(
        model, optimizer, scheduler, processing_class=NoTokenizer(), checkpoint_config=contents
    )
    manager.save_checkpoint(str(Path(folder, f"global_step_{STEPS}", "actor")), global_step=STEPS)


if __name__ == "__main__":
    on_ranks(save, sys.argv[1], sys.argv[2])
