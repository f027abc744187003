"""Give each param group the settings that were saved for it: not those at its index, nor those of one that looks alike.

https://github.com/NVIDIA/Megatron-LM/pull/4705
"""

import ast
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from logging import getLogger

    import torch

    logger = getLogger(__name__)

PARAM_GROUPS = "megatron.core.optimizer.__init__"


def groups_may_look_alike(source: Source) -> bool:
    """In 0.14.0 to 0.15.3 all ranks have the same groups, and the keys by which they are paired tell all apart."""
    keys_tell_all_apart = (
        "assert set(param_group.keys()) - set(param_group_identifier_keys) == {'params'}"
    )
    same_on_all_ranks = "torch.distributed.all_gather_object(gathered_params_key, params_key)"
    return not (source.has(keys_tell_all_apart) and source.has(same_on_all_ranks))


fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/pull/4705",),
    symptom="a param group resumes with another group's weight decay or learning rate",
    releases=(("0.7.0", "0.13.1"), ("0.16.0", newest("megatron-core"))),
    stacks="pipeline stages; `--decoupled-lr` or muP; from 0.19.0 a new `--lr`",
    silent=True,
    stages=("groups",),
    concerns=PARAM_GROUPS,
    where=groups_may_look_alike,
    test="tests/unit_tests/dist_checkpointing/test_resume_param_groups.py",
)

OPTIMIZER = "megatron.core.optimizer.optimizer"
DISTRIB_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
LONGEST_LINE = 100  # of upstream's formatter


def _param_group_traits(group: "dict[str, Any]") -> "tuple[Any, ...]":
    """What a param group is told by: its kind, whether its rate is its own, and its rates.

    NeMo writes `pre_` in front of the multipliers' names. That a rate is a group's own is in
    `is_decoupled_lr`, or in `default_config`.
    """
    kind = (
        group.get("wd_mult", group.get("pre_wd_mult", 1.0)),
        group.get("lr_mult", group.get("pre_lr_mult", 1.0)),
        bool(group.get("is_expert_parallel")),
    )
    own_rate = bool(group.get("is_decoupled_lr")) or group.get("default_config") is False
    rates = (group.get(key) for key in ("max_lr", "min_lr", "start_wd", "end_wd", "eps"))
    return kind, own_rate, tuple(rates)


def _param_group_text(group: "dict[str, Any]") -> str:
    """What a param group is told by, for people."""
    (wd_mult, lr_mult, of_experts), own_rate, rates = _param_group_traits(group)
    found = [f"wd_mult {wd_mult}", f"lr_mult {lr_mult}"]
    names = ("max_lr", "min_lr", "start_wd", "end_wd", "eps")
    found += [f"{name} {rate}" for name, rate in zip(names, rates, strict=True) if rate is not None]
    found += ["experts"] if of_experts else []
    found += ["a rate of its own"] if own_rate else []
    found += [f"optimizer {group['optimizer']}"] if "optimizer" in group else []
    return ", ".join(found)


def _alike_param_groups(current: "list[Any]", saved: "list[Any]") -> "Iterable[Any]":
    """Pairs of (index, traits) where several saved groups are the same, as many as this run has.

    An earlier resume has put one group's settings on others: they trained on with these.
    """
    alike = len({traits for _, traits in saved}) == 1
    return zip(current, saved, strict=True) if alike and len(current) == len(saved) > 1 else ()


def _param_groups_by_rates(current: "list[Any]", saved: "list[Any]") -> "Iterable[Any]":
    """Pairs of (index, traits) in the order of the rates, which a new learning rate keeps."""

    def rates(group: "tuple[Any, ...]") -> "list[Any]":
        return [(rate is not None, rate or 0.0) for rate in group[1][-1]]

    different = [len({traits[-1] for _, traits in side}) for side in (current, saved)]
    if len(current) != len(saved) or different != [len(current), len(saved)]:
        return ()
    return zip(sorted(current, key=rates), sorted(saved, key=rates), strict=True)


def _pair_param_groups(
    current_groups: "list[dict[str, Any]]", saved_groups: "list[dict[str, Any]]"
) -> "list[int]":
    """Index of the saved param group whose settings each of this run's groups takes.

    Neither the order of the groups nor their number is the same on all pipeline stages and in all
    versions. They are paired by what they are, one of the same kind with one, none twice.

    Args:
        current_groups (list[dict]): the param groups of this run's optimizer.
        saved_groups (list[dict]): those of the checkpoint.

    Raises:
        ValueError: a group of this run has no counterpart, or it cannot be told which one it is.
    """

    def by(
        common: "Callable[..., Any]", groups: "list[dict[str, Any]]", taken: "Collection[int]"
    ) -> "dict[Any, Any]":
        found: dict[Any, list[Any]] = {}
        for index, group in enumerate(groups):
            if index not in taken:
                traits = _param_group_traits(group)
                key = common(*traits), group.get("optimizer") if optimizers_are_known else None
                found.setdefault(key, []).append((index, traits))
        return found

    steps = (
        (lambda kind, own_rate, rates: kind, _alike_param_groups),
        (lambda kind, own_rate, rates: (kind, own_rate, rates), zip),
        (lambda kind, own_rate, rates: (kind, own_rate), _param_groups_by_rates),
        # A checkpoint may not say whose a rate is.
        (lambda kind, own_rate, rates: (kind, rates), zip),
    )
    both = (*current_groups, *saved_groups)
    optimizers_are_known = all("optimizer" in group for group in both)
    pairs: dict[int, int] = {}
    for common, pair in steps:
        saved = by(common, saved_groups, pairs.values())
        for key, groups in by(common, current_groups, pairs).items():
            pairs.update((own[0], other[0]) for own, other in pair(groups, saved.get(key, [])))
    if len(pairs) < len(current_groups):
        found = [
            f"  {index}: {_param_group_text(group)}" for index, group in enumerate(saved_groups)
        ]
        wanted = [
            f"  {_param_group_text(group)}: {pairs.get(index, 'cannot be told')}"
            for index, group in enumerate(current_groups)
        ]
        raise ValueError(
            "Cannot tell whose settings a param group resumes with. Expected in the checkpoint, for"
            " each group of this run, one with the same wd_mult, lr_mult and experts, and where"
            " several have these, the same rates or as many groups as here. Found in the"
            " checkpoint\n"
            + "\n".join(found)
            + "\nand in this run, with the number of the saved group\n"
            + "\n".join(wanted)
            + "\nResume with the options for learning rates and weight decay that the checkpoint"
            " was saved with, or without the optimizer's state."
        )
    return [pairs[index] for index in range(len(pairs))]


def saved_param_groups_in_order(
    current_groups: "list[dict[str, Any]]",
    saved_groups: "list[dict[str, Any]]",
    params_of: "list[dict[str, Any]]",
) -> "list[dict[str, Any]]":
    """The saved settings for each of this run's param groups.

    Args:
        current_groups (list[dict]): the param groups of this run's optimizer.
        saved_groups (list[dict]): those of the checkpoint.
        params_of (list[dict]): the groups whose `params` are taken, in this order.

    Raises:
        ValueError: it cannot be told which saved group is whose.
    """
    found = [saved_groups[index] for index in _pair_param_groups(current_groups, saved_groups)]
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        for current, saved in zip(current_groups, found, strict=True):
            if _param_group_traits(current) != _param_group_traits(saved):
                logger.warning(
                    f"The param group of this run with {_param_group_text(current)} resumes with"
                    f" the settings saved for {_param_group_text(saved)}. These rates hold as"
                    " well, unless override_opt_param_scheduler is set."
                )
    return [
        {**saved, "params": group["params"]} for saved, group in zip(found, params_of, strict=False)
    ]


FUNCTIONS = (
    _param_group_traits,
    _param_group_text,
    _alike_param_groups,
    _param_groups_by_rates,
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
    state_dict_groups (List[Dict]): those of the checkpoint.

Returns:
    List[Dict]: one group for each current one, in the order of those.

Raises:
    ValueError: a current group has no counterpart, or more than one.
"""'''
KEYS = "param_group_identifier_keys"
OVERRIDE_KEYS = "_param_group_override_keys"
COMMENT = """# Per-group keys that the param groups of the common state are sorted by, so that two saves of one
# run agree; a load pairs groups with ``saved_param_groups_in_order``. The fields of
# ``ParamGroupOverride`` are read from its annotations; ``_get_param_groups`` sets the others."""
INNER = "inner_state_dict = self.optimizer.state_dict()"
IN_ORDER = f"""state_dict_param_groups = {CALL}(
    inner_state_dict["param_groups"],
    state_dict["optimizer"]["param_groups"],
    params_of=inner_state_dict["param_groups"],
)"""
# Up to 0.13.1 each of these two hands the saved groups to the inner optimizer as they are.
LOADS = {
    "Float16OptimizerWithFloat16Params": "state_dict[optimizer_key]",
    "FP32Optimizer": "state_dict",
}


@fix.edit(OPTIMIZER)
def pair_groups(source: Source) -> None:
    """Upstream takes the last of those that look alike since 0.14, and before that what is at the same index."""
    filtered = "MegatronOptimizer._filter_and_reorder_param_groups"
    by_key = source.has_function(filtered)
    loads = [filtered] if by_key else [f"{name}.load_state_dict" for name in LOADS]
    functions = [source.function(name) for name in loads]
    source.check_parts(
        {
            **source.functions_there("", *FUNCTIONS),
            **{
                f"{CALL} in {name}": source.has(f"{CALL}(...)", where)
                for name, where in zip(loads, functions, strict=True)
            },
        }
    )
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
    for inserted in FUNCTIONS:
        source.insert_function_before(source.class_named("MegatronOptimizer"), inserted)
    if source.has_function(OVERRIDE_KEYS):
        source.replace_comment_above(source.function(OVERRIDE_KEYS), "MegatronOptimizer", COMMENT)


@fix.edit(DISTRIB_OPTIMIZER)
def pair_groups_of_distributed_optimizer(source: Source) -> None:
    """It has code of its own for the same."""
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
    source.check_parts(
        {
            f"{CALL} is imported": CALL in names,
            f"{CALL} is called": source.has(f"{CALL}(...)", load),
        }
    )
    first, last = matching_by_key(source, load) if KEYS in names else (None, None)
    if first and last:
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


def upstreams_order(name: str) -> "tuple[bool, str]":
    """Classes first, as isort has it."""
    return not name[0].isupper(), name


def import_of(names: "list[str]") -> str:
    line = f"from .optimizer import {', '.join(names)}"
    if len(line) <= LONGEST_LINE:
        return line
    return "\n".join(["from .optimizer import (", *(f"    {name}," for name in names), ")"])
