"""DeepSpeed's checkpoints without ZeRO: `mp_rank_*_model_states.pt` hold the weights and the optimizer's state.

With experts a file of each expert-parallel rank holds the optimizer's, and one of each expert its weights. A pipeline
has a file of weights for each layer, and no list of its layers.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_patches.formats import damages, tensor_streams, torch_optimizers, zero, zero_inventory, zero_pipeline
from ckpt_patches.formats.checkpoint import Checkpoint, first_beta, last_step
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.tensor_streams import groups_of, states_of
from ckpt_patches.formats.torch_file import TorchFile, tensors_in
from ckpt_patches.formats.zero_inventory import ModelFacts, count_of, taken_steps

INNER = "optimizer_state_dict"
SCALE = ("dynamic_loss_scale", "cur_scale", "cur_iter")
DYNAMIC = ("last_overflow_iter", "scale_factor", "scale_window")
OF_A_RANK = re.compile(r"expp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
EXPERT_GROUP = re.compile(r"ep_size_(\d{1,6})")  # the name of a param group of experts, by the ranks that share them
EXPERT = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_\d{1,6}_model_states\.pt")


def is_without_zero(path: Path) -> bool:
    folder = zero.look(path)
    return bool(folder.models) and not folder.optimizer


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    found, folder = Checkpoint(path, "deepspeed without zero"), zero.look(path)
    read = {name: tensor_streams.read_file(path / name, found) for name in folder.names if name.endswith(".pt")}
    files = {name: file for name, file in read.items() if file is not None and isinstance(file.value, dict)}
    experts = [one for name in files if EXPERT.fullmatch(name) for _, one in tensors_in(files[name].value)]
    named = {model_rank: name for (_, model_rank), name in folder.models.items()}
    models = {rank: files[name] for rank, name in sorted(named.items()) if name in files}
    facts = [ModelFacts(file.path.name, file.value) for file in models.values()]
    steps: list[Any] = []
    for (rank, file), model in zip(models.items(), facts, strict=True):
        label = f"mp_rank_{rank:02d}" if len(named) > 1 else ""
        if stage := stage_of(file.value.get("ds_config")):
            detail = f"a save of ZeRO stage {stage} has a file of optimizer states for each rank, and none is there"
            found.add(damages.INCOMPLETE_SAVE, file.path.name, detail, shard=label)
            continue
        if isinstance(names := file.value.get("buffer_names"), list):
            found.buffers |= {f"module.{own}" for own in names}
        found.findings += damages.labelled(zero_inventory.absent_keys(model), label)
        if not experts or file.value.get("optimizer") is not None:  # up to 0.19 the experts' files alone have states
            steps += _read_optimizers(found, file, file.value, label, experts)
    if facts and experts:
        _read_expert_ranks(found, folder, facts[0], files, experts)
    count = max((c for own in facts if (c := count_of(own.value.get("mp_world_size")))), default=1)
    absent = zero_inventory.absent_ranks({*named}, count, "the file of its model states", "model-parallel ")
    found.findings += [*zero_inventory.other_step(path.name, facts), *absent]
    found.findings += _without_layers(models, files, found.buffers)
    found.beta1, found.step = first_beta(found.groups), last_step(steps)
    if found.step and all(taken_steps(own.value) == found.step - 1 for own in facts):
        # The first step allocates the states: its gradients are zero, but for the decay that NAdam and others add.
        found.step = found.step - 1 or None
    return found


def _read_expert_ranks(
    found: Checkpoint, folder: zero.Folder, model: ModelFacts, files: dict[str, TorchFile], experts: list[Any]
) -> None:
    """The optimizer of each expert-parallel rank; and that there is a file of each of these, and of each expert."""
    ranks = {int(own[1]): own[0] for own in map(OF_A_RANK.fullmatch, folder.names) if own}
    read = {rank: files[name] for rank, name in ranks.items() if name in files}
    optimizers = [value.get("optimizer") for value in (model.value, *(file.value for file in read.values()))]
    names = [
        str(g.get("name")) for held in optimizers for own, _ in torch_optimizers.within(held) for g in groups_of(own)
    ]
    sizes = [int(own[1]) for own in map(EXPERT_GROUP.fullmatch, names) if own]
    expected = [("expert-parallel ", {*ranks}, max(sizes, default=1))]
    there = [(int(own[1]), int(own[2])) for own in map(EXPERT.fullmatch, folder.names) if own]
    counts = model.value.get("num_experts")
    for layer, count in enumerate(counts if isinstance(counts, list) else ()):
        expected.append((f"experts' layer {layer}, ", {own for of, own in there if of == layer}, count_of(count) or 1))
    for kind, numbers, count in expected:
        found.findings += zero_inventory.absent_ranks(numbers, count, "its file of experts", kind)
    for rank, file in read.items():
        value = {**model.value, **file.value}
        _read_optimizers(found, file, value, f"expert-parallel rank {rank}", experts)


def _without_layers(models: dict[int, TorchFile], files: dict[str, TorchFile], buffers: set[str]) -> Iterator[Finding]:
    """Parameters with states that no file of a pipeline's layers has a weight of, for each tensor-parallel rank."""
    layers, where = zero_pipeline.layer_files(files), "layer_*-model_states.pt"
    for rank in sorted({rank for _, rank in layers}):
        of_rank = [file for own, file in models.items() if zero_pipeline.rank_of(layers, own) == rank]
        in_layers = {f"module.{number}": files[name].value for (number, of), name in layers.items() if of == rank}
        tensors = [own for prefix, value in in_layers.items() for own in tensors_in(value, prefix)]
        weights = [own.shape for name, own in tensors if name not in buffers]
        held = {}  # stages that share a layer have the same states of it
        for file in of_rank:
            for optimizer, _ in torch_optimizers.within(file.value.get("optimizer")):
                for state in torch_optimizers.first_states(states_of(optimizer).values()):
                    held[file.checksums.get(state.offset, (file.path.name, state.offset))] = state.shape
        if any(len(shape) > 1 for shape in held.values()):
            kind, what = damages.MISSING_WEIGHT, torch_optimizers.WITH_STATES
            yield from torch_optimizers.unmatched(kind, where, what, held.values(), weights)
        elif len(of_rank) == 1 and sum(map(math.prod, held.values())) > sum(map(math.prod, weights)):
            # FusedAdam's are flat. Of several stages nobody knows which elements they share.
            yield Finding(damages.MISSING_WEIGHT, where, "the optimizer has states of more elements than the layers")


def _read_optimizers(
    found: Checkpoint, file: TorchFile, value: dict[str, Any], label: str, experts: list[Any]
) -> list[Any]:
    """The optimizers of a file, which may have a chain of them; the steps that it states."""
    optimizers, taken = list(torch_optimizers.within(value.get("optimizer"))), taken_steps(value)
    groups = [group for optimizer, _ in optimizers for group in groups_of(optimizer)]
    has_states = any(state for optimizer, _ in optimizers for state in states_of(optimizer).values())
    if taken and not has_states and (not groups or any(map(_keeps_states, groups))):
        found.add(damages.MISSING_STATE, file.path.name, f"no state of an optimizer, after {taken} steps", label)
    found.findings += damages.labelled(_of_the_wrapper(file.path, value), label)
    module, steps = value.get("module"), list[Any]()
    weights = [*module.values(), *experts] if isinstance(module, dict) else []
    for number, (optimizer, masters) in enumerate(optimizers):
        name = f"optimizer.{number}" if len(optimizers) > 1 else "optimizer"
        own = torch_optimizers.take(found, file, optimizer, name, label, masters=masters, weights=weights, taken=taken)
        steps += own.values()
    return steps


def _keeps_states(group: dict[str, Any]) -> bool:
    """Whether an optimizer with these settings keeps states; SGD without momentum keeps none."""
    return "momentum" not in group or bool(group["momentum"]) or "betas" in group


def _of_the_wrapper(path: Path, value: dict[str, Any]) -> Iterator[Finding]:
    """Missing entries that FP16_Optimizer and FP16_UnfusedOptimizer save with the inner state and need at a load."""
    wrapper = value.get("optimizer")
    if not isinstance(wrapper, dict) or INNER not in wrapper:
        return
    for key in (*SCALE, *(DYNAMIC if wrapper.get("dynamic_loss_scale") else ())):
        if key not in wrapper:
            yield Finding(damages.CONTRADICTION, path.name, f"no {key} of the optimizer, without which no load begins")
    if not any(masters for _, masters in torch_optimizers.within(wrapper)):
        names = " and ".join(torch_optimizers.MASTERS)
        yield Finding(damages.MISSING_STATE, path.name, f"no main parameters: none in {names}")


def stage_of(config: Any) -> int:
    """The ZeRO stage in the configuration that is saved with the model."""
    own = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = own.get("stage", 0) if isinstance(own, dict) else int(own is True)
    return stage if isinstance(stage, int) and 0 <= stage <= 3 else 0
