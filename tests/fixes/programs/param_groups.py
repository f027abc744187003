"""Resume the real megatron-core, and print the settings of the param groups.

    param_groups.py FOLDER RUN… [--stages] [--format FORMAT] [--optimizer distributed|float16]

Each RUN is a separate run, in JSON:
    do               "save", "load", or "train": the reference for a load, the same steps without a stop
    name             of the checkpoint; with "resave" a load writes another one
    lr, min_lr, decoupled_lr, mup, weight_decay (start and end)
    group_weight_decay   of the embedding only
    bounds_of_all    a learning rate set as the bounds of all groups, after the load or before training
    keep             "override" or "checkpoint": the scheduler's flags
    scheduler_first  load it before the optimizer; Megatron loads the optimizer first
With `--stages` there are two pipeline stages, the second of which starts with a norm; else one rank with an embedding,
a norm and a layer.

Prints for each RUN a list by rank: the groups with parameters, by the parameters' names, after the load and at the end
of the schedule; or the error.
"""

import argparse
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainers import megatron_training as mt

BATCH = 4
STEPS, SCHEDULE = 3, 20
SHOWN = ("wd_mult", "max_lr", "min_lr", "start_wd", "end_wd", "eps", "lr", "weight_decay", "step")

Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="+", type=json.loads)
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--format", default="fully_reshardable")
    parser.add_argument("--optimizer", default="distributed")
    options = parser.parse_args()
    ranks = 2 if options.stages else 1
    found = mt.results(worker, ranks, options, parallel=(1, ranks))
    print(json.dumps([list(of_ranks) for of_ranks in zip(*found, strict=True)]))


def worker(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    mt.use_inner_optimizer("fused")
    return [outcome(rank, options, run) for run in options.runs]


def outcome(rank: int, options: argparse.Namespace, run: Run) -> dict[str, Any]:
    said: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("megatron.core.optimizer.optimizer")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        return {**done(rank, options, run), "warnings": said}
    except Exception as error:  # the tests check it
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        logger.removeHandler(handler)


def done(rank: int, options: argparse.Namespace, run: Run) -> dict[str, Any]:
    """The groups of a run, now and at the end of its schedule."""
    model, optimizer, scheduler = made = build(rank, options, run)
    if run["do"] == "load":
        load(options, run, *made)
    if run["do"] != "save" and "bounds_of_all" in run:
        for group in optimizer.param_groups:
            group["max_lr"] = group["min_lr"] = run["bounds_of_all"]
        scheduler.step(increment=0)
    if run["do"] != "load":
        for iteration in range(STEPS):
            mt.step(model, optimizer, iteration)
            scheduler.step(increment=BATCH)
    if name := run["name"] if run["do"] == "save" else run.get("resave"):
        state = sharded(options, *made, is_loading=False)
        mt.write(state, options.folder / name, mt.sharded_backend(options.format))
    now = groups(model, optimizer)
    scheduler.step(increment=2 * SCHEDULE * BATCH)
    return {"now": now, "end": groups(model, optimizer)}


def load(options: argparse.Namespace, run: Run, model: Any, optimizer: Any, scheduler: Any) -> None:
    from megatron.core import dist_checkpointing

    wanted = sharded(options, model, optimizer, scheduler, is_loading=True)
    loaded = dist_checkpointing.load(wanted, str(options.folder / run["name"]))
    parts = [(optimizer, loaded["optimizer"]), (scheduler, loaded["scheduler"])]
    for part, state in reversed(parts) if run.get("scheduler_first") else parts:
        part.load_state_dict(state)


def build(rank: int, options: argparse.Namespace, run: Run) -> tuple[Any, Any, Any]:
    """The model, its optimizer and its scheduler."""
    lr = run.get("lr", 1e-3)
    bounds = {"lr": lr, "min_lr": run.get("min_lr", lr / 10)}
    settings = {**bounds, "use_distributed_optimizer": options.optimizer == "distributed"}
    if "decoupled_lr" in run:
        settings |= {"decoupled_lr": run["decoupled_lr"], "decoupled_min_lr": run["decoupled_lr"] / 10}
    overrides = partial(overridden, run) if {"mup", "group_weight_decay"} & run.keys() else None
    make_model = partial(stage, second=options.stages and rank == 1)
    model, optimizer = mt.build(make_model=make_model, settings=settings, overrides=overrides)
    start_wd, end_wd = run.get("weight_decay", (0.1, 0.1))
    scheduler = mt.scheduler(
        optimizer,
        max_lr=bounds["lr"],
        min_lr=bounds["min_lr"],
        lr_warmup_steps=BATCH,
        lr_decay_steps=SCHEDULE * BATCH,
        lr_decay_style="cosine",
        start_wd=start_wd,
        end_wd=end_wd,
        wd_incr_steps=SCHEDULE * BATCH,
        wd_incr_style="constant" if start_wd == end_wd else "linear",
        use_checkpoint_opt_param_scheduler=run.get("keep") == "checkpoint",
        override_opt_param_scheduler=run.get("keep") == "override",
    )
    return model, optimizer, scheduler


def overridden(run: Run, config: Any) -> Any:
    from megatron.core.optimizer import ParamKey, get_mup_config_overrides, get_standard_config_overrides

    if "mup" in run:
        own = get_mup_config_overrides(config=config, mup_width_mult=4.0, optimizer_type="adam")
    else:
        bounds = {"start_wd": run["group_weight_decay"], "end_wd": run["group_weight_decay"]}
        own = {ParamKey(attr="is_embedding_or_output_parameter"): bounds}
    return {**get_standard_config_overrides(config), **own}


def stage(config: Any, dtype: torch.dtype, native_fp32: bool, *, second: bool) -> Any:
    from megatron.core.transformer.module import MegatronModule

    class Stage(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            if second:
                self.a = torch.nn.LayerNorm(16)
                self.b = torch.nn.Linear(16, 7)
                return
            self.a = torch.nn.Linear(16, 16, bias=False)
            self.a.weight.is_embedding_or_output_parameter = True
            self.a.weight.is_embedding_parameter = True  # read by muP
            self.b = torch.nn.LayerNorm(16)
            self.c = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.b(self.a(x))
            return out if second else self.c(out)

        def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return super().sharded_state_dict(prefix=f"stage{int(second)}.")

    return Stage().to(dtype)


def sharded(
    options: argparse.Namespace, model: Any, optimizer: Any, scheduler: Any, *, is_loading: bool
) -> dict[str, Any]:
    name = options.format if options.optimizer == "distributed" else "default"
    state = mt.sharded_state_dict(name, model, optimizer, is_loading=is_loading)
    return {**state, "scheduler": scheduler.state_dict()}


def groups(model: Any, optimizer: Any) -> dict[str, Any]:
    """The settings of each group, by the names of its parameters."""
    inner = mt.inner(optimizer)
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters():
        names.setdefault(group_of(inner, p), []).append(name.removeprefix("module."))
    return {
        ",".join(members): {key: inner.optimizer.param_groups[index].get(key) for key in SHOWN}
        for index, members in names.items()
    }


def group_of(inner: Any, p: Any) -> int:
    if hasattr(inner, "model_param_group_index_map"):
        return int(inner.model_param_group_index_map[p][0])
    return next(index for index, group in enumerate(inner.float16_groups) if any(p is one for one in group))


if __name__ == "__main__":
    main()
