"""Train a small GPT with the real megatron-core on CPU ranks, save it, and resume it, in another release or layout.

The model has two layers with SwiGLU, a padded vocabulary and an embedding that is also the output layer; with
`--experts` each layer has two experts, or `--of-each` many. `save` writes OUT/checkpoint, and the state then and two
steps later; `resume` loads a checkpoint and prints JSON: for the "loaded" state, and the state two steps "after",
"bit-equal" or the differences. If other model-parallel ranks saved it, `resume` saves the loaded state in OUT/again,
and with --save-as in any case, in that format.

    gpt_resume.py save|resume OUT [--checkpoint FOLDER] [--format fully_sharded_model_space] [--backend torch_dist]
        [--save-as dp_reshardable] [--tp 1] [--pp 1] [--ep 1] [--dp 2] [--experts] [--of-each 2] [--fp32]
        [--inner fused|torch] [--optimizer distributed|whole|layer_wise|none] [--offload 0.5]

A `whole` optimizer is not distributed: each rank has all of its state. Of the `layer_wise` one (layer_wise.py) each
data-parallel rank has that of whole parameters. With `none` only the model's weights are saved.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from program_arguments import parsed
from trainers import gpt_training, judge, layer_wise
from trainers import megatron_training as mt
from trainers.judge import State
from trainers.megatron_state import Run, kind_of, live
from trainers.options import MEGATRON

STEPS_BEFORE, STEPS_AFTER = 3, 2
SETTINGS = (".lr", ".weight_decay", ".wd_mult", ".lr_mult", ".eps")


def main() -> None:
    options = parsed(
        {"what": str, "out": Path}, checkpoint=Path, format="fully_sharded_model_space", backend="torch_dist",
        save_as="", tp=1, pp=1, ep=1, dp=2, experts=False, of_each=2, fp32=False, inner="fused",
        optimizer="distributed", offload="",
    )  # fmt: skip
    ranks = options.tp * options.pp * options.dp
    parallel = {"tensor_parallel": options.tp, "pipeline_parallel": options.pp}
    mt.spawn(save if options.what == "save" else resume, ranks, options, **parallel)


def build(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model under Megatron's DDP, and its optimizer."""
    from megatron.core import parallel_state

    chosen = {
        **MEGATRON,
        "min_lr": None,
        "clipping": True,
        "gated": True,
        **{name: getattr(options, name) for name in ("tp", "pp", "inner", "optimizer")},
        **({"optimizer": "whole"} if options.optimizer == "layer_wise" else {}),
        "offload": float(options.offload) if options.offload else None,
        "ep": options.ep if options.experts else 0,
        "experts": options.of_each,
        "dtype": "fp32" if options.fp32 else "bf16",
    }
    parallel_state.destroy_model_parallel()
    gpt_training.initialize(chosen)
    make = layer_wise.make if options.optimizer == "layer_wise" else None
    return gpt_training.build(chosen, seed=0, make_optimizer=make)


def step(model: Any, optimizer: Any, number: int) -> None:
    """One step; all data-parallel ranks have the same tokens, so that other numbers of ranks take the same step."""
    gpt_training.step(model, optimizer, number, shared=2)


def everything(options: argparse.Namespace, model: Any, optimizer: Any) -> State:
    """Each weight, main parameter and moment, steps, and the settings that each release has."""
    found = live(Run(model, optimizer, None))
    if options.optimizer == "none":
        return {key: value for key, value in found.items() if kind_of(key) == "weight"}
    return {key: value for key, value in found.items() if kind_of(key) != "setting" or key.endswith(SETTINGS)}


def sharded(options: argparse.Namespace, model: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    if options.optimizer == "none":
        return {"model": model.module.sharded_state_dict()}
    name = "default" if options.optimizer in ("whole", "layer_wise") else options.format
    return mt.sharded_state_dict(name, model.module, optimizer, is_loading=is_loading, chained_optim_avoid_prefix=True)


def save(rank: int, options: argparse.Namespace) -> None:
    model, optimizer = build(options)
    for number in range(STEPS_BEFORE):
        step(model, optimizer, number)
    state = sharded(options, model, optimizer, is_loading=False)
    args = argparse.Namespace(iteration=STEPS_BEFORE, bf16=not options.fp32)
    common = {"args": args, "iteration": STEPS_BEFORE, "checkpoint_version": 3.0}
    mt.write({**state, **common}, options.out / "checkpoint", options.backend)
    saved = everything(options, model, optimizer)
    for number in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        step(model, optimizer, number)
    after = everything(options, model, optimizer)
    if rank == 0:
        torch.save((saved, after), truth(options))
    dist.barrier()


def truth(options: argparse.Namespace) -> Path:
    """The file with the states of a run in this layout of model-parallel ranks."""
    return Path(options.out, f"tp{options.tp}-pp{options.pp}-ep{options.ep}.pt")


def resume(rank: int, options: argparse.Namespace) -> None:
    from megatron.core import dist_checkpointing

    model, optimizer = build(options)
    state = sharded(options, model, optimizer, is_loading=True)
    loaded = dist_checkpointing.load(state, str(options.checkpoint))
    model.module.load_state_dict(loaded["model"])
    if "optimizer" in loaded:
        optimizer.load_state_dict(loaded["optimizer"])
    if options.save_as or not truth(options).exists():
        options.format = options.save_as or options.format
        state = sharded(options, model, optimizer, is_loading=False)
        mt.write(state, options.out / "again", options.backend)
        if rank == 0:
            print(json.dumps({"result": "saved again"}))
        return
    found = [everything(options, model, optimizer)]
    for number in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        step(model, optimizer, number)
    found.append(everything(options, model, optimizer))
    expected = torch.load(truth(options), weights_only=False)
    names = [judge.on_any_rank(judge.different(*pair)) for pair in zip(found, expected, strict=True)]
    if rank == 0:
        results = [f"differs: {own}" if own else "bit-equal" for own in names]
        print(json.dumps(dict(zip(("loaded", "after"), results, strict=True))))


if __name__ == "__main__":
    main()
