"""DeepSpeed's universal checkpoints: `zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`, each a full array.

Optimizers other than Adam have other states than `exp_avg` and `exp_avg_sq`.

The model-states files of the ZeRO checkpoint are beside `zero/`. A state's file holds a tensor (stage 3), or a dict
with the tensor under "param" and how to convert it for another tensor-parallel size.
https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

import math
import re
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Any

from ckpt_patches.formats import damages, elements, settings, tensor_streams, zero_folder, zero_inventory, zero_pipeline
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, Checkpoint, Shard, Stream, last_step
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.formats.torch_optimizers import SHARED
from ckpt_patches.formats.zero import MASTER as FP32
from ckpt_patches.formats.zero import MODEL, NAME, Shape
from ckpt_patches.formats.zero_experts import LOCAL as LOCAL_EXPERT
from ckpt_patches.formats.zero_inventory import ModelFacts

FOLDER = "zero"
VOCABULARY = "vocab_tensor"  # key in a file's dict: the array's rows are tokens, without padding
# Experts of `deepspeed.moe`: each rank numbers its own from 0, the converter's folders number all of them.
EXPERT = re.compile(r".*deepspeed_moe\.experts\.deepspeed_experts\.global_\d+\..+")
GLOBAL_EXPERT = re.compile(r"(.*deepspeed_moe\.experts\.deepspeed_experts\.)(?:global_)?\d+(\..+)")
COMMON = ("zero/optimizer_state.pt", "optimizer_state.pt")  # the second is stage 3's
ROLES = {"fp32": MASTER, "exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}  # others are only checked for NaN and infinity


def state_file(parameter: str, state: str) -> str:
    """The name of a state's file in the checkpoint's folder."""
    return f"{FOLDER}/{parameter}/{state}.pt"


def is_universal(path: Path) -> bool:
    """Whether a parameter below `zero/` has the states that the converter writes. A run can have the name `zero`."""
    zero = path / FOLDER
    folders = zero.iterdir() if zero.is_dir() else ()
    return any((folder / f"{state}.pt").exists() for folder in folders for state in (FP32, "exp_avg", "exp_avg_sq"))


def parameters(path: Path) -> list[str]:
    """The parameters that have a folder."""
    return sorted(folder.name for folder in (path / FOLDER).iterdir() if folder.is_dir())


def states(path: Path, parameter: str) -> list[str]:
    """The states that a parameter has files for, the main parameter first. The step is not included."""
    folder = path / FOLDER / parameter
    names = sorted(file.stem for file in folder.iterdir() if file.suffix == ".pt") if folder.is_dir() else []
    return sorted((name for name in names if NAME.fullmatch(name) and name != "step"), key=lambda name: name != FP32)


def tensor_of(value: Any) -> TensorHeader | None:
    """The tensor in the value of a state's file, if any."""
    found = value.get("param") if isinstance(value, dict) else value
    return found if isinstance(found, TensorHeader) else None


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    found = Checkpoint(path, "deepspeed universal")
    models = _models(found)
    shapes = _shapes(models)
    if (path / "tmp").exists():
        found.add(damages.INTERRUPTED, "tmp", "the converter's temporary folder is still there")
    names = parameters(path)
    if any(EXPERT.fullmatch(name) for name in names):
        shapes = _of_every_expert(shapes, models)
    for name in sorted(shapes.keys() - set(names)):
        found.add(damages.INTERRUPTED, name, "not there, and the model has it")
    held = {name: states(path, name) for name in names}
    frozen = {name for name in names if shapes and name not in shapes and not {*held[name]} - {"fp32"}}
    groups = _groups(models, [name for name in names if name not in frozen])
    optimizer = _optimizer(found)
    promised = _promised(models, groups, held, _listed(optimizer))
    for name in names:
        is_empty = name in shapes and not any(map(math.prod, shapes[name]))
        for key in sorted(({"fp32"} if is_empty else promised.get(name, {"fp32"})) - {*held[name]}):
            found.add(damages.MISSING_ARRAY, f"{name}/{key}.pt")
        _read_parameter(found, name, held[name], shapes.get(name, []), models)
    found.buffers |= frozen
    _add_frozen_parts(found, models)
    if frozen:
        found.add(damages.NO_OPTIMIZER_STATE, f"{len(frozen)} parameters")
    steps = {name: _step(found, name) for name in names if name not in frozen}
    _read_others(found, held)
    found.step = last_step(steps.values())
    _check_steps(found, steps, groups)
    _check_models(found, models, shapes)
    of_adam = {number for name, number in groups.items() if "exp_avg_sq" in held[name]}
    _check_groups(found, optimizer, [len(model.value.get("param_shapes") or ()) for model in models], of_adam)
    if any(match[1] for model in models if (match := MODEL.fullmatch(model.name))):
        # A mixed optimizer, such as Muon with Adam, has other states in the first group.
        of_all = set[str].intersection(*promised.values()) - {"fp32"} if promised else set()
        _check_stage_3(found, optimizer, of_all, {zero_inventory.taken_steps(model.value) for model in models})
    return found


def _check_models(found: Checkpoint, models: list[ModelFacts], names: Collection[str]) -> None:
    """Check that each model-parallel rank has a file, with the keys that a load needs and the weights it states."""
    # The conversion leaves out a pipeline's weights, which are in files of layers.
    has_layers = len(models) > 1 or (len(names) > 0 and all(map(zero_pipeline.is_in_layers, names)))
    # At stage 3, a load on any number of ranks needs the files of data-parallel rank 0.
    matches = [match for model in models if (match := MODEL.fullmatch(model.name))]
    ranks = {int(match[2]) for match in matches if int(match[1] or 0) == 0}
    count = max((n for own in models if (n := zero_inventory.count_of(own.value.get("mp_world_size")))), default=1)
    problems = [
        *zero_inventory.other_step(found.path.name, models),
        *zero_inventory.absent_ranks(ranks, count, "the file of its model states", "model-parallel "),
    ]
    for own in models:
        problems += [*zero_inventory.absent_keys(own), *zero_inventory.absent_weights(own, has_layers=has_layers)]
    found.findings += problems if models else []


def _check_groups(found: Checkpoint, optimizer: Mapping[str, Any], counts: list[int], of_adam: Set[int | None]) -> None:
    """Check that the param groups are valid, and as many as the models state. A load fails without them.

    `of_adam` are the groups with parameters that have Adam's moments; None is an unknown group.
    """
    groups = [group for group in _listed(optimizer) if isinstance(group, dict)]
    if not groups:
        found.add(damages.MISSING_STATE, COMMON[0], "the param groups are in no file")
        return
    wrong = [*settings.not_groups(groups), *settings.not_numbers(groups)]
    is_flat = "partition_count" in optimizer  # stages 1 and 2; the models of stage 3 list shapes per sub-group
    if is_flat and (count := max(counts, default=0)) > len(groups):
        wrong.append(f"{len(groups)} param groups, and the model has {count}")
    if is_flat and "ds_version" not in optimizer:
        wrong.append("no ds_version beside them, without which no load begins")
    wrong += [
        f"group {n} has no betas, and moments of Adam"
        for n, own in enumerate(groups)
        if "betas" not in own and (n in of_adam or (None in of_adam and len(groups) == 1))
    ]
    found.findings += [Finding(damages.CONTRADICTION, "param_groups", what) for what in wrong]
    unlike = settings.unlike_groups([{key: own[key] for key in own.keys() & SHARED} for own in groups])
    found.findings += [Finding(damages.UNUSUAL, "param_groups", what) for what in unlike]


def _check_stage_3(found: Checkpoint, optimizer: Mapping[str, Any], names: Set[str], counted: Set[int]) -> None:
    """Check the first group's state and set the step from it. A stage 3 load takes step and state names from there."""
    states, path = optimizer.get("state"), _common(found)
    if path is None:
        return
    first = states.get(0) if isinstance(states, dict) else None
    first = first if isinstance(first, dict) else {}
    is_adam = "exp_avg_sq" in names and not any(isinstance(own, dict) and "step" in own for own in _listed(optimizer))
    for name in sorted(({*names, "step"} if is_adam else names) - first.keys()):
        detail = f"no {name:.100} in the state of the first group, of which a load takes it"
        found.add(damages.MISSING_STATE, COMMON[0], detail)
    found.step = last_step([tensor_streams.scalar(path, first.get("step"))])
    if found.step is not None and counted and found.step not in counted:
        detail = f"the engine has counted {max(counted)} steps, the optimizer {found.step}"
        found.add(damages.UNUSUAL, COMMON[0], detail)


def _check_steps(found: Checkpoint, steps: Mapping[str, float | None], groups: Mapping[str, int | None]) -> None:
    """Check that all trained parameters are at the same step. Either all parameters of a group have a step or none."""
    counting = {groups[name] for name, step in steps.items() if step is not None}
    for name, step in steps.items():
        if step is None and groups[name] in counting:
            found.add(damages.MISSING_STATE, f"{name}/step.pt", "there is no number in it")
        elif step is not None and step != found.step:
            found.add(damages.MIXED_STEPS, f"{name}/step.pt", f"step {step:g}, others are at {found.step}")


def _shapes(models: list[ModelFacts]) -> dict[str, list[Shape]]:
    """Each parameter's shapes on the tensor- or pipeline-parallel ranks that have it. Data-parallel ranks agree."""
    found: dict[str, dict[str, Shape]] = {}
    for model in models:
        match = MODEL.fullmatch(model.name)
        for group in model.value.get("param_shapes") or []:
            for name, shape in group.items():
                found.setdefault(name, {})[match[2] if match else ""] = tuple(shape)
    return {name: list(by_rank.values()) for name, by_rank in found.items()}


def _of_every_expert(shapes: dict[str, list[Shape]], models: list[ModelFacts]) -> dict[str, list[Shape]]:
    """Replace one rank's experts, numbered from 0 in the model, with all experts by their global numbers."""
    matches = {name: LOCAL_EXPERT.fullmatch(name) for name in shapes}
    layers = list(dict.fromkeys(match[1] for match in matches.values() if match))
    counts = models[0].value.get("num_experts") if models else None
    if not isinstance(counts, list) or len(counts) != len(layers):
        counts = [0] * len(layers)  # missing experts cannot be detected then
    counts = [zero_inventory.count_of(count) or 0 for count in counts]
    found: dict[str, list[Shape]] = {}
    for name, of_one in shapes.items():
        match = matches[name]
        if match is None:
            found[name] = of_one
        for number in range(counts[layers.index(match[1])] if match else 0):
            found.setdefault(f"{match[1]}global_{number}{match[3]}" if match else name, of_one)
    return found


def _groups(models: list[ModelFacts], names: list[str]) -> dict[str, int | None]:
    """The param group of each parameter; None if unknown."""
    known = {
        LOCAL_EXPERT.sub(r"\1*\3", name): number
        for model in models
        for number, group in enumerate(model.value.get("param_shapes") or [])
        for name in group
    }
    return {name: known.get(GLOBAL_EXPERT.sub(r"\1*\2", name)) for name in names}


def _promised(
    models: list[ModelFacts], groups: Mapping[str, int | None], states: Mapping[str, list[str]], listed: list[Any]
) -> dict[str, set[str]]:
    """The states that each trained parameter needs: those found in its param group, and those its settings imply."""
    steps = max((zero_inventory.taken_steps(model.value) for model in models), default=0)
    by_group: dict[int | None, set[str]] = {}
    for name, group in groups.items():
        by_group.setdefault(group, {"fp32"}).update(states[name])
    for group, has in by_group.items():
        known = listed[group] if group is not None and group < len(listed) else {}
        known = known if isinstance(known, dict) else {}
        has |= zero_inventory.states_by_settings(known.keys(), known, has, steps)
    return {name: by_group[group] for name, group in groups.items()}


def _common(found: Checkpoint) -> Path | None:
    """The file of state that belongs to no parameter; None if missing."""
    return next((found.path / place for place in COMMON if (found.path / place).exists()), None)


def _optimizer(found: Checkpoint) -> dict[str, Any]:
    """The optimizer's state dict in that file; empty if it is missing or cannot be read."""
    path = _common(found)
    value = tensor_streams.read(path, found) if path else None
    own = value.get("optimizer_state_dict", value) if isinstance(value, dict) else None
    return own if isinstance(own, dict) else {}


def _listed(optimizer: Mapping[str, Any]) -> list[Any]:
    """The param groups."""
    groups = optimizer.get("param_groups")
    return list(groups) if isinstance(groups, (list, tuple)) else []


def _models(found: Checkpoint) -> list[ModelFacts]:
    """The model files, one for each tensor- or pipeline-parallel rank."""
    paths = [path for path in sorted(found.path.iterdir()) if MODEL.fullmatch(path.name)]
    if not paths:
        found.add(damages.INTERRUPTED, "mp_rank_*_model_states.pt", "not there")
    values = {path: value for path in paths if isinstance(value := tensor_streams.read(path, found), dict)}
    return [ModelFacts(path.name, zero_folder.model_states(path, value)) for path, value in values.items()]


def _add_frozen_parts(found: Checkpoint, models: list[ModelFacts]) -> None:
    """Add frozen parameters of stage 3, where each rank of the converted run has a model file."""
    ranks = {int(match[1]): own for own in models if (match := MODEL.fullmatch(own.name)) and match[1]}
    for rank, model in ranks.items():
        zero_folder.add_frozen_parts(found, model, rank, len(ranks))


def _read_others(found: Checkpoint, states: Mapping[str, list[str]]) -> None:
    """Read all other files: those that are neither model files, states of parameters, nor the common file."""
    known = {state_file(name, key) for name, own in states.items() for key in (*own, "step")}
    common = _common(found)
    for path in sorted(found.path.rglob("*.pt")):
        name = str(path.relative_to(found.path))
        if path != common and name not in known and not MODEL.fullmatch(name) and not name.startswith("tmp/"):
            tensor_streams.read(path, found)


def _step(found: Checkpoint, name: str) -> float | None:
    path = found.path / state_file(name, "step")
    return tensor_streams.scalar(path, tensor_streams.read(path, found)) if path.exists() else None


def _read_parameter(
    found: Checkpoint, name: str, states: list[str], shapes: list[Shape], models: list[ModelFacts]
) -> None:
    """Read the arrays of a parameter. `shapes` are its shapes on each rank, if known."""
    streams: dict[str, Stream] = {}
    for key in states:
        path, file = found.path / state_file(name, key), f"{key}.pt"
        value = tensor_streams.read(path, found)
        if (tensor := tensor_of(value)) is None:
            if value is not None:
                detail = f"expected a tensor, or a dict with one under 'param', found {type(value).__name__}"
                found.add(damages.NOT_JUDGED, f"{name}/{file}", detail)
            continue
        if shapes and not _fits(tensor, shapes, value, has_maps=any(map(_has_maps, models))):
            found.add(damages.ELEMENT_COUNT, f"{name}/{file}", f"{tensor.numel} elements, {_in_words(shapes)}")
        elif (stream := tensor_streams.stream(found, path, f"{name}/{file}", tensor)) is None:
            continue
        elif key in ROLES:
            streams[ROLES[key]] = stream
        else:
            found.shards.append(Shard(name, "", (stream.numel,), {EXP_AVG: stream}))
    found.shards += _shards(found, name, streams, shapes, models)


def _shards(
    found: Checkpoint, name: str, streams: dict[str, Stream], shapes: list[Shape], models: list[ModelFacts]
) -> list[Shard]:
    """One shard with all arrays of a parameter if their element counts are equal, else one per array."""
    sizes = {stream.numel for stream in streams.values()}
    if len(sizes) != 1:
        return [Shard(name, role, (stream.numel,), {role: stream}) for role, stream in streams.items()]
    (numel,) = sizes
    if len(models) == 1:
        (model,) = models
        module = model.value.get("module")
        weight = module.get(name) if isinstance(module, dict) else None
        own = tensor_streams.stream(found, found.path / model.name, name, weight)
        # An integer buffer is stored in fp32 here; it is not a main parameter.
        if own is not None and own.numel == numel and elements.is_number(own.dtype):
            streams[WEIGHT] = own
    return [Shard(name, "", next((shape for shape in shapes if math.prod(shape) == numel), (numel,)), streams)]


def _fits(found: TensorHeader, shapes: list[Shape], value: Any, *, has_maps: bool) -> bool:
    """Whether an array fits a parameter with these shapes on the tensor-parallel ranks: one of them, or all together.

    A tied parameter is on several pipeline stages. With DeepSpeed's affine maps, parts can be on several ranks.
    """
    if isinstance(value, dict) and value.get("is_expert_param"):  # includes all expert-parallel ranks
        return any(found.shape == (value.get("ep_num_experts"), *shape[1:]) for shape in shapes)
    sizes = [math.prod(shape) for shape in shapes]
    together = [sum(sizes) // stages for stages in range(1, len(sizes) + 1) if len(sizes) % stages == 0]
    if found.numel in (*sizes, *together):
        return True
    is_vocabulary = isinstance(value, dict) and VOCABULARY in value and len(sizes) > 1
    return is_vocabulary or (has_maps and max(sizes) <= found.numel <= sum(sizes))


def _has_maps(model: ModelFacts) -> bool:
    info = model.value.get("universal_checkpoint_info")
    return isinstance(info, dict) and "affine_map" in info


def _in_words(shapes: list[Shape]) -> str:
    if len(shapes) == 1:
        return f"{math.prod(shapes[0])} in the model's shape {shapes[0]}"
    return f"{sum(map(math.prod, shapes))} in the model's shapes {', '.join(map(str, shapes))}"
