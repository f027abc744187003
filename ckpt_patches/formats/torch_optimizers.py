"""Read torch optimizers, wherever a torch.save file has them: `state` and `param_groups`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_patches.formats import damages, optimizer_inventory, tensor_streams
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTS, Checkpoint, Shard
from ckpt_patches.formats.torch_file import Instance, TensorHeader, TorchFile

KEYS = {"state", "param_groups"}
MASTERS = ("fp32_groups_flat", "fp32_groups")  # of DeepSpeed's FP16_Optimizer and FP16_UnfusedOptimizer
DEEPEST = 8  # dicts and objects around an optimizer


def within(value: Any, depth: int = 0) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """The optimizers in dicts and objects at any depth, each with the main parameters that are stored next to it."""
    value = value.fields if isinstance(value, Instance) else value
    if not isinstance(value, dict) or depth > DEEPEST:
        return
    if isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list):
        yield value, []
        return
    held: list[Any] = next((value[key] for key in MASTERS if isinstance(value.get(key), list)), [])
    masters = [one for item in held for one in (item if isinstance(item, list) else [item])]  # can be nested by group
    for inner in value.values():
        yield from ((optimizer, own or masters) for optimizer, own in within(inner, depth + 1))


def take(
    found: Checkpoint,
    file: TorchFile,
    optimizer: Mapping[str, Any],
    name: str,
    label: str = "",
    *,
    masters: Sequence[Any] = (),
    weights: Sequence[Any] = (),
    taken: int | None = None,
) -> dict[Any, Any]:
    """Add an optimizer's findings, settings, and a shard for the moments of each parameter.

    Returns the steps by parameter, and those of groups.
    """
    groups, states = tensor_streams.groups_of(optimizer), tensor_streams.states_of(optimizer)
    steps = tensor_streams.steps_of(file.path, states)
    own = optimizer_inventory.Optimizer(file.path.name, groups, states, steps, masters, weights, file.checksums, taken)
    found.findings += damages.labelled(optimizer_inventory.problems(own), label)
    found.groups += groups
    for number, state in states.items():
        master = masters[number] if type(number) is int and 0 <= number < len(masters) else None
        found.shards += _shard(found, file, f"{name}.{number!s:.100}", label, state, master)
    for group_number, group in enumerate(groups):
        key = "k" if "weight_sum" in group else "step"  # of a schedule-free optimizer
        if key in group:
            steps[f"of group {group_number}"] = group[key]
    return steps


def _shard(
    found: Checkpoint, file: TorchFile, name: str, label: str, state: Mapping[Any, Any], master: Any
) -> Iterator[Shard]:
    """The moments and the main parameter of one parameter, or of a flat buffer, if all have the same shape."""
    values = {role: state.get(role) for role in MOMENTS if are_of_adam(state)}
    streams = tensor_streams.streams(found, file.path, name, {**values, MASTER: master})
    headers = [own for role in streams if isinstance(own := {**values, MASTER: master}[role], TensorHeader)]
    if len({header.numel for header in headers}) == 1 and headers[0].numel:
        yield Shard(name, label, headers[0].shape, streams, has_rows=MASTER not in streams)


def are_of_adam(state: Mapping[Any, Any]) -> bool:
    """Whether the moments are Adam's. Beside further means of gradients, or lists as SOAP's bases, they are others."""
    further = {str(name) for name in state} - {EXP_AVG, EXP_AVG_SQ, "max_exp_avg_sq"}
    has_lists = any(isinstance(value, (list, dict)) for value in state.values())
    return not has_lists and not any("exp_avg" in name for name in further)
