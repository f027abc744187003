"""Resume each param group with the settings that were saved for it, not with those of another group.

More than 150 lines: checkpoints of other rates, names or releases load as with version 0.2.

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
KEYS = "param_group_identifier_keys"  # a module's name for the keys since 0.13
CALL = "_saved_param_groups_in_order(...)"
FILTER = """return MegatronOptimizer._saved_param_groups_in_order(
    current_groups, state_dict_groups, state_dict_groups, param_group_identifier_keys
)"""
INNER = "inner_state_dict = self.optimizer.state_dict()"
IN_ORDER = """state_dict_param_groups = self._saved_param_groups_in_order(
    inner_state_dict["param_groups"],
    state_dict["optimizer"]["param_groups"],
    inner_state_dict["param_groups"],{keys}
)"""
# Up to 0.13.1 each of these two passes the saved groups unchanged to the inner optimizer.
LOADS = {
    "Float16OptimizerWithFloat16Params": "state_dict[optimizer_key]",
    "FP32Optimizer": "state_dict",
}


def _param_group_traits(
    group: "dict[str, Any]", keys: "tuple[str, ...]"
) -> "tuple[dict[str, Any], dict[str, Any]]":
    """Return the kind and the rates of a param group, which together identify it.

    NeMo adds the prefix `pre_` to the multipliers' names. `is_decoupled_lr` or `default_config`
    shows that a group has its own rate; its own weight decay is in the group itself.
    """
    rates = {key: group.get(key) for key in ("max_lr", "min_lr", "start_wd", "end_wd", "eps")}
    kind = {key: group.get(key, group.get(f"pre_{key}")) for key in keys if key not in rates}
    for key in ("wd_mult", "lr_mult"):
        kind[key] = 1.0 if kind[key] is None else kind[key]
    kind["is_expert_parallel"] = bool(kind["is_expert_parallel"])
    kind["is_decoupled_lr"] = bool(kind["is_decoupled_lr"]) or group.get("default_config") is False
    kind["own_weight_decay"] = rates["start_wd"] is not None or rates["end_wd"] is not None
    return kind, rates


def _param_group_text(group: "dict[str, Any]", keys: "tuple[str, ...]") -> str:
    """Format the traits of a param group for messages."""
    kind, rates = _param_group_traits(group, keys)
    found = {**kind, **rates}.items()
    return ", ".join(
        f"{key} {value}" for key, value in found if value is not None and value is not False
    )


def _pair_param_groups(
    groups: "list[dict[str, Any]]", saved_groups: "list[dict[str, Any]]", keys: "tuple[str, ...]"
) -> "dict[int, int]":
    """Map the index of each param group of this run to its saved group, if it is unambiguous.

    The order and the number of groups differ between pipeline stages. Groups of a kind are paired
    if all were saved with the same rates, if each side has only one group of the kind, or if an
    earlier resume gave all of them the same settings.
    """
    ours = [_param_group_traits(group, keys) for group in groups]
    theirs = [_param_group_traits(group, keys) for group in saved_groups]
    if not all("optimizer" in group for group in (*groups, *saved_groups)):
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
                    for n, other in enumerate(side)
                    if {**other[0], **own_rate} == {**kind, **own_rate}
                ]
                for side in (ours, theirs)
            )
            if len(alike) == len(saved) > 1 and all(theirs[n] == theirs[saved[0]] for n in saved):
                pairs[index] = saved[alike.index(index)]
    return pairs


class MegatronOptimizer:
    """The method to insert into upstream's class."""

    @staticmethod
    def _saved_param_groups_in_order(
        current_groups: "list[dict[str, Any]]",
        saved_groups: "list[dict[str, Any]]",
        params_of: "list[dict[str, Any]]",
        keys: "tuple[str, ...]" = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"),
    ) -> "list[dict[str, Any]]":
        """Return the saved settings for each of this run's param groups.

        Args:
            current_groups (list[dict]): the param groups of this run's optimizer.
            saved_groups (list[dict]): the param groups of the checkpoint.
            params_of (list[dict]): groups that provide the `params`, in the same order.
            keys (tuple[str]): settings that identify a group.

        Raises:
            ValueError: a group's saved settings cannot be determined.
        """
        pairs = _pair_param_groups(current_groups, saved_groups, keys)
        ours, theirs = (
            [_param_group_text(group, keys) for group in groups]
            for groups in (current_groups, saved_groups)
        )
        if len(pairs) < len(ours):
            raise ValueError(
                "Cannot tell whose settings a param group resumes with. Expected in the checkpoint"
                " all groups of a kind with the rates of this run, or one of the kind. Found in"
                " this run, with the number of the saved group,\n"
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


FUNCTIONS = (_param_group_traits, _param_group_text, _pair_param_groups)


@fix.edit("megatron.core.optimizer.__init__")
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
    """Since 0.13 upstream uses the last of several similar groups; before, the group at the same index."""
    filtered = "MegatronOptimizer._filter_and_reorder_param_groups"
    by_key = source.function_of(filtered, ("0.13.0", newest("megatron-core"))) is not None
    loads = [filtered] if by_key else [f"{name}.load_state_dict" for name in LOADS]
    functions = [source.function(name) for name in loads]
    method = MegatronOptimizer._saved_param_groups_in_order
    owner = "MegatronOptimizer" if by_key else "self"
    calls = ((f"{owner}.{CALL}", function) for function in functions)
    source.skip_if(*calls, method, *FUNCTIONS)
    if by_key:
        source.one("loaded_groups_map = ...", within=functions[0])
        body = functions[0].body[1 if ast.get_docstring(functions[0]) else 0 :]
        if source.text(body[-1]) != "return final_groups":
            raise NoMatch(f"expected {filtered} to end with `return final_groups`")
        source.replace(body[0], FILTER, last=body[-1])
    for function, saved in () if by_key else zip(functions, LOADS.values(), strict=True):
        groups = f"{saved}['param_groups']"
        text = f"""{groups} = self._saved_param_groups_in_order(
    self.optimizer.param_groups, {groups}, {groups}
)"""
        load = source.one(f"self.optimizer.load_state_dict({saved})", within=function)
        source.insert_before(load, text)
    base = source.class_named("MegatronOptimizer")
    source.insert_method_before(base.body[-1], method)
    for inserted in FUNCTIONS:
        source.insert_function_before(base, inserted)


@fix.edit(DISTRIB_OPTIMIZER)
def pair_groups_of_distributed_optimizer(source: Source) -> None:
    """The distributed optimizer has its own code for this."""
    load = source.function("DistributedOptimizer.load_state_dict")
    source.skip_if(f"self.{CALL}", within=load)
    if source.imports(KEYS):  # since 0.14
        first, last = matching_by_key(source, load)
        in_order = IN_ORDER.format(keys=f"\n    {KEYS},")
        source.replace(
            first, f"{INNER}\n{in_order}", last=last, about="Pair each current param_group"
        )
        return
    source.one(INNER, within=load)
    by_index = "{**group, 'params': list(inner_state_dict['param_groups'][idx]['params'])}"
    groups = f"state_dict_param_groups = [{by_index} for idx, group in ...]"
    source.replace(source.one(groups, within=load), IN_ORDER.format(keys=""))


def matching_by_key(source: Source, load: Function) -> "tuple[ast.stmt, ast.stmt]":
    """The first and the last statement of the matching by `param_group_identifier_keys`. Raises NoMatch."""
    first = source.function("DistributedOptimizer.load_state_dict.make_needed_groups")
    start = load.body.index(first)
    block = load.body[start : start + 6]
    kinds = [ast.FunctionDef, ast.Assign, ast.For, ast.Assign, ast.Assign, ast.For]
    assigned = ["param_groups_map = {}", INNER, "state_dict_param_groups = []"]
    found = [source.text(node) for node in block[1:5] if isinstance(node, ast.Assign)]
    if [type(node) for node in block] != kinds or found != assigned:
        raise NoMatch(
            f"expected the matching by {KEYS} in {load.name}, found other code behind make_needed_groups"
        )
    return first, block[-1]
