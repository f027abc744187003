"""Finetune with the real Megatron-Bridge: its checkpoint load under the hybrid CPU-offload optimizer, then one step.

Bridge builds a small GPT, saves it, builds it again from another seed, with an optimizer, and loads the checkpoint. The
step has learning rate 0. Prints a list as JSON, for each way to load and offload fraction: whether the load restored
the saved weights, the parameters that the step changed, those reset to their random initialization, and the kinds of
copies in the optimizer that Bridge's own work-around (in 0.6.0), run after the load, still changed.

    bridge_finetune.py OUT [--ranks 2] [--work-around]
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch

import bridge_imports  # noqa: F401  installs stubs for missing packages
from program_arguments import parsed
from trainers import megatron_training as mt

# How Bridge gets the checkpoint, and whether the optimizer gets it as well (`state_dict=`).
LOADS: dict[str, dict[str, Any]] = {
    "finetune": {"finetune": True},
    "pretrained_checkpoint": {},
    "load_main_params_from_ckpt": {"finetune": True, "load_optim": False, "load_main_params_from_ckpt": True},
}
FRACTIONS = (0.0, 0.5, 1.0)
RESULT = "result.json"


def main() -> None:
    options = parsed({"out": Path}, ranks=2, work_around=False)
    mt.spawn(worker, options.ranks, options)
    print((options.out / RESULT).read_text())


def worker(rank: int, options: argparse.Namespace) -> None:
    saved = save(options.out)
    found = []
    for load, fraction in itertools.product(LOADS, FRACTIONS):
        result = case(options, load, fraction, saved)
        results = mt.gathered(result)
        found.append({
            "load": load,
            "fraction": fraction,
            "loaded": all(r["loaded"] for r in results),
            "lost": sorted({name for r in results for name in r["lost"]}),
            "initial": sorted({name for r in results for name in r["initial"]}),
            "work_around_changes": sorted({kind for r in results for kind in r["work_around_changes"]}),
        })  # fmt: skip
    if rank == 0:
        (options.out / RESULT).write_text(json.dumps(found))


def save(out: Path) -> dict[str, torch.Tensor]:
    """Save a pretrained model with Bridge itself; return its weights."""
    from megatron.bridge.training.checkpointing import save_checkpoint

    state, model, _ = build(seed=1, fraction=None, save=str(out), save_optim=False)
    state.train_state.step = 10
    save_checkpoint(state, model, None, None, num_floating_point_operations_so_far=0)
    return weights(model)


def weights(model: list[Any]) -> dict[str, torch.Tensor]:
    return {name.replace("module.", ""): value for name, value in mt.weights(model[0]).items()}


def case(options: argparse.Namespace, load: str, fraction: float, saved: dict[str, torch.Tensor]) -> dict[str, Any]:
    from megatron.bridge.training.checkpointing import load_checkpoint

    place = "pretrained_checkpoint" if load == "pretrained_checkpoint" else "load"
    state, model, optimizer = build(seed=2, fraction=fraction, **{place: str(options.out)}, **LOADS[load])
    initial = weights(model)
    load_checkpoint(state, model, optimizer, None)
    loaded = weights(model)
    changes = changed_by_work_around(optimizer) if options.work_around else []
    step(model[0], optimizer)
    after = weights(model)
    lost = [name for name in after if not torch.equal(after[name], loaded[name])]
    return {
        "loaded": mt.equal(loaded, saved),
        "lost": lost,
        "initial": [name for name in lost if torch.equal(after[name], initial[name])],
        "work_around_changes": changes,
    }


def build(seed: int, fraction: float | None, **checkpoint: Any) -> tuple[Any, list[Any], Any]:
    """Bridge's state, model and optimizer, built by the calls of its `setup`."""
    from megatron.bridge.training.optim import setup_optimizer
    from megatron.bridge.training.state import GlobalState
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    state = GlobalState()
    state.cfg = config(fraction, checkpoint)
    model = state.cfg.model.provide_distributed_model(ddp_config=state.cfg.ddp)
    optimizer = setup_optimizer(state.cfg.optimizer, state.cfg.scheduler, model)[0] if fraction is not None else None
    return state, model, optimizer


def config(fraction: float | None, checkpoint: dict[str, Any]) -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.training import config as bridge

    model = GPTModelProvider(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=32,
        seq_length=8,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=False,
        gradient_accumulation_fusion=False,
        transformer_layer_spec=local_layer_spec,
    )
    optimizer = bridge.OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        min_lr=0.0,
        weight_decay=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=0.0,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=fraction or 0.0,
        use_torch_optimizer_for_cpu_offload=True,
    )
    ddp = bridge.DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    for part in (model, optimizer, ddp):
        part.finalize()
    scheduler = bridge.SchedulerConfig(lr_decay_style="constant", start_weight_decay=0.0, end_weight_decay=0.0)
    scheduler.lr_warmup_steps, scheduler.lr_decay_steps, scheduler.wd_incr_steps = 0, 1, 1
    return bridge.ConfigContainer(
        train=bridge.TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=1),
        model=model,
        optimizer=optimizer,
        ddp=ddp,
        scheduler=scheduler,
        dataset=None,
        logger=bridge.LoggerConfig(),
        tokenizer=bridge.TokenizerConfig(),
        checkpoint=bridge.CheckpointConfig(save_rng=False, **checkpoint),
    )


def step(model: Any, optimizer: Any) -> None:
    tokens = torch.arange(8).unsqueeze(0).cuda()
    mask = torch.ones(1, 1, 8, 8).triu(1).bool().cuda()
    mt.update(model, optimizer, lambda: model(tokens, tokens, mask, labels=tokens).float().mean())


def changed_by_work_around(optimizer: Any) -> list[str]:
    """Run Megatron-Bridge's work-around (since 0.6.0) for reload_model_params(); return the kinds of changed copies."""
    distributed = mt.inner(optimizer)
    hybrid = distributed.optimizer
    before = copies(distributed)
    with torch.no_grad():
        groups = zip(distributed.model_float16_groups, distributed.shard_fp32_from_float16_groups, strict=True)
        for params, shards in groups:
            for param, shard in zip(params, shards, strict=True):
                where = distributed._get_model_param_range_map(param)["param"]
                shard.copy_(param.view(-1)[where.start : where.end])
        for param, clone in hybrid.gpu_params_map_cpu_copy.items():
            clone.copy_(param)
        hybrid.update_fp32_param_by_new_param()
    after = copies(distributed)
    return [kind for kind in before if not all(map(torch.equal, before[kind], after[kind]))]


def copies(distributed: Any) -> dict[str, list[torch.Tensor]]:
    hybrid = distributed.optimizer
    found = {
        "fp32 shard": [shard for group in distributed.shard_fp32_from_float16_groups for shard in group],
        "CPU clone": list(hybrid.gpu_params_map_cpu_copy.values()),
        "fp32 working copy": list(hybrid.param_to_fp32_param.values()),
    }
    return {kind: [tensor.detach().clone() for tensor in tensors] for kind, tensors in found.items()}


if __name__ == "__main__":
    main()
