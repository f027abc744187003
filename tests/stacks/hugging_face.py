"""One run of Transformers' Trainer, or of a loop with Accelerate, with DeepSpeed on CPU ranks.

    torchrun --nproc-per-node 2 hugging_face.py FOLDER first --stage 2
    torchrun --nproc-per-node 3 hugging_face.py FOLDER universal --stage 2

`first` takes 6 steps, saves after the third, and keeps the live state after the third and the sixth. `resume` and
`universal` begin with other weights, load the checkpoint of `first`, and continue to the sixth step. The last line of
rank 0 is JSON. It lists the states that differ from those at the save, and the states that differ at the end.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import accelerate.utils
import torch
import transformers
import transformers.training_args
from accelerate import Accelerator, DeepSpeedPlugin

from trainers import deepspeed_training as dt

STEPS, SAVED_AT = 6, 3
VOCABULARY, LENGTH, BATCH = 64, 8, 12  # the batch is divisible by 2, 3 and 4 ranks
TRAINER_FOLDER, ACCELERATE_FOLDER = f"checkpoint-{SAVED_AT}", "state"


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    zero = {
        "stage": args.stage,
        "reduce_bucket_size": 100_000,
        "round_robin_gradients": args.round_robin,
        "stage3_param_persistence_threshold": 100,
    }
    return {
        "train_micro_batch_size_per_gpu": BATCH // int(os.environ["WORLD_SIZE"]),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": args.mode == "universal"},
    }


def model_of(args: argparse.Namespace) -> Any:
    """A small Llama with tied embeddings. The trained weights depend on the mode. Weights that LoRA skips do not."""
    seed = 0 if args.mode == "first" else 1
    torch.manual_seed(0 if args.lora else seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    if not args.lora:
        return model
    import peft

    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, VOCABULARY, (LENGTH,), generator=generator) for _ in range(STEPS * BATCH)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


class Judge:
    """Compares a run's live state with the live state of `first`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder, self.keeps = args.folder, args.mode == "first"
        self.differ: dict[str, list[str]] = {}

    def look(self, run: Any, moment: str) -> None:
        """Inspect the state at the save or right after the load, and at the end."""
        live, path = dt.snapshot(run), self.folder / f"{moment}.pt"
        if not self.keeps:
            self.differ[moment] = dt.on_any_rank(dt.differences(live, torch.load(path, weights_only=False)))
        elif torch.distributed.get_rank() == 0:
            torch.save(live, path)


def train_with_trainer(args: argparse.Namespace, judge: Judge) -> None:
    class Looks(transformers.TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            if judge.keeps and trainer.state.global_step == SAVED_AT:
                judge.look(trainer.model_wrapped, "saved")

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not judge.keeps and trainer.state.global_step == SAVED_AT:
                judge.look(trainer.model_wrapped, "saved")

    arguments = transformers.TrainingArguments(
        output_dir=str(args.folder if judge.keeps else args.folder / "later"),
        deepspeed=config_of(args),
        per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]),
        max_steps=STEPS,
        save_steps=SAVED_AT,
        save_strategy="steps" if judge.keeps else "no",
        warmup_steps=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        bf16=True,
        optim="adamw_torch",
        logging_steps=STEPS,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = transformers.Trainer(model=model_of(args), args=arguments, train_dataset=samples(), callbacks=[Looks()])
    trainer.train(resume_from_checkpoint=None if judge.keeps else str(args.folder / TRAINER_FOLDER))
    judge.look(trainer.model_wrapped, "end")


def train_with_accelerate(args: argparse.Namespace, judge: Judge) -> None:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config_of(args)))
    model = model_of(args)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.1)
    loader = torch.utils.data.DataLoader(samples(), batch_size=BATCH // accelerator.num_processes)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    run, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    batches = iter(loader)
    if judge.keeps:
        take_steps(accelerator, run, optimizer, scheduler, batches, SAVED_AT)
        accelerator.save_state(str(args.folder / ACCELERATE_FOLDER))
    else:
        accelerator.load_state(str(args.folder / f"{args.mode}-{ACCELERATE_FOLDER}"))
        for _ in range(SAVED_AT):
            next(batches)
    judge.look(run, "saved")
    take_steps(accelerator, run, optimizer, scheduler, batches, STEPS - SAVED_AT)
    judge.look(run, "end")


def take_steps(accelerator: Any, run: Any, optimizer: Any, scheduler: Any, batches: Iterator[Any], steps: int) -> None:
    for _ in range(steps):
        accelerator.backward(run(**next(batches)).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def allow_bf16_on_a_cpu() -> None:
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    for module in (accelerate.utils, accelerate.utils.imports, accelerate.accelerator, accelerate.state):
        if hasattr(module, "is_bf16_available"):
            module.is_bf16_available = lambda *_, **__: True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("mode", choices=("first", "resume", "universal"))
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--round-robin", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--accelerate", action="store_true")
    args = parser.parse_args()
    dt.prepare()
    allow_bf16_on_a_cpu()
    judge = Judge(args)
    (train_with_accelerate if args.accelerate else train_with_trainer)(args, judge)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        print("\n" + json.dumps(judge.differ), flush=True)
    os._exit(0)  # Gloo and DeepSpeed leave threads running


if __name__ == "__main__":
    main()
