"""Resume each param group with the settings that were saved for it, not with those of another group.

https://github.com/NVIDIA/Megatron-LM/pull/4705
"""

import ast
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from logging import getLogger

    import torch

    logger = getLogger(__name__)

PARAM_GROUPS = "megatron.core.optimizer.__init__"


fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/pull/4705",),
    symptom="a param group resumes with another group's weight decay or learning rate",
    releases=(("0.12.0", "0.13.1"), ("0.16.0", newest("megatron-core"))),
    stacks="pipeline stages; `--decoupled-lr` or muP; from 0.19.0 a new `--lr`",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_resume_param_groups.py",
)

OPTIMIZER = "megatron.core.optimizer.optimizer"
DISTRIB_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
LONGEST_LINE = 100  # columns, of upstream's formatter
KEYS = "param_group_identifier_keys"
# As in 0.13.0 to 0.18.2; earlier releases do not have it.
param_group_identifier_keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def _param_group_traits(group: "dict[str, Any]") -> "tuple[dict[str, Any], dict[str, Any]]":
    """Return the kind and the rates of a param group, which together identify it.

    NeMo adds the prefix `pre_` to the multipliers' names. `is_decoupled_lr` or `default_config`
    shows that a group has its own rate; its own weight decay is in the group itself.
    """
    rates = {key: group.get(key) for key in ("max_lr", "min_lr", "start_wd", "end_wd", "eps")}
    kind = {
        key: group.get(key, group.get(f"pre_{key}"))
        for key in param_group_identifier_keys
        if key not in rates
    }
    for key in ("wd_mult", "lr_mult"):
        kind[key] = 1.0 if kind[key] is None else kind[key]
    kind["is_expert_parallel"] = bool(kind["is_expert_parallel"])
    kind["is_decoupled_lr"] = bool(kind["is_decoupled_lr"]) or group.get("default_config") is False
    kind["own_weight_decay"] = rates["start_wd"] is not None or rates["end_wd"] is not None
    return kind, rates


def _param_group_text(group: "dict[str, Any]") -> str:
    """Format the traits of a param group for messages."""
    kind, rates = _param_group_traits(group)
    found = {**kind, **rates}.items()
    return ", ".join(
        f"{key} {value}" for key, value in found if value is not None and value is not False
    )


def _pair_param_groups(
    current_groups: "list[dict[str, Any]]", saved_groups: "list[dict[str, Any]]"
) -> "dict[int, int]":
    """Map the index of each param group of this run to its saved group, if it is unambiguous.

    The order and the number of groups differ between pipeline stages. Groups of a kind are paired
    if all were saved with the same rates, if each side has only one group of the kind, or if an
    earlier resume gave all of them the same settings.
    """
    ours = [_param_group_traits(group) for group in current_groups]
    theirs = [_param_group_traits(group) for group in saved_groups]
    if not all("optimizer" in group for group in (*current_groups, *saved_groups)):
        for kind, _ in (*ours, *theirs):
            kind.pop("optimizer", None)
    own_rate = {"is_decoupled_lr": None}
    pairs: dict[int, int] = {}
    for index, (kind, _) in enumerate(ours):
        of_kind = [traits for traits in ours if traits[0] == kind]
        saved = [number for number, traits in enumerate(theirs) if traits[0] == kind]
        same = [number for number in saved if theirs[number] == ours[index]]
        if all(theirs.count(traits) in (1, ours.count(traits)) for traits in of_kind):
            pairs[index] = same[min(ours[:index].count(ours[index]), len(same) - 1)]
        elif len(saved) == len(of_kind) == 1:
            pairs[index] = saved[0]
        else:
            alike, saved = (
                [
                    n
                    for n, other in enumerate(groups)
                    if {**other[0], **own_rate} == {**kind, **own_rate}
                ]
                for groups in (ours, theirs)
            )
            if len(alike) == len(saved) > 1 and all(theirs[n] == theirs[saved[0]] for n in saved):
                pairs[index] = saved[alike.index(index)]
    return pairs


def saved_param_groups_in_order(
    current_groups: "list[dict[str, Any]]",
    saved_groups: "list[dict[str, Any]]",
    params_of: "list[dict[str, Any]]",
) -> "list[dict[str, Any]]":
    """Return the saved settings for each of this run's param groups.

    Args:
        current_groups (list[dict]): the param groups of this run's optimizer.
        saved_groups (list[dict]): the param groups of the checkpoint.
        params_of (list[dict]): groups that provide the `params`, in the same order.

    Raises:
        ValueError: a group's saved settings cannot be determined.
    """
    pairs = _pair_param_groups(current_groups, saved_groups)
    ours, theirs = (
        list(map(_param_group_text, groups)) for groups in (current_groups, saved_groups)
    )
    if len(pairs) < len(ours):
        raise ValueError(
            "Cannot tell whose settings a param group resumes with. Expected in the checkpoint all"
            " groups of a kind with the rates of this run, or one of the kind. Found in this run,"
            " with the number of the saved group,\n"
            + "\n".join(
                f"  {text}: {pairs.get(index, 'ambiguous')}" for index, text in enumerate(ours)
            )
            + "\nand in the checkpoint\n"
            + "\n".join(f"  {number}: {text}" for number, text in enumerate(theirs))
            + "\nResume with the options for learning rates and weight decay that it was saved"
            " with, or without the optimizer's state."
        )
    is_first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    for text, pair in zip(ours, pairs.values(), strict=True):
        if text != theirs[pair] and is_first_rank:
            logger.warning(
                f"The param group of this run with {text} resumes with the settings saved for"
                f" {theirs[pair]}. These rates hold unless override_opt_param_scheduler is set."
            )
    return [
        {**saved_groups[pair], "params": group["params"]}
        for pair, group in zip(pairs.values(), params_of, strict=False)
    ]


FUNCTIONS = (
    _param_group_traits,
    _param_group_text,
    _pair_param_groups,
    saved_param_groups_in_order,
)
CALL = saved_param_groups_in_order.__name__
FILTER = f"""return {CALL}(
    current_groups, state_dict_groups, params_of=state_dict_groups
)"""
DOCSTRING = '''"""The settings saved for each current param group, with the params of the saved groups.

Args:
    current_groups (List[Dict]): the param groups of this run's optimizer.
    state_dict_groups (List[Dict]): the param groups of the checkpoint.

Returns:
    List[Dict]: one group for each current group, in that order.

Raises:
    ValueError: a current group has no counterpart, or more than one.
"""'''
INNER = "inner_state_dict = self.optimizer.state_dict()"
IN_ORDER = f"""state_dict_param_groups = {CALL}(
    inner_state_dict["param_groups"],
    state_dict["optimizer"]["param_groups"],
    params_of=inner_state_dict["param_groups"],
)"""
# Up to 0.13.1 each of these two passes the saved groups unchanged to the inner optimizer.
LOADS = {
    "Float16OptimizerWithFloat16Params": "state_dict[optimizer_key]",
    "FP32Optimizer": "state_dict",
}


@fix.edit(PARAM_GROUPS)
def groups_may_look_alike(source: Source) -> None:
    """In 0.14.0 to 0.15.3 all ranks have the same groups, with unique keys."""
    keys_tell_all_apart = (
        b"assert set(param_group.keys()) - set(param_group_identifier_keys) == {'params'}"
    )
    same_on_all_ranks = b"torch.distributed.all_gather_object(gathered_params_key, params_key)"
    if keys_tell_all_apart in source.data and same_on_all_ranks in source.data:
        raise NoMatch("expected groups whose keys can be the same, found unique ones")


@fix.edit(OPTIMIZER)
def pair_groups(source: Source) -> None:
    """Since 0.14 upstream uses the last of several similar groups; before, the group at the same index."""
    filtered = "MegatronOptimizer._filter_and_reorder_param_groups"
    by_key = source.function_of(filtered, ("0.13.0", newest("megatron-core"))) is not None
    loads = [filtered] if by_key else [f"{name}.load_state_dict" for name in LOADS]
    functions = [source.function(name) for name in loads]
    has_keys = source.has(f"{KEYS} = ...")
    called = [source.has(f"{CALL}(...)", function) for function in functions]
    source.skip_if(*called, *FUNCTIONS, *([has_keys] if any(called) else []))
    if by_key:
        body = functions[0].body[1 if ast.get_docstring(functions[0]) else 0 :]
        source.one("loaded_groups_map = ...", within=functions[0])
        if source.text(body[-1]) != "return final_groups":
            raise NoMatch(f"expected {filtered} to end with `return final_groups`")
        if KEYS in source.text(functions[0].body[0]):
            source.replace_from_to(functions[0].body[0], body[-1], f"{DOCSTRING}\n{FILTER}")
        else:
            source.replace_from_to(body[0], body[-1], FILTER)
    else:
        for function, saved in zip(functions, LOADS.values(), strict=True):
            groups = f"{saved}['param_groups']"
            text = f"""{groups} = {CALL}(
    self.optimizer.param_groups, {groups}, params_of={groups}
)"""
            source.insert_before(
                source.one(f"self.optimizer.load_state_dict({saved})", within=function), text
            )
    if not has_keys:
        source.insert_before(
            source.class_named("MegatronOptimizer"), f"{KEYS} = {param_group_identifier_keys}"
        )
    for inserted in FUNCTIONS:
        source.insert_function_before(source.class_named("MegatronOptimizer"), inserted)


@fix.edit(DISTRIB_OPTIMIZER)
def pair_groups_of_distributed_optimizer(source: Source) -> None:
    """The distributed optimizer has its own code for this."""
    load = source.function("DistributedOptimizer.load_state_dict")
    imported = [
        node
        for node in source.tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "optimizer"
    ]
    if len(imported) != 1:
        raise NoMatch(f"expected one `from .optimizer import ...`, found {len(imported)}")
    if imported[0].level != 1 or any(alias.asname for alias in imported[0].names):
        raise NoMatch(
            f"expected plain names in `from .optimizer import ...`, found `{source.text(imported[0])}`"
        )
    names = [alias.name for alias in imported[0].names]
    source.skip_if(f"{CALL}(...)", CALL in names, within=load)
    first, last = matching_by_key(source, load) if KEYS in names else (None, None)
    if first and last:
        check_keys_are_used_between(source, first, last)
        source.replace_from_to(first, last, f"{INNER}\n{IN_ORDER}", about=KEYS)
    else:
        source.one(INNER, within=load)
        by_index = "{**group, 'params': list(inner_state_dict['param_groups'][idx]['params'])}"
        groups = source.one(
            f"state_dict_param_groups = [{by_index} for idx, group in ...]", within=load
        )
        source.replace(groups, IN_ORDER)
    source.replace(imported[0], import_of(sorted({*names} - {KEYS} | {CALL}, key=upstreams_order)))


def matching_by_key(source: Source, load: Function) -> "tuple[ast.stmt, ast.stmt]":
    """The first and the last statement of the matching by `param_group_identifier_keys`."""
    first = source.function("DistributedOptimizer.load_state_dict.make_needed_groups")
    start = load.body.index(first)
    block = load.body[start : start + 6]
    kinds = [ast.FunctionDef, ast.Assign, ast.For, ast.Assign, ast.Assign, ast.For]
    assigned = ["param_groups_map = {}", INNER, "state_dict_param_groups = []"]
    if [type(node) for node in block] != kinds or [
        source.text(block[index]) for index in (1, 3, 4)
    ] != assigned:
        raise NoMatch(
            f"expected the matching by {KEYS} in {load.name}, found other code behind make_needed_groups"
        )
    return first, block[-1]


def check_keys_are_used_between(source: Source, first: "ast.stmt", last: "ast.stmt") -> None:
    """Raise NoMatch if other code uses the keys, whose import goes."""
    lines = range(first.lineno, (last.end_lineno or last.lineno) + 1)
    others = [node.lineno for node in source.all(KEYS) if node.lineno not in lines]
    if others:
        raise NoMatch(f"expected {KEYS} in the matching alone, found it in line {others[0]}, too")


def upstreams_order(name: str) -> "tuple[bool, str]":
    """The sort key of isort: classes first."""
    return not name[0].isupper(), name


def import_of(names: "list[str]") -> str:
    line = f"from .optimizer import {', '.join(names)}"
    if len(line) <= LONGEST_LINE:
        return line
    return "\n".join(["from .optimizer import (", *(f"    {name}," for name in names), ")"])
