"""Train tiny models with the real Trainer of Transformers, or Accelerate, each as a case has it, and save them.

    trainer_kinds CASES.json --ranks 2

A case is a dict with a seed, a folder, and options: `model` (llama, t5), `lora`, `optim` (Trainer's names), `dtype`,
`deepspeed` (a stage), `only_model`, `final` (`save_pretrained` alone), or `accelerate` (an optimizer's class in a
package, as torch.optim.AdamW). FOLDER/judged is the last save, FOLDER/earlier the one before it.
"""

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

import token_model
from program_arguments import parsed
from trainers.ranks import free_port, results

VOCABULARY, LENGTH = 64, 9


def model_of(case: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    if case.get("model") == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": bool(case.get("tied"))}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))
    if not case.get("lora"):
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train(case: dict[str, Any], out: Path) -> None:
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(case["seed"])
    seen = case.get("seen", VOCABULARY)
    data = [{"input_ids": torch.randint(0, seen, (LENGTH,)), "labels": torch.randint(0, seen, (LENGTH,))}] * 4
    data += [{name: value.roll(1) for name, value in one.items()} for one in data]
    more: dict[str, Any] = {"bf16": True} if case.get("dtype") == "bf16" else {}
    if "deepspeed" in case:
        zero = {"stage": case["deepspeed"], "reduce_bucket_size": 1000}
        more["deepspeed"] = {
            "zero_optimization": zero, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
        }  # fmt: skip
        more["bf16"] = True
    arguments = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=1, max_steps=4, save_steps=2, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_strategy="no", ddp_backend="gloo", optim=case.get("optim", "adamw_torch"),
        learning_rate=1e-2, warmup_steps=case.get("warm_up", 0), seed=case["seed"],
        save_only_model=bool(case.get("only_model")), **more,
    )  # fmt: skip
    trainer = Trainer(model=model_of(case), args=arguments, train_dataset=data)
    trainer.train()
    if case.get("final"):
        trainer.save_model(str(out / "final"))


def with_trainer(case: dict[str, Any], rank: int) -> None:
    out = Path(case["folder"], "trained")
    train(case, out)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    if rank == 0:
        if case.get("final"):
            (out / "final").rename(out.parent / "judged")
        else:
            for name, step in (("earlier", 2), ("judged", 4)):
                (out.parent / name).mkdir()
                (out / f"checkpoint-{step}").rename(out.parent / name / f"checkpoint-{step}")
        shutil.rmtree(out)


def with_accelerate(case: dict[str, Any]) -> None:
    """Accelerate's `save_state`: model.safetensors, optimizer.bin, scheduler.bin, random_states_0.pkl."""
    from accelerate import Accelerator

    torch.manual_seed(case["seed"])
    package, _, name = case["accelerate"].rpartition(".")
    model = token_model.Model(case.get("width", token_model.WIDTH))
    made = getattr(importlib.import_module(package), name)(model.parameters(), **case.get("settings", {}))
    getattr(made, "train", lambda: None)()  # of schedule-free optimizers
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda _: 1.0)
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = accelerator.prepare(model, made, scheduler)
    generator = torch.Generator().manual_seed(case["seed"])
    for number in range(4):
        if number == 3:
            accelerator.save_state(f"{case['folder']}/earlier")
        optimizer.zero_grad()
        accelerator.backward(token_model.loss_of(model, generator), create_graph=case.get("graph", False))
        optimizer.step()
        scheduler.step()
    accelerator.save_state(f"{case['folder']}/judged")


def write(rank: int, ranks: int, port: int, cases: list[dict[str, Any]]) -> list[str]:
    """Write the runs; return the errors of those that cannot be written."""
    torch.set_num_threads(1)
    if ranks > 1:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in where.items()})
    refused = []
    for case in cases:
        try:
            with_accelerate(case) if "accelerate" in case else with_trainer(case, rank)
        except Exception as error:  # a missing package, or a limit of a package
            refused.append(f"{case['kind']}, seed {case['seed']}: {type(error).__name__}: {str(error)[:150]}")
            shutil.rmtree(case["folder"], ignore_errors=True)
    return refused


def main() -> None:
    sys.path.append(os.environ.get("FURTHER_PACKAGES", ""))
    os.environ.update(ACCELERATE_USE_CPU="1", DS_ACCELERATOR="cpu")
    args = parsed({"cases": Path}, ranks=2)
    cases = json.loads(args.cases.read_text())
    if any("deepspeed" in case for case in cases):
        from trainers.deepspeed_training import prepare, reduce_as_on_a_gpu

        prepare()
        reduce_as_on_a_gpu()
    print(json.dumps({"refused": results(write, args.ranks, args.ranks, free_port(), cases)[0]}))


if __name__ == "__main__":
    main()
