"""Shared by the readers of Megatron's distributed checkpoints: array names, and the file of unsharded state."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ckpt_patches.formats import damages, settings, torch_file
from ckpt_patches.formats.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTS,
    ROLES,
    WEIGHT,
    Checkpoint,
    first_beta,
    last_step,
)
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.megatron_names import OPTIMIZER_STATE, is_bucket
from ckpt_patches.formats.paths import LinkOutsideError, path_within
from ckpt_patches.formats.ranged import read_metadata
from ckpt_patches.formats.recorded import KEY
from ckpt_patches.formats.torch_dist import COMMON, INDEX
from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.runtime.shown import shown

CONFIG = "metadata.json"
OF_AN_ARRAY = ".zarray"  # metadata of an array in zarr
CONFIG_OF_BRIDGE = "run_config.yaml"  # Megatron Bridge writes it instead of Megatron-LM's arguments
ITERATION = re.compile(r"iter_(\d{7,15})")
BACKENDS = ZARR, TORCH_DIST = "zarr", "torch_dist"
# Roles of a parameter's states. The main parameter's name depends on the format; buckets use the second one.
STATES = {"fp32_param": MASTER, "param": MASTER, "exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}
MOST_RANKS = 1 << 20
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"  # arguments of a run
ADAM = {"betas", "eps"}  # settings that identify it
SHARDING_TYPE = "param_state_sharding_type"
SCALER, OF_SCALER = "grad_scaler", {"scale", "growth_tracker", "hysteresis_tracker"}
TOGETHER = {"args", "checkpoint_version", "iteration"}  # Megatron-LM saves these
Value = TypeVar("Value")


def _parameter_and_state(name: str) -> tuple[str, str]:
    """The parameter, or the bucket, of an array, and the state; an array without a state is the parameter itself."""
    if is_bucket(name):
        bucket, _, state = name.rpartition(".")
        return bucket, state
    state, _, parameter = name.partition(OPTIMIZER_STATE)[2].partition(".")  # chained optimizers have a prefix
    return (parameter, state) if parameter else (name, "")


def by_parameter(arrays: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    """The values of `arrays`, by parameter and role. A state that is not judged is by itself, as a weight."""
    parameters: dict[str, dict[str, Value]] = {}
    for name, value in arrays.items():
        parameter, state = _parameter_and_state(name)
        key, role = (parameter, STATES[state]) if state in STATES else (name, WEIGHT)
        parameters.setdefault(key, {})[role] = value
    return parameters


def check_siblings(found: Checkpoint, arrays: Mapping[str, str]) -> None:
    """Report arrays that most parameters have and some lack. `arrays` has the dtype by name, "" if not read."""
    parameters = by_parameter(arrays)
    with_state = {name: roles for name, roles in parameters.items() if roles.keys() - {WEIGHT}}
    usual = Counter(role for roles in with_state.values() for role in roles)
    # Adam, identified by its settings, keeps both moments for every parameter. Lion has no eps.
    is_adam = any(group.keys() >= ADAM for group in found.groups) and any(map(usual.get, MOMENTS))
    expected = {*(MOMENTS if is_adam else ()), *(role for role in ROLES if 2 * usual[role] > len(with_state))}
    # Parameters with states that Adam does not keep, such as Muon's momentum in a run that uses Muon and Adam.
    of_others = {own for own, state in map(_parameter_and_state, arrays) if state and state not in STATES}
    for name, roles in with_state.items():
        wanted = expected | {MASTER} if is_bucket(name) else expected - {*MOMENTS} if name in of_others else expected
        if roles.get(WEIGHT) == "float32" and not found.sharding:
            wanted = wanted - {MASTER}  # an fp32 weight is the main parameter, except with a distributed optimizer
        missing = [role for role in ROLES if role not in roles and role in wanted]
        if set(missing) == set(MOMENTS):
            found.add(damages.MISSING_MOMENTS, name)
        elif missing:
            found.add(damages.MISSING_ARRAY, name, f"no {' and no '.join(missing)}")
    without = sum(not _is_state(name) for name in parameters.keys() - with_state.keys())
    if with_state and without and not any(map(is_bucket, with_state)):
        found.add(damages.NO_OPTIMIZER_STATE, f"{without} parameters")


def check_promises(found: Checkpoint, arrays: Iterable[str]) -> None:
    """Check that param groups and states are consistent, and that settings are valid."""
    if any(finding.kind in (damages.BAD_METADATA, damages.NOT_READ) for finding in found.findings):
        return  # the contents are unknown
    has_states = any(map(_is_state, arrays)) or any(not shard.has_rows for shard in found.shards)
    if found.step and not has_states:
        detail = f"the optimizer is at step {found.step}, and no state of it is in the checkpoint"
        found.add(damages.MISSING_STATE, "the optimizer's state", detail)
    if has_states and not found.groups:
        detail = "no param group, with its settings and its step, is in the checkpoint"
        found.add(damages.MISSING_STATE, "param_groups", detail)
    stated = ((f"the step of group {n}", group.get("step")) for n, group in enumerate(found.groups))
    steps = {name: step for name, step in stated if step is not None and not isinstance(step, TensorHeader)}
    unusual = [*settings.unlike_groups(found.groups)]
    if len(known := {step for step in steps.values() if settings.is_step(step)}) > 1:
        unusual.append(f"the groups are at different steps, {', '.join(map(str, sorted(known)[:5]))}")
    # Allow one extra step: an optimizer may take one at the start, to allocate its states.
    if found.iteration is not None and (found.step or 0) > found.iteration + 1:
        unusual.append(f"the optimizer has taken {found.step} steps, and the run {found.iteration}")
    wrong = [*settings.not_numbers(found.groups), *settings.not_steps(steps)]
    found.findings += [Finding(damages.UNUSUAL, "param_groups", what) for what in unusual]
    found.findings += [Finding(damages.CONTRADICTION, "param_groups", what) for what in wrong]


def _is_state(name: str) -> bool:
    """Whether an array holds states of any optimizer, including those that are not judged."""
    return OPTIMIZER_STATE in name or is_bucket(name)


def set_common(found: Checkpoint, common: Any, where: str = COMMON, *, is_distributed: bool = False) -> None:
    """Set the optimizer's step and other facts about the run from the unsharded state, or a rank's model file."""
    if not isinstance(common, dict):
        found.add(damages.BAD_METADATA, where, f"expected a dict in {where}, found {type(common).__name__}")
        return
    found.recorded = common.get(KEY) if where == COMMON else None
    arguments = common.get("args")
    optimizers = [common.get("optimizer"), common.get("optimizer_states")]  # the second is NeMo's
    set_run(found, param_groups(optimizers), arguments)
    types = sharding_types(optimizers)
    if len(types) > len(param_groups(optimizers)) > 0:  # an optimizer without parameters on the rank is an empty dict
        found.add(damages.MISSING_STATE, "param_groups", f"{len(types)} optimizers, and not all of them have some")
    is_fp16 = isinstance(arguments, torch_file.Instance) and arguments.fields.get("fp16") is True
    for outer, _ in _wrapped(optimizers):
        scaler = outer.get(SCALER)
        # A load without it starts again from the initial scale and only logs that. A constant scale is an empty dict.
        if is_fp16 and outer and not isinstance(scaler, dict):
            found.add(damages.MISSING_STATE, "the loss scale", f"no {SCALER}, which a run in fp16 saves")
        for key in sorted(OF_SCALER - scaler.keys()) if isinstance(scaler, dict) and scaler else ():
            found.add(damages.MISSING_STATE, "the loss scale", f"no {key} in {SCALER}, without which no load begins")
    _check_iteration(found, common, where)
    content = common.get("content_metadata")
    stated = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    found.sharding = stated if isinstance(stated, str) else next(iter(types), "")
    if not types and is_distributed:
        detail = f"no {SHARDING_TYPE} in {where}, without which no load of a distributed optimizer begins"
        found.add(damages.CONTRADICTION, where, detail)


def is_of_distributed(name: str) -> bool:
    """Whether only a distributed optimizer saves an array or object with this name."""
    return is_bucket(name) or f"{OPTIMIZER_STATE}param." in name


def set_run(found: Checkpoint, optimizers: list[list[dict[str, Any]]], arguments: Any) -> None:
    """Set the facts that the param groups of each optimizer and the run's arguments state."""
    groups = [group for own in optimizers for group in own]
    # If Adam steps only a part, a single other optimizer steps all matrices, including those of experts.
    is_adam = all("betas" in group for group in groups)
    for own in optimizers:
        unusual = [*settings.same_groups(own), *settings.unlike_schedules(own, experts_are_apart=is_adam)]
        found.findings += [Finding(damages.UNUSUAL, "param_groups", what) for what in unusual]
    found.groups += groups
    steps = [step for group in found.groups if (step := group.get("step")) is not None]
    found.step = last_step(steps) if steps else (0 if found.groups else None)
    found.beta1 = first_beta(found.groups)
    if isinstance(arguments, torch_file.Instance):
        fields = arguments.fields.items()
        sizes = {name: size for name, size in fields if type(size) is int and 0 < size < MOST_RANKS}
        if "data_parallel_size" in sizes:  # the ranks of context parallelism share the optimizer's states, too
            found.data_parallel = sizes["data_parallel_size"] * sizes.get("context_parallel_size", 1)
        if {TENSOR, PIPELINE} <= sizes.keys():
            found.model_parallel = sizes[TENSOR], sizes[PIPELINE]
        found.torch_fsdp2 = arguments.fields.get("use_torch_fsdp2") is True


def _check_iteration(found: Checkpoint, value: dict[str, Any], where: str) -> None:
    """Check the iteration, which Megatron-LM saves and uses in the folder's name. Other trainers save none."""
    named, stated = ITERATION.fullmatch(found.path.name), value.get("iteration")
    absent = TOGETHER - value.keys()
    if len(absent) == 1 and not (found.path / CONFIG_OF_BRIDGE).exists():
        kind = damages.CONTRADICTION if absent == {"iteration"} else damages.UNUSUAL
        detail = f"no {absent.pop()}, which Megatron-LM saves with the others of {', '.join(sorted(TOGETHER))}"
        found.add(kind, where, f"{detail}: no load begins, or it takes the checkpoint for an old one")
    found.iteration = stated if type(stated) is int else None
    if named and type(stated) is int and stated != int(named[1]):
        detail = f"it states iteration {shown(stated)}, and the folder is named {found.path.name}"
        found.add(damages.UNUSUAL, where, detail)


def sharding_types(value: Any) -> list[str]:
    """The sharding types of all optimizers in a value. One that is not distributed states none."""
    own = value.get(SHARDING_TYPE) if isinstance(value, dict) else None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [*([own] if isinstance(own, str) else []), *(kind for one in inner for kind in sharding_types(one))]


def _wrapped(value: Any, outer: Mapping[str, Any] | None = None) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Each optimizer of a chain that has param groups, after the one that wraps it for mixed precision, or {}."""
    if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
        yield outer or {}, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _wrapped(inner, value if key == "optimizer" else None)
    elif isinstance(value, list):
        for inner in value:
            yield from _wrapped(inner)


def param_groups(optimizer: Any) -> list[list[dict[str, Any]]]:
    """The param groups of one optimizer, or of each optimizer in a chain."""
    found = []
    for _, own in _wrapped(optimizer):
        groups = [group for group in own["param_groups"] if isinstance(group, dict)]
        # torch's optimizers keep the step per parameter; megatron-core saves it once, and groups can have None.
        step = own["state"].get("common_step") if isinstance(own.get("state"), dict) else None
        common = {} if step is None else {"step": step}
        found.append([group if group.get("step") is not None else {**group, **common} for group in groups])
    return found


def backend(path: Path) -> str | None:
    """The sharded format of a Megatron checkpoint; None if the folder is not one.

    The metadata name the format. If they are damaged or name an unknown format, the files in the folder decide.
    """
    named = _named_backend(path)
    if named in BACKENDS or not ((path / CONFIG).exists() or (path / COMMON).exists()):
        return named
    if (path / INDEX).exists():
        return TORCH_DIST
    return ZARR if next(path.glob(f"*/{OF_AN_ARRAY}"), None) is not None else named


def check_config(found: Checkpoint) -> None:
    """Check the metadata that name the format."""
    if (named := _named_backend(found.path)) not in BACKENDS:
        kind = damages.BAD_METADATA if named is None else damages.NOT_READ
        detail = (
            f"expected metadata that name {' or '.join(BACKENDS)}, found {shown(named)}; read as the files beside it"
        )
        found.add(kind, CONFIG, detail)


def _named_backend(path: Path) -> str | None:
    try:
        config = json.loads(read_metadata(path_within(path, CONFIG)))
    except (OSError, ValueError, RecursionError, LinkOutsideError):
        return None
    return str(config["sharded_backend"]) if isinstance(config, dict) and "sharded_backend" in config else None
