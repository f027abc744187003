"""Runs of the real megatron-core that are given as plain data (options.py): steps, saves and loads in each format."""

import argparse
import inspect
from functools import partial
from pathlib import Path
from typing import Any

from trainers import megatron_training as mt  # isort: skip  the GPU stub must load first
import torch
import torch.distributed as dist

from trainers import megatron_lm
from trainers.gpt_training import LAYERS, SEQUENCES, Options, build, scheduler, step
from trainers.megatron_state import Run
from trainers.ranks import call_after

LAYOUT = ("tp", "pp", "ep", "cp")


def started(options: Options, on: Options, seed: int, **changed: Any) -> Run:
    chosen = {**options, **{name: on[name] for name in LAYOUT}, **changed}
    model, optimizer = build(chosen, seed)
    return Run(model, optimizer, scheduler(optimizer, chosen) if options["scheduler"] else None)


def train(run: Run, first: int, steps: int) -> list[float]:
    """Train, and return the mean loss of each step."""
    losses = []
    for number in range(first, first + steps):
        losses.append(step(run.model, run.optimizer, number))
        if run.scheduler:
            run.scheduler.step(SEQUENCES)
    return losses


def sharded(run: Run, options: Options, *, is_loading: bool) -> dict[str, Any]:
    name = "default" if options["optimizer"] == "whole" else options["format"]
    bare = name != "fully_sharded_bucket_space"  # else two optimizers' objects have the same name
    return mt.sharded_state_dict(
        name, run.model.module, run.optimizer, is_loading=is_loading, chained_optim_avoid_prefix=bare
    )


def of_run(run: Run, options: Options, iteration: int) -> Options:
    """Return the saved values that all ranks share."""
    args = argparse.Namespace(
        iteration=iteration,
        world_size=dist.get_world_size(),
        tensor_model_parallel_size=options["tp"],
        pipeline_model_parallel_size=options["pp"],
        expert_model_parallel_size=max(1, options["ep"]),
        context_parallel_size=options["cp"],
        data_parallel_size=dist.get_world_size() // options["tp"] // options["pp"] // options["cp"],
        use_distributed_optimizer=options["optimizer"] == "distributed",
    )
    rest: Options = {"iteration": iteration, "checkpoint_version": 3.0, "args": args}
    return {**rest, "opt_param_scheduler": run.scheduler.state_dict()} if run.scheduler else rest


def rank_folder(folder: Path) -> Path:
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03}"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03}"
    return folder / name


def save(run: Run, options: Options, iteration: int, folder: Path, *, non_persistent: bool = False) -> Any:
    """Save, and return the request of an asynchronous save, or None. Only Megatron-LM has non-persistent saves."""
    from megatron.core import dist_checkpointing, parallel_state

    if options["trainer"]:
        more = {"non_persistent_ckpt": True} if non_persistent else {}
        save_by_trainer(run, options, iteration, folder, **more)
        return None
    if options["format"] == "torch":
        own = rank_folder(folder)
        own.mkdir(parents=True, exist_ok=True)
        if options["optimizer"] == "distributed":
            run.optimizer.save_parameter_state(str(own / "distrib_optim.pt"))
        content = {"model": run.model.module.state_dict_for_save_checkpoint(), "optimizer": run.optimizer.state_dict()}
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
            torch.save({**content, **of_run(run, options, iteration)}, own / "model_optim_rng.pt")
        dist.barrier()
        return None
    mt.make_folder(folder)
    state = {**sharded(run, options, is_loading=False), **of_run(run, options, iteration)}
    how: Options = {"async_sharded_save": True} if options["asynchronous"] else {}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        how["async_strategy"] = "mcore"  # the other strategy needs a separate package
    asked = dist_checkpointing.save(state, str(folder), (options["backend"], 1), **how)
    dist.barrier()
    return asked


def save_by_trainer(run: Run, options: Options, iteration: int, folder: Path, **more: Any) -> None:
    """Save with Megatron-LM's own function into the folder of the run, where a link to the checkpoint stays."""
    checkpointing, runs = megatron_lm.import_training(), folder.with_name("run")
    args = arguments(options, runs)
    megatron_lm.save(checkpointing, run.model, args, run.optimizer, run.scheduler, iteration, **more)
    dist.barrier()
    if dist.get_rank() == 0:
        (saved,) = (own for own in runs.rglob(f"iter_{iteration:07}") if not own.is_symlink())
        saved.rename(folder)
        saved.symlink_to(folder)
    dist.barrier()


def load_by_trainer(run: Run, options: Options, folder: Path, restore: str, *, ckpt_step: bool) -> None:
    """Load from the folder of the run: the checkpoint that `--ckpt-step` names, or the one that Megatron-LM chooses."""
    checkpointing, runs = megatron_lm.import_training(), folder.with_name("run")
    (link,) = (own for own in runs.rglob("iter_*") if own.is_symlink() and own.samefile(folder))
    iteration, tracker = int(link.name.removeprefix("iter_")), link.with_name("latest_checkpointed_iteration.txt")
    dist.barrier()
    if dist.get_rank() == 0 and not ckpt_step:
        tracker.write_text(str(iteration))
    dist.barrier()
    args = arguments(options, runs, finetune=restore == "weights", ckpt_step=iteration if ckpt_step else None)
    megatron_lm.load(checkpointing, run.model, args, run.optimizer, run.scheduler)


def arguments(options: Options, runs: Path, **more: Any) -> Any:
    """Return the arguments of a Megatron-LM script on these ranks."""
    from megatron.core import parallel_state as state

    tp, pp = state.get_tensor_model_parallel_world_size(), state.get_pipeline_model_parallel_world_size()
    return megatron_lm.arguments(
        runs,
        tp,
        state.get_expert_model_parallel_world_size(),
        pipeline_model_parallel_size=pp,
        context_parallel_size=state.get_context_parallel_world_size(),
        data_parallel_size=state.get_data_parallel_world_size(),
        num_distributed_optimizer_instances=options["instances"],
        use_distributed_optimizer=options["optimizer"] == "distributed",
        dist_ckpt_optim_fully_reshardable=options["format"] == "fully_reshardable",
        ckpt_format="torch" if options["format"] == "torch" else "torch_dist",
        use_dist_ckpt=options["format"] != "torch",
        ckpt_fully_parallel_load=options["parallel_load"],
        num_layers=LAYERS,
        non_persistent_ckpt_type="global" if options["non_persistent"] else None,
        **{name: options["dtype"] == name for name in ("bf16", "fp16")},
        **more,
    )


def finished_after(asked: Any, sign: Path, persistent: bool) -> Any:
    """Start a forked or persistent process that waits for a sign and then writes. Return a function to finish it."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    calls = AsyncCallsQueue(persistent=persistent)
    if asked.async_fn is not None:  # this rank writes data
        asked = asked._replace(async_fn=partial(call_after, sign, asked.async_fn))
    calls.schedule_async_request(asked)

    def finish() -> None:
        if dist.get_rank() == 0:
            sign.touch()
        calls.maybe_finalize_async_calls(blocking=True)
        calls.close()
        dist.barrier()

    return finish


def load_into(run: Run, options: Options, folder: Path, restore: str, *, ckpt_step: bool = False) -> None:
    """Load in the same order as Megatron-LM."""
    from megatron.core import dist_checkpointing

    if options["trainer"]:
        load_by_trainer(run, options, folder, restore, ckpt_step=ckpt_step)
        return
    if options["format"] == "torch":
        loaded = torch.load(rank_folder(folder) / "model_optim_rng.pt", weights_only=False)
    else:
        wanted = {"model": run.model.module.sharded_state_dict()}
        if restore != "weights":
            wanted = sharded(run, options, is_loading=True)
        loaded = dist_checkpointing.load(wanted, str(folder))
    (run.model if options["fsdp2"] else run.model.module).load_state_dict(loaded["model"])
    if restore == "weights":
        run.optimizer.reload_model_params()
        return
    run.optimizer.load_state_dict(loaded["optimizer"])
    if options["format"] == "torch" and options["optimizer"] == "distributed":
        run.optimizer.load_parameter_state(str(rank_folder(folder) / "distrib_optim.pt"))
    if run.scheduler and restore == "everything":
        run.scheduler.load_state_dict(loaded["opt_param_scheduler"])
