"""One run of Transformers' Trainer, or of a loop with Accelerate, with DeepSpeed on CPU ranks.

    torchrun --nproc-per-node 2 hugging_face.py FOLDER first --stage 2
    torchrun --nproc-per-node 3 hugging_face.py FOLDER universal --stage 2

`first` takes 6 steps, saves after the third, and keeps the live state after the third and the sixth. `resume` and
`universal` begin with other weights, load the checkpoint of `first`, and continue to the sixth step. Rank 0 prints JSON
lines: the states that differ from those at the save (`saved`), and those that differ at the end (`end`).
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


def look(run: Any, args: argparse.Namespace, moment: str) -> None:
    """Keep the live state of `first`; print the names of states that differ from it in another run."""
    live, path = dt.snapshot(run), args.folder / f"{moment}.pt"
    if args.mode != "first":
        different = dt.on_any_rank(dt.differences(live, torch.load(path, weights_only=False)))
        if torch.distributed.get_rank() == 0:
            print("\n" + json.dumps({moment: different}), flush=True)
    elif torch.distributed.get_rank() == 0:
        torch.save(live, path)


def train_with_trainer(args: argparse.Namespace) -> None:
    first = args.mode == "first"

    class Looks(transformers.TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            if first and trainer.state.global_step == SAVED_AT:
                look(trainer.model_wrapped, args, "saved")

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not first and trainer.state.global_step == SAVED_AT:
                look(trainer.model_wrapped, args, "saved")

    arguments = transformers.TrainingArguments(
        output_dir=str(args.folder if first else args.folder / "later"),
        deepspeed=config_of(args),
        per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]),
        max_steps=STEPS,
        save_steps=SAVED_AT,
        save_strategy="steps" if first else "no",
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
    trainer.train(resume_from_checkpoint=None if first else str(args.folder / TRAINER_FOLDER))
    look(trainer.model_wrapped, args, "end")


def train_with_accelerate(args: argparse.Namespace) -> None:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config_of(args)))
    model = model_of(args)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.1)
    loader = torch.utils.data.DataLoader(samples(), batch_size=BATCH // accelerator.num_processes)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    run, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    batches = iter(loader)
    if args.mode == "first":
        take_steps(accelerator, run, optimizer, scheduler, batches, SAVED_AT)
        accelerator.save_state(str(args.folder / ACCELERATE_FOLDER))
    else:
        accelerator.load_state(str(args.folder / f"{args.mode}-{ACCELERATE_FOLDER}"))
        for _ in range(SAVED_AT):
            next(batches)
    look(run, args, "saved")
    take_steps(accelerator, run, optimizer, scheduler, batches, STEPS - SAVED_AT)
    look(run, args, "end")


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
    (train_with_accelerate if args.accelerate else train_with_trainer)(args)
    torch.distributed.barrier()
    os._exit(0)  # Gloo and DeepSpeed leave threads running


if __name__ == "__main__":
    main()
