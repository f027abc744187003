"""Convert the unsharded state of a checkpoint. Pure: arguments are not modified."""

from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.formats.torch_file import Instance
from ckpt_patches.migrate.keys import GATHERED, RESHARDABLE

TYPE, GROUPS, CONTENT = "param_state_sharding_type", "param_groups", "content_metadata"
TYPE_OF_CONTENT = "distrib_optim_sharding_type"


def sharding_types(value: Any) -> set[str]:
    """The sharding types of all optimizers. One that is not distributed states none."""
    own = {value[TYPE]} if isinstance(value, dict) and isinstance(value.get(TYPE), str) else set()
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return own.union(*map(sharding_types, inner))


def steps(value: Any) -> set[Any]:
    """The steps of the param groups, if they are numbers."""
    groups = [group for own in _lists(value) for group in own if isinstance(group, dict)]
    return {group["step"] for group in groups if isinstance(group.get("step"), int | float)}


def without_step(value: Any) -> int:
    """The number of param groups without a step, beside others of their optimizer that have one."""
    return sum(_lacks_step(group) for groups in _lists(value) if steps({GROUPS: groups}) for group in groups)


def _lists(value: Any) -> list[list[Any]]:
    """The lists of param groups, one per optimizer."""
    if type(value) is dict:
        own = [value[GROUPS]] if isinstance(value.get(GROUPS), list) else []
        return own + [found for key, inner in value.items() if key != GROUPS for found in _lists(inner)]
    return [found for inner in value for found in _lists(inner)] if isinstance(value, list) else []


def _lacks_step(group: Any) -> bool:
    return isinstance(group, dict) and group.get("step") is None


def check_steps(value: Any) -> None:
    """Check that all param groups have the same step.

    Raises:
        UserError: the steps differ, so that megatron-core would refuse to load the checkpoint.
    """
    found = steps(value)
    if len(found) > 1:
        numbers = ", ".join(sorted(map(str, found)))
        raise UserError(
            f"expected one step in all parameter groups, found {numbers}: megatron-core would refuse to load it; take "
            "another checkpoint"
        )


def renewed(value: Any, target: str) -> Any:
    """A copy with another sharding type.

    A group without a step gets that of the others: Megatron steps all groups of an optimizer together.
    """
    if isinstance(value, list):
        return [renewed(inner, target) for inner in value]
    if type(value) is not dict:
        return value
    made = {key: renewed(inner, target) for key, inner in value.items()}
    if isinstance(made.get(TYPE), str):
        made[TYPE] = target
    if isinstance(made.get(GROUPS), list):
        found = steps({GROUPS: made[GROUPS]})
        made[GROUPS] = [{**g, "step": max(found)} if found and _lacks_step(g) else g for g in made[GROUPS]]
    return made


def described(settings: dict[str, Any], target: str) -> dict[str, Any]:
    """Add the metadata that Megatron-LM reads first: how the optimizer state is sharded and named."""
    before = settings.get(CONTENT)
    content = {
        "singleton_local_shards": False,
        **(before if isinstance(before, dict) else {}),
        TYPE_OF_CONTENT: target,
        "chained_optim_avoid_prefix": True,
    }
    if target == RESHARDABLE:
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
    return {**settings, CONTENT: content}


def are_of_rank_0(settings: dict[str, Any]) -> bool:
    """Whether the param groups may differ from those of other pipeline ranks, as up to 0.13.1."""
    content, arguments = settings.get(CONTENT), settings.get("args")
    is_later = isinstance(content, dict) and content.keys() - {TYPE_OF_CONTENT}
    stages = arguments.fields.get("pipeline_model_parallel_size") if isinstance(arguments, Instance) else None
    return not is_later and stages != 1


def is_described(settings: dict[str, Any]) -> bool:
    """Whether the metadata that current releases read state `dp_zero_gather_scatter` as the sharding type."""
    content = settings.get(CONTENT)
    return isinstance(content, dict) and content.get(TYPE_OF_CONTENT) == GATHERED
