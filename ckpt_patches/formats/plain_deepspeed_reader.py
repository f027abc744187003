"""DeepSpeed's checkpoints without ZeRO: `mp_rank_*_model_states.pt` hold the weights and the optimizer's state.

With experts a file of each expert-parallel rank holds the optimizer's, and one of each expert its weights.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_patches.formats import (
    damages,
    optimizer_inventory,
    tensor_streams,
    zero,
    zero_facts,
    zero_inventory,
    zero_reader,
)
from ckpt_patches.formats.checkpoint import MASTER, MOMENTS, Checkpoint, Shard, first_beta, last_step
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.torch_file import TensorHeader, TorchFile, tensors_in
from ckpt_patches.formats.zero_inventory import (
    ABSENT_STATE,
    CONTRADICTION,
    ModelFacts,
    Problem,
    count_of,
    taken_steps,
)

INNER = "optimizer_state_dict"
SCALE = ("dynamic_loss_scale", "cur_scale", "cur_iter")
DYNAMIC = ("last_overflow_iter", "scale_factor", "scale_window")
MASTERS = ("fp32_groups_flat", "fp32_groups")  # of FP16_Optimizer and FP16_UnfusedOptimizer
EXPERT_RANK = re.compile(r"expp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
EXPERT_GROUP = re.compile(r"ep_size_(\d{1,6})")  # the name of a param group of experts, by the ranks that share them
EXPERT = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_\d{1,6}_model_states\.pt")


def is_plain(path: Path) -> bool:
    folder = zero.look(path)
    return bool(folder.models) and not folder.optimizer


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    found = Checkpoint(path, "deepspeed without zero")
    folder = zero.look(path)
    steps: list[Any] = []
    several = len(folder.models) > 1
    models = []
    of_experts = [tensor_streams.read(path / name, found) for name in folder.names if EXPERT.fullmatch(name)]
    experts = [weight for value in of_experts for _, weight in tensors_in(value)]
    for (_, model_rank), name in sorted(folder.models.items(), key=lambda item: item[1]):
        file = tensor_streams.read_file(path / name, found)
        if file is not None and isinstance(file.value, dict):
            models.append(ModelFacts(name, file.value))
            steps += _read_rank(found, file, f"mp_rank_{model_rank:02d}" if several else "", experts)
    if models and experts:
        _read_expert_ranks(found, folder, models[0], experts)
    count = max((c for model in models if (c := count_of(model.value.get("mp_world_size")))), default=1)
    numbers = {model_rank for _, model_rank in folder.models}
    found.findings += tensor_streams.findings(
        [
            *zero_inventory.other_step(path.name, models),
            *zero_inventory.absent_ranks(numbers, count, "the file of its model states", "model-parallel "),
        ]
    )
    for name in folder.names:
        if name.endswith(".pt") and name not in found.read:
            tensor_streams.read(path / name, found)
    found.step = last_step(steps)
    if found.step and all(taken_steps(model.value) == found.step - 1 for model in models):
        found.step -= 1  # the first step used zero gradients, to allocate the states
    return found


def _read_expert_ranks(found: Checkpoint, folder: zero.Folder, model: ModelFacts, experts: list[Any]) -> None:
    """The optimizer of each expert-parallel rank; and that there is a file of each of these, and of each expert."""
    files = {int(match[1]): match[0] for match in map(EXPERT_RANK.fullmatch, folder.names) if match}
    ranks = {rank: tensor_streams.read_file(folder.path / name, found) for rank, name in files.items()}
    read = {rank: file for rank, file in ranks.items() if file is not None and isinstance(file.value, dict)}
    of_all = [own for value in (model.value, *(file.value for file in read.values())) for own in _groups(value)]
    sizes = [match[1] for group in of_all if (match := EXPERT_GROUP.fullmatch(str(group.get("name"))))]
    expected = [("expert-parallel ", {*ranks}, max(map(int, sizes), default=1))]
    there = [(int(match[1]), int(match[2])) for match in map(EXPERT.fullmatch, folder.names) if match]
    counts = model.value.get("num_experts")
    for layer, count in enumerate(counts if isinstance(counts, list) else ()):
        expected.append((f"experts' layer {layer}, ", {own for of, own in there if of == layer}, count_of(count) or 1))
    for kind, numbers, count in expected:
        absent = zero_inventory.absent_ranks(numbers, count, "its file of experts", kind)
        found.findings += tensor_streams.findings([*absent])
    for rank, file in read.items():
        file = file._replace(value={**model.value, **file.value})
        _read_optimizers(found, file, f"{zero_reader.EXPERT_RANK}{rank}", experts, [])


def _groups(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The param groups of all optimizers in what a file holds."""
    for optimizer, _ in _optimizers(value.get("optimizer")):
        yield from tensor_streams.groups_of(optimizer)


def _read_rank(found: Checkpoint, file: TorchFile, label: str, experts: list[Any]) -> list[Any]:
    """One model-parallel rank; the steps that its file states."""
    path, value = file.path, file.value
    stage = stage_of(value.get("ds_config"))
    if stage:
        detail = f"a save of ZeRO stage {stage} has a file of optimizer states for each rank, and none is there"
        found.findings.append(Finding(damages.INCOMPLETE_SAVE, path.name, label, detail=detail))
        return []
    if isinstance(names := value.get("buffer_names"), list):
        found.buffers |= {f"module.{name}" for name in names}
    problems = [*zero_inventory.absent_keys(ModelFacts(path.name, value))]
    if experts and value.get("optimizer") is None:  # up to 0.19 the states are in the files of experts alone
        found.findings += tensor_streams.findings(problems, label)
        return []
    return _read_optimizers(found, file, label, experts, problems)


def _read_optimizers(
    found: Checkpoint, file: TorchFile, label: str, experts: list[Any], problems: list[Problem]
) -> list[Any]:
    """The optimizers of a file, which may have a chain of them; the steps that it states."""
    path, value = file.path, file.value
    optimizers = list(_optimizers(value.get("optimizer")))
    states = [state for optimizer, _ in optimizers for state in optimizer["state"].values()]
    taken = taken_steps(value)
    groups = list(_groups(value))
    keeps_states = not groups or any(map(_has_states, groups))
    if taken and keeps_states and not any(isinstance(state, dict) and state for state in states):
        detail = f"{taken} steps were taken, and no state of an optimizer is in the file"
        found.findings.append(Finding(damages.MISSING_STATE, path.name, label, detail=detail))
    problems += _of_the_wrapper(path, value)
    steps: list[Any] = []
    for optimizer, masters in optimizers:
        own = _optimizer(file, optimizer, masters, taken, experts)
        problems += optimizer_inventory.problems(own)
        found.beta1 = first_beta(list(own.groups))
        steps += [group["step"] for group in own.groups if "step" in group] + list(own.steps.values())
        for number, state in own.states.items():
            found.shards += _shard(found, path, label, number, state, masters)
    found.findings += tensor_streams.findings(problems, label)
    return steps


def _has_states(group: dict[str, Any]) -> bool:
    """Whether an optimizer with these settings keeps states; SGD without momentum keeps none."""
    return "momentum" not in group or bool(group["momentum"]) or "betas" in group


def _of_the_wrapper(path: Path, value: dict[str, Any]) -> Iterator[Problem]:
    """Missing entries that FP16_Optimizer and FP16_UnfusedOptimizer save with the inner state and need at a load."""
    wrapper = value.get("optimizer")
    if not isinstance(wrapper, dict) or INNER not in wrapper:
        return
    dynamic = DYNAMIC if wrapper.get("dynamic_loss_scale") else ()
    for key in (*SCALE, *dynamic):
        if key not in wrapper:
            yield Problem(CONTRADICTION, path.name, f"no {key} of the optimizer, without which no load begins")
    if not any(key in wrapper for key in MASTERS):
        yield Problem(ABSENT_STATE, path.name, f"no main parameters: none of {' and '.join(MASTERS)}")


def _optimizer(
    file: TorchFile, optimizer: dict[str, Any], masters: list[Any], taken: int, experts: list[Any]
) -> optimizer_inventory.Optimizer:
    path, module = file.path, file.value.get("module")
    groups, states = tensor_streams.groups_of(optimizer), tensor_streams.states_of(optimizer)
    steps = tensor_streams.steps_of(path, states)
    weights = [*module.values(), *experts] if isinstance(module, dict) else []
    checksums = zero_facts.distinctive_checksums(file)
    return optimizer_inventory.Optimizer(path.name, groups, states, steps, masters, weights, checksums, taken)


def stage_of(config: Any) -> int:
    """The ZeRO stage in the configuration that is saved with the model."""
    own = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = own.get("stage", 0) if isinstance(own, dict) else int(own is True)
    return stage if isinstance(stage, int) and 0 <= stage <= 3 else 0


def _optimizers(value: Any) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """The torch-style state dicts in a saved optimizer, each with the main parameters stored next to it."""
    if not isinstance(value, dict):
        return
    if isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list):
        yield value, []
        return
    held: list[Any] = next((value[key] for key in MASTERS if isinstance(value.get(key), list)), [])
    masters = [one for item in held for one in (item if isinstance(item, list) else [item])]  # can be nested by group
    for inner in value.values():
        yield from ((optimizer, own or masters) for optimizer, own in _optimizers(inner))


def _shard(
    found: Checkpoint, path: Path, label: str, number: Any, state: Mapping[str, Any], masters: list[Any]
) -> Iterator[Shard]:
    """The arrays of one parameter, or of a flattened group, if all have the same number of elements."""
    name = f"optimizer.{number!s:.50}"
    tensors = {role: state.get(role) for role in MOMENTS}
    if type(number) is int and 0 <= number < len(masters):
        tensors[MASTER] = masters[number]
    streams = tensor_streams.streams(found, path, name, tensors)
    sizes = {stream.numel for stream in streams.values()}
    if len(sizes) == 1:
        shape = next(t.shape for t in tensors.values() if isinstance(t, TensorHeader))
        yield Shard(name, label, shape, streams, has_rows=MASTER not in streams)
