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
of the schedule; or the error. Up to 0.8 there is no scheduler in megatron-core, and none here.
"""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import torch

from trainers import megatron_training as mt

BATCH = 4
STEPS, SCHEDULE = 3, 20
SHOWN = ("wd_mult", "max_lr", "min_lr", "start_wd", "end_wd", "eps", "lr", "weight_decay", "step")

Run = dict[str, Any]
Made = tuple[Any, Any, Any]  # model, optimizer, scheduler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="+", type=json.loads)
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--format", default="fully_reshardable")
    parser.add_argument("--optimizer", default="distributed")
    options = parser.parse_args()
    ranks = 2 if options.stages else 1
    mt.spawn(worker, ranks, options, pipeline_parallel=ranks)


def worker(rank: int, options: argparse.Namespace) -> None:
    mt.use_inner_optimizer("fused")
    found = [outcome(rank, options, run) for run in options.runs]
    everyone = mt.gathered(found)
    if rank == 0:
        print(json.dumps([list(of_ranks) for of_ranks in zip(*everyone, strict=True)]))


def outcome(rank: int, options: argparse.Namespace, run: Run) -> dict[str, Any]:
    said = Said()
    logging.getLogger("megatron.core.optimizer.optimizer").addHandler(said)
    try:
        do = {"save": save, "load": load, "train": train}[run["do"]]
        return {**do(rank, options, run), "warnings": said.lines}
    except Exception as error:  # the tests check it
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        logging.getLogger("megatron.core.optimizer.optimizer").removeHandler(said)


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(rank: int, options: argparse.Namespace, run: Run) -> dict[str, Any]:
    made = build(rank, options, run)
    tell_all_groups(run, *made[1:])
    take_steps(*made)
    return groups_now_and_at_the_end(*made)


def save(rank: int, options: argparse.Namespace, run: Run) -> dict[str, Any]:
    made = build(rank, options, run)
    take_steps(*made)
    write(options, run["name"], made)
    return groups_now_and_at_the_end(*made)


def write(options: argparse.Namespace, name: str, made: Made) -> None:
    state = sharded(options, made, is_loading=False)
    mt.write(state, options.folder / name, mt.sharded_backend(options.format))


def load(rank: int, options: argparse.Namespace, run: Run) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    made = build(rank, options, run)
    wanted = sharded(options, made, is_loading=True)
    loaded = dist_checkpointing.load(wanted, str(options.folder / run["name"]))
    _, optimizer, scheduler = made
    parts = [(optimizer, loaded["optimizer"]), *([(scheduler, loaded["scheduler"])] if scheduler else [])]
    for part, state in reversed(parts) if run.get("scheduler_first") else parts:
        part.load_state_dict(state)
    tell_all_groups(run, optimizer, scheduler)
    if "resave" in run:
        write(options, run["resave"], made)
    return groups_now_and_at_the_end(*made)


def build(rank: int, options: argparse.Namespace, run: Run) -> Made:
    lr = run.get("lr", 1e-3)
    settings = {
        "lr": lr,
        "min_lr": run.get("min_lr", lr / 10),
        "use_distributed_optimizer": options.optimizer == "distributed",
    }
    if "decoupled_lr" in run:
        settings.update(decoupled_lr=run["decoupled_lr"], decoupled_min_lr=run["decoupled_lr"] / 10)
    second = options.stages and rank == 1

    def network(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
        return stage(config, dtype, second=second)

    overrides = mup_overrides if run.get("mup") else None
    if "group_weight_decay" in run:

        def overrides(config: Any) -> Any:
            return weight_decay_overrides(config, run["group_weight_decay"])

    model, optimizer = mt.build(make_model=network, settings=settings, overrides=overrides)
    return model, optimizer, schedule(optimizer, settings, run)


def mup_overrides(config: Any) -> Any:
    from megatron.core.optimizer import get_mup_config_overrides, get_standard_config_overrides

    of_mup = get_mup_config_overrides(config=config, mup_width_mult=4.0, optimizer_type="adam")
    return {**get_standard_config_overrides(config), **of_mup}


def weight_decay_overrides(config: Any, weight_decay: float) -> Any:
    from megatron.core.optimizer import ParamKey, get_standard_config_overrides

    key = ParamKey(attr="is_embedding_or_output_parameter")
    return {**get_standard_config_overrides(config), key: {"start_wd": weight_decay, "end_wd": weight_decay}}


def tell_all_groups(run: Run, optimizer: Any, scheduler: Any) -> None:
    if "bounds_of_all" in run:
        for group in optimizer.param_groups:
            group["max_lr"] = group["min_lr"] = run["bounds_of_all"]
        scheduler.step(increment=0)


def stage(config: Any, dtype: torch.dtype, *, second: bool) -> Any:
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


def schedule(optimizer: Any, settings: dict[str, Any], run: Run) -> Any:
    try:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    except ImportError:  # up to 0.8 it is in megatron.training
        return None
    start_wd, end_wd = run.get("weight_decay", (0.1, 0.1))
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings["lr"],
        min_lr=settings["min_lr"],
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


def take_steps(model: Any, optimizer: Any, scheduler: Any) -> None:
    for iteration in range(STEPS):
        mt.step(model, optimizer, iteration)
        if scheduler:
            scheduler.step(increment=BATCH)


def sharded(options: argparse.Namespace, made: Made, *, is_loading: bool) -> dict[str, Any]:
    model, optimizer, scheduler = made
    if options.optimizer == "distributed":
        state = mt.sharded_state_dict(options.format, model, optimizer, is_loading=is_loading)
    else:
        of_model = model.sharded_state_dict()
        state = {"model": of_model, "optimizer": optimizer.sharded_state_dict(of_model, is_loading=is_loading)}
    return {**state, **({"scheduler": scheduler.state_dict()} if scheduler else {})}


def groups_now_and_at_the_end(model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    now = groups(model, optimizer)
    if scheduler:
        scheduler.step(increment=2 * SCHEDULE * BATCH)
    return {"now": now, "end": groups(model, optimizer)}


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
