"""Load a universal checkpoint with `deepspeed.moe` experts on any number of expert-parallel ranks.

https://github.com/deepspeedai/DeepSpeed/issues/5716
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from typing import Any

    import torch

BASE_OPTIMIZER = "deepspeed.runtime.base_optimizer"
STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/5716",
        "https://github.com/deepspeedai/DeepSpeed/pull/5681",
    ),
    symptom="other experts are loaded on more ranks, or `FileNotFoundError`",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="universal load, ZeRO 1 and 2, `deepspeed.moe`",
    silent=True,
    test="tests/unit/checkpoint/test_universal_experts.py",
)

LOAD = "ZeROOptimizer.load_hp_checkpoint_state_from_checkpoint_dir"
NAME, NAME_OF_FOLDER = "self.param_names[lp]", "folder_names[lp]"
# As long as the text that it replaces, so that the line breaks stay.
SAVED, SETTINGS = "optim_sd['param_groups']", "settings_of_saved_groups"
PREPARED = (
    "folder_names = _folder_names(self.param_names, checkpoint_dir)",
    f"{SETTINGS} = _settings_to_load(self.optimizer.param_groups, {SAVED})",
)
GROUPS = "zip(self.optimizer.param_groups, {})"


def _folder_names(param_names: "dict[torch.Tensor, str]", checkpoint_dir: str) -> "dict[torch.Tensor, str]":
    """Return the names of the parameters' folders in a universal checkpoint.

    Ranks number their own experts from 0, but folders have global expert numbers: with the prefix
    `global_` if several expert-parallel ranks saved them, without it if one rank saved them all.
    """
    from deepspeed.utils import groups

    experts = "deepspeed_moe.experts.deepspeed_experts."
    numbers: dict[str, set[str]] = {}
    for name in param_names.values():
        layer, found, rest = name.rpartition(experts)
        if found:
            numbers.setdefault(layer, set()).add(rest.partition(".")[0])
    names = dict(param_names)
    for lp, name in param_names.items():
        layer, found, rest = name.rpartition(experts)
        if found and hasattr(lp, "group_name"):
            number, _, of_expert = rest.partition(".")
            first = groups._get_expert_parallel_rank(lp.group_name) * len(numbers[layer])
            plain, marked = (f"{layer}{experts}{mark}{first + int(number)}.{of_expert}" for mark in ("", "global_"))
            is_there = {one: os.path.isdir(os.path.join(checkpoint_dir, one)) for one in (plain, marked)}
            names[lp] = plain if is_there[plain] and not is_there[marked] else marked
    return names


def _settings_to_load(param_groups: "list[dict[str, Any]]", saved: "list[dict[str, Any]]") -> "list[dict[str, Any]]":
    """Return the saved settings for each param group.

    Expert groups keep their own names, which identify their ranks. If the number of expert groups
    differs from the saved one, all saved expert groups must have the same settings.
    """
    of_experts = [dict(group) for group in saved if group.get("moe")]
    for group in of_experts:
        group.pop("name", None)
        group.pop("params", None)
    if not of_experts:
        return saved
    others = [group for group in saved if not group.get("moe")]
    count = sum(bool(group.get("moe")) for group in param_groups)
    if count != len(of_experts) and all(group == of_experts[0] for group in of_experts):
        of_experts = of_experts[:1] * count
    if (count, len(param_groups) - count) != (len(of_experts), len(others)):
        expected = f"{len(of_experts)} param groups of experts, of different settings, and {len(others)} others"
        advice = "make groups of another size, or resume on the number of expert-parallel ranks that has saved"
        found = f"{count} and {len(param_groups) - count}"
        raise ValueError(f"expected {expected}, as in the checkpoint, found {found}; {advice}")
    return [(of_experts if group.get("moe") else others).pop(0) for group in param_groups]


@fix.edit(BASE_OPTIMIZER)
def load_each_expert_by_its_number(source: Source) -> None:
    """Upstream uses an expert's number on its rank, and the group's ranks from the checkpoint."""
    load = source.function(LOAD)
    source.skip_if(*PREPARED, NAME_OF_FOLDER, GROUPS.format(SETTINGS), _folder_names, _settings_to_load, within=load)
    source.replace(source.one(NAME, within=load), NAME_OF_FOLDER)
    source.replace(source.one(GROUPS.format(SAVED), within=load).args[1], SETTINGS)
    source.insert_before(source.loop("i, (param_group, loaded_param_group)", within=load), "\n".join(PREPARED))
    for function in (_folder_names, _settings_to_load):
        source.insert_function_before("DeepSpeedOptimizer", function)
