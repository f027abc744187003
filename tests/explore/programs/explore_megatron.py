"""Train and save one configuration of the explorer with the real megatron-core on CPU ranks, or load and judge it.

    explore_megatron.py train CASE.json FOLDER     writes two saves, FOLDER/first and FOLDER/last, and FOLDER/truth.pt
    explore_megatron.py load CASE.json FOLDER      prints the result of the load as JSON

The truth is the content of the optimizers' memory. This program reads it without any sharded state dict.
"""

import argparse
import copy
import inspect
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from trainers import megatron_training as mt  # isort: skip  the GPU stub must load first
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import explored
from explored import FIRST, LAST, Part, SaveFailed, State, is_nothing
from gpt_training import LAYERS, SEQUENCES, Options, build, initialize, scheduler, step
from trainers import megatron_lm
from trainers.ranks import call_after

MORE = 2  # the number of steps after the load
LAYOUT = ("tp", "pp", "ep", "cp")
ENDS = ("saved", "end")
NO_SETTINGS = ("params", "step", "offload_fraction")  # keys of a param group; the last belongs to the optimizer


class Run(NamedTuple):
    model: Any  # under Megatron's DDP
    optimizer: Any
    scheduler: Any  # or None


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


# The truth


def place(model: Any, name: str, parameter: torch.Tensor) -> tuple[str, torch.Tensor, int]:
    """Return a local parameter's name in the full model, the indices of its elements there, and its full size."""
    from megatron.core import parallel_state

    network = model.module
    if name == "output_layer.weight" and network.share_embeddings_and_output_weights:
        name = "embedding.word_embeddings.weight"
    if found := re.match(r"(decoder\.layers\.)(\d+)(.*)", name):
        number = network.decoder.layers[int(found[2])].layer_number - 1
        name = f"{found[1]}{number}{found[3]}"
    if found := re.match(r"(.*\.local_experts\.)(\d+)(.*)", name):
        config, rank = network.config, parallel_state.get_expert_model_parallel_rank()
        own = config.num_moe_experts // config.expert_model_parallel_size
        name = f"{found[1]}{rank * own + int(found[2])}{found[3]}"
    if isinstance(parameter, DTensor):  # a part of the rows
        size, rank = dist.get_world_size(), dist.get_rank()
        index = torch.arange(parameter.numel()).view(parameter.shape).chunk(size)
        return name, index[rank].flatten() if rank < len(index) else index[0][:0].flatten(), parameter.numel()
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    if not getattr(parameter, "tensor_model_parallel", False) or size == 1:
        return name, torch.arange(parameter.numel()), parameter.numel()
    axis = parameter.partition_dim
    parts = 2 if ".linear_fc1." in name and network.config.gated_linear_unit else 1  # W and V
    shape = list(parameter.shape)
    shape[axis : axis + 1] = [parts, size * shape[axis] // parts]
    index = torch.arange(parameter.numel() * size).view(shape)
    return name, index.chunk(size, axis + 1)[rank].flatten(), parameter.numel() * size


def part_here(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that FSDP2 has sharded, or the tensor itself."""
    return value.to_local() if isinstance(value, DTensor) else value


def places(run: Run) -> dict[int, tuple[str, torch.Tensor, int]]:
    """Return the place of each parameter by its `id`."""
    return {id(own): place(run.model, name, own) for name, own in run.model.module.named_parameters()}


class Held(NamedTuple):
    """The part of a model parameter that an optimizer holds."""

    parameter: Any
    begin: int  # the parameter's first element in the states
    states: dict[str, torch.Tensor]  # flat
    settings: Options  # from its param group
    step: Any


def leaves(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [leaf for one in chained for leaf in leaves(one)]


def held(optimizer: Any) -> Iterator[Held]:
    for leaf in leaves(optimizer):
        if getattr(leaf, "optimizer", None) is None or getattr(leaf, "is_stub_optimizer", False):
            continue
        groups = [(one, group) for group in leaf.optimizer.param_groups for one in group["params"]]
        group_of = {id(one): group for one, group in groups}
        for parameter, begin, stepped in _pairs(leaf):
            group = group_of[id(stepped)]
            main, state = _inner(leaf.optimizer, stepped)
            own = {"fp32": state.get("master_param", main.float()), **state}
            if main is not stepped and stepped.dtype == torch.float32:
                own["copy"] = stepped  # the copy of a main parameter on the CPU
            states = {
                name: part_here(value.detach()).view(-1)
                for name, value in own.items()
                if isinstance(value, torch.Tensor) and value.dim() and name != "master_param"
            }
            settings = {name: value for name, value in group.items() if name not in NO_SETTINGS}
            yield Held(parameter, begin, states, settings, state.get("step"))


def _pairs(leaf: Any) -> Iterator[tuple[Any, int, Any]]:
    """Yield each model parameter, an offset, and the tensor that the optimizer steps for the elements from there on."""

    def pairs(*groups: Any) -> Iterator[tuple[Any, ...]]:
        return (pair for of_group in zip(*groups, strict=True) for pair in zip(*of_group, strict=True))

    if hasattr(leaf, "model_float16_groups"):  # distributed: this rank has ranges of some parameters
        mains = leaf.shard_fp32_from_float16_groups  # all None in the precision-aware optimizer
        found = [
            *((own, shard if main is None else main) for own, main, shard in
              pairs(leaf.model_float16_groups, mains, leaf.shard_float16_groups)),
            *pairs(leaf.model_fp32_groups, leaf.shard_fp32_groups),
        ]  # fmt: skip
        yield from ((own, leaf._get_model_param_range_map(own)["param"].start, stepped) for own, stepped in found)
    elif hasattr(leaf, "fp32_from_float16_groups"):
        of_16_bits = pairs(leaf.float16_groups, leaf.fp32_from_float16_groups)
        alone = pairs(leaf.fp32_from_fp32_groups, leaf.fp32_from_fp32_groups)
        yield from ((own, 0, stepped) for own, stepped in [*of_16_bits, *alone])
    else:
        yield from ((own, 0, own) for group in leaf.optimizer.param_groups for own in group["params"])


def _inner(optimizer: Any, stepped: Any) -> tuple[Any, State]:
    """Return the tensor that the inner optimizer steps, with its state and step. CPU offload has several optimizers."""
    if not hasattr(optimizer, "sub_optimizers"):
        (group,) = (group for group in optimizer.param_groups if any(stepped is one for one in group["params"]))
        return stepped, {**optimizer.state.get(stepped, {}), **_counted_by_group(optimizer, group)}
    main = optimizer.param_to_inner_param[stepped]
    for one in optimizer.sub_optimizers:
        for group in one.param_groups:
            if any(main is parameter for parameter in group["params"]):
                return main, {**one.state.get(main, {}), **_counted_by_group(one, group)}
    raise AssertionError("an optimizer of CPU offload steps none of its parameters")


def _counted_by_group(optimizer: Any, group: Options) -> Options:
    """Return the group's step. Apex and Transformer Engine count steps per group, and torch counts per parameter."""
    return {"step": group["step"]} if "step" in group and "torch.optim" not in type(optimizer).__module__ else {}


def parts(run: Run) -> Iterator[Part]:
    """Yield the parts of weights, main parameters and optimizer states."""
    of_parameters = places(run)
    for parameter in run.model.module.parameters():
        named, where, numel = of_parameters[id(parameter)]
        yield Part(f"{named}.weight", part_here(parameter.data).view(-1), where, numel)
    for one in held(run.optimizer):
        named, where, numel = of_parameters[id(one.parameter)]
        for name, local in one.states.items():
            yield Part(f"{named}.{name}", local, where[one.begin : one.begin + local.numel()], numel)


def live(run: Run) -> State:
    """Return everything that the next steps depend on. It is the same on each rank if the state is correct."""
    names = {own: name for own, (name, *_) in places(run).items()}
    settings: State = {}
    for one in held(run.optimizer):
        name = names[id(one.parameter)]
        settings |= {f"setting {name}.{key}": copy.deepcopy(value) for key, value in one.settings.items()}
        settings[f"step {name}"] = None if one.step is None else float(one.step)
    found: State = {}
    for of_rank in [*explored.gathered(settings), settings]:
        found |= of_rank
    for scaler in _scalers(run)[:1]:  # all scalers of a chain are equal
        found |= {f"scaler.{name}": value for name, value in _numbers(scaler).items()}
    if run.scheduler:
        found |= {f"scheduler.{name}": value for name, value in _numbers(run.scheduler).items()}
    return explored.whole(explored.of_ranks(parts(run))) | {
        name: value for name, value in found.items() if value is not None
    }


def complete(run: Run, options: Options) -> State:
    """Return `live`, and each rank's RNG states as checksums if megatron.training saves them."""
    if not options["trainer"]:
        return live(run)
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {"torch": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    own = {f"rng of rank {dist.get_rank()} {name}": zlib.crc32(state.numpy()) for name, state in states.items()}
    return live(run) | {name: value for of_rank in explored.gathered(own) for name, value in of_rank.items()}


def _scalers(run: Run) -> list[Any]:
    return [leaf.grad_scaler for leaf in leaves(run.optimizer) if getattr(leaf, "grad_scaler", None)]


def _numbers(one: Any) -> Options:
    found = {name: value for name, value in vars(one).items() if name != "bounds_may_be_loaded"}  # a fix sets it
    found = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in found.items()}
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float))}


def put(run: Run, state: State) -> None:
    """Set a run's memory to a state. The run then continues as it must continue after a correct load."""
    if any(kind_of(name) == "state" for name in state):
        train(run, 90, 2)  # a fresh optimizer has no states yet
    explored.put((part for part in parts(run) if part.name in state), state)
    names = {own: name for own, (name, *_) in places(run).items()}
    for leaf in leaves(run.optimizer):
        steps = [state.get(f"step {names[id(one.parameter)]}") for one in held(leaf)]
        _set_step(leaf, max(filter(None, steps), default=0))
    _set_settings(run, names, state)
    for what, owners in (("scaler", _scalers(run)), ("scheduler", [run.scheduler] if run.scheduler else [])):
        for owner in owners:
            for name in _numbers(owner):
                own, value = getattr(owner, name), state[f"{what}.{name}"]
                setattr(owner, name, torch.full_like(own, value) if isinstance(own, torch.Tensor) else value)


def _set_step(leaf: Any, number: float) -> None:
    """Set the step in every place where the optimizer counts it."""
    if getattr(leaf, "optimizer", None) is None:
        return
    optimizers = [leaf.optimizer, *getattr(leaf.optimizer, "sub_optimizers", ())]
    for own in [own for optimizer in optimizers for own in optimizer.state.values() if "step" in own]:
        own["step"] = torch.full_like(own["step"], number)
    for group in [group for optimizer in optimizers for group in optimizer.param_groups if "step" in group]:
        group["step"] = int(number)


def _set_settings(run: Run, names: dict[int, str], state: State) -> None:
    for leaf in leaves(run.optimizer):
        if getattr(leaf, "optimizer", None) is None:
            continue
        for parameter, _, stepped in _pairs(leaf):
            for group in leaf.optimizer.param_groups:
                if any(one is stepped for one in group["params"]):
                    prefix = f"setting {names[id(parameter)]}."
                    group.update({key: state[prefix + key] for key in group if prefix + key in state})


def kind_of(name: str) -> str:
    """Return the kind of an entry, such as weight, fp32 (a main parameter), copy, state, setting or rng."""
    first = re.split(r"[ .]", name)[0]
    if first in ("setting", "step", "scaler", "scheduler", "rng"):
        return first
    last = name.rpartition(".")[2]
    return last if last in ("weight", "fp32", "copy") else "state"


# Saves and loads


def sharded(run: Run, options: Options, *, is_loading: bool) -> dict[str, Any]:
    of_model = run.model.module.sharded_state_dict()
    name = options["format"]
    chosen: Options = {"sharding_type": name}
    if options["optimizer"] == "whole":
        chosen = {}
    elif "metadata" in inspect.signature(leaves(run.optimizer)[0].sharded_state_dict).parameters:
        bare = name != "fully_sharded_bucket_space"  # else two optimizers' objects have the same name
        chosen = {"metadata": {"distrib_optim_sharding_type": name, "chained_optim_avoid_prefix": bare}}
    of_optimizer = run.optimizer.sharded_state_dict(of_model, is_loading=is_loading, **chosen)
    return {"model": of_model, "optimizer": of_optimizer}


def of_run(run: Run, options: Options, iteration: int) -> Options:
    """Return the saved values that all ranks share."""
    args = argparse.Namespace(
        iteration=iteration,
        world_size=dist.get_world_size(),
        tensor_model_parallel_size=options["tp"],
        pipeline_model_parallel_size=options["pp"],
        expert_model_parallel_size=max(1, options["ep"]),
        context_parallel_size=options["cp"],
        data_parallel_size=dist.get_world_size() // options["tp"] // options["pp"],
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


def save(run: Run, options: Options, iteration: int, folder: Path) -> Any:
    """Save, and return the request of an asynchronous save, or None."""
    from megatron.core import dist_checkpointing

    if options["trainer"]:
        save_by_trainer(run, options, iteration, folder)
        return None
    if options["format"] == "torch":
        own = rank_folder(folder)
        own.mkdir(parents=True, exist_ok=True)
        if options["optimizer"] == "distributed":
            run.optimizer.save_parameter_state(str(own / "distrib_optim.pt"))
        content = {"model": run.model.module.state_dict_for_save_checkpoint(), "optimizer": run.optimizer.state_dict()}
        if _is_first_data_parallel():
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


def save_by_trainer(run: Run, options: Options, iteration: int, folder: Path) -> None:
    """Save with Megatron-LM's own function into a folder of runs."""
    checkpointing, runs = megatron_lm.import_training(), folder.with_suffix(".run")
    args = arguments(options, runs)
    checkpointing.get_args = lambda: args
    checkpointing.save_checkpoint(iteration, [run.model], run.optimizer, run.scheduler, 0)
    dist.barrier()
    if dist.get_rank() == 0:
        (runs / f"iter_{iteration:07}").rename(folder)
    dist.barrier()


def load_by_trainer(run: Run, options: Options, folder: Path, restore: str) -> None:
    """Load from a folder of runs that contains a link to the checkpoint."""
    checkpointing, runs = megatron_lm.import_training(), folder.with_suffix(".run")
    if dist.get_rank() == 0:
        last = int((runs / "latest_checkpointed_iteration.txt").read_text())
        (runs / f"iter_{last:07}").unlink(missing_ok=True)
        (runs / f"iter_{last:07}").symlink_to(folder)
    dist.barrier()
    args = arguments(options, runs, finetune=restore == "weights")
    checkpointing.get_args = lambda: args
    checkpointing.update_num_microbatches = lambda **_: None  # its schedule is not set up here
    checkpointing.load_checkpoint([run.model], run.optimizer, run.scheduler)


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
        **{name: options["dtype"] == name for name in ("bf16", "fp16")},
        **more,
    )


def _is_first_data_parallel() -> bool:
    from megatron.core import parallel_state

    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


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


def load_into(run: Run, options: Options, folder: Path, restore: str) -> None:
    """Load in the same order as Megatron-LM."""
    from megatron.core import dist_checkpointing

    if options["trainer"]:
        load_by_trainer(run, options, folder, restore)
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


def begin(rank: int, case: Options, folder: Path) -> Options:
    options = case["run"]
    run = started(options, options, seed=1)
    at, truth, ends = options["steps"], {}, []
    train(run, 0, at)
    for tag, more in ((FIRST, 1 if case["two_saves"] else MORE), (LAST, MORE)):
        saved = complete(run, options)
        try:
            with mock.patch("torch.save", explored.saver(case, tag, rank)):
                asked = save(run, options, at, folder / tag)
            if asked is not None:
                ends.append(finished_after(asked, folder / f"{tag}.go", options["persistent"]))
        except Exception as error:
            raise SaveFailed(f"{type(error).__name__}: {error}") from error
        truth[tag] = {"saved": saved, "losses": train(run, at, more), "at": at, "end": complete(run, options)}
        for end in ends:
            end()
        ends.clear()
        at += more
        if not case["two_saves"]:
            break
    if rank == 0:
        torch.save(truth, folder / "truth.pt")
    return {"optimizer": type(leaves(run.optimizer)[0]).__name__}


def load(rank: int, case: Options, folder: Path) -> Options:
    """Load, and return the differences from the truth on any rank and in the losses and states of the next steps."""
    wanted, options = case["load"], dict(case["run"])
    if wanted["format"] != "same":
        options["format"] = wanted["format"]
    truths = torch.load(folder / "truth.pt", weights_only=False)
    truth = truths[wanted["tag"]]
    now: Callable[[Run], State] = partial(complete, options=options) if goes_on(case) else live
    if not goes_on(case):  # another layout has other RNG states
        truth |= {end: {key: value for key, value in truth[end].items() if kind_of(key) != "rng"} for end in ENDS}
    changed: Options = {"override": True} if wanted["override"] else {}
    changed |= {"offload": wanted["offload"]} if wanted["offload"] != "same" else {}
    run = started(options, wanted, seed=2, **changed)
    if wanted["trained"]:
        train(run, 50, 1)
    for number in range(wanted["times"]):
        if number:  # a rollback
            train(run, 60, 1)
        before = now(run)
        with explored.proof() as proof:
            load_into(run, options, folder / wanted["tag"], wanted["restore"])
    if wanted.get("spoil"):
        explored.spoil(parts(run), wanted["spoil"])
    found, expected = now(run), promised(truth, before, started(options, wanted, seed=3, **changed), wanted)
    of_another = bool(wanted["saved_by"])
    different = explored.on_any_rank(_different(found, expected, of_another))
    if wanted["repaired"]:
        train(run, 70, 1)
        return {"different": explored.unrepaired(different, found, truths, case), "proof": proof}
    if different:
        return {"different": different, "proof": proof}
    losses, end = truth["losses"], truth["end"]
    if not goes_on(case):
        reference = started(options, wanted, seed=3, **changed)
        put(reference, expected)
        losses = train(reference, truth["at"], len(losses))
        end = live(reference)
    differ = ["next loss"] * (train(run, truth["at"], len(losses)) != losses)
    later = explored.on_any_rank(_different(now(run), end, of_another))
    return {"different": differ + [f"later {name}" for name in later], "proof": proof}


def goes_on(case: Options) -> bool:
    """Return whether the next steps equal those of the saved run. Another layout changes the order of sums."""
    wanted, run = case["load"], {**case["run"], "ranks": case["ranks"]}
    same = all(wanted[name] == run[name] for name in (*LAYOUT, "ranks"))
    as_it_was = not wanted["override"] and wanted["offload"] == "same" and not wanted["saved_by"]
    return same and as_it_was and wanted["restore"] == "everything"


def promised(truth: State, before: State, fresh: Run, wanted: Options) -> State:
    """Return the expected state after a load."""
    saved: State = truth["saved"]
    if wanted["restore"] == "weights":  # main parameters equal the loaded weights
        mains = {key: value for key, value in before.items() if kind_of(key) in ("fp32", "copy")}
        expected = {
            key: torch.where(value.isnan(), value, saved[f"{key.rpartition('.')[0]}.weight"].to(value.dtype))
            for key, value in mains.items()  # a copy exists only for parameters on a rank's CPU
        }
        expected |= {key: value for key, value in saved.items() if kind_of(key) == "weight"}
        return before | expected
    expected = {key: value for key, value in saved.items() if kind_of(key) != "copy"}
    copies = {key: value for key, value in before.items() if kind_of(key) == "copy"}  # may cover another part
    expected |= {
        key: torch.where(own.isnan(), own, saved[key.removesuffix("copy") + "fp32"]) for key, own in copies.items()
    }
    if wanted["restore"] == "without scheduler":
        expected |= {key: value for key, value in before.items() if kind_of(key) == "scheduler"}
    if wanted["override"]:
        fresh.scheduler.step(int(saved["scheduler.num_steps"]))
        own = {key: value for key, value in live(fresh).items() if kind_of(key) in ("setting", "scheduler")}
        expected |= {key: value for key, value in own.items() if not key.endswith(".is_decoupled_lr")}
    return expected


def _different(found: State, expected: State, of_another: bool) -> list[str]:
    """Return the entries that differ. A missing state equals zeros. Other releases may lack some settings."""
    missing = [key for key in {*found, *expected} if found.get(key) is None or expected.get(key) is None]
    nothing = {key for key in missing if is_nothing(found.get(key), expected.get(key))}
    nothing |= {key for key in missing if of_another and kind_of(key) == "setting"}
    return [key for key in explored.different(found, expected) if key not in nothing]


def join(layout: Options, rank: int, ranks: int, port: int) -> None:
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in own.items()})
    mt.fork_keeper_of_results()
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    initialize(layout)


def main() -> None:
    args = explored.arguments("train", "load").parse_args()
    case = json.loads(args.case.read_text())
    layout = {**case["run"], **(case["load"] if args.command == "load" else {"ranks": case["ranks"]})}
    args.folder.mkdir(exist_ok=True)
    mt.import_packages()
    if case["run"]["trainer"]:
        megatron_lm.import_training()
    do = {"train": begin, "load": load}[args.command]
    ranks = explored.ranks_of(args, layout["ranks"])
    print("\n" + json.dumps(explored.on_ranks(lambda rank: do(rank, case, args.folder), ranks, partial(join, layout))))


if __name__ == "__main__":
    main()
