"""Let `--override-opt-param-scheduler` override learning rate and weight decay in loaded param groups.

https://github.com/NVIDIA/Megatron-LM/issues/1138
"""

from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NotNeeded, Source

TYPE_CHECKING = False

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/issues/1138",
        "https://github.com/NVIDIA/Megatron-LM/issues/963",
        "https://github.com/NVIDIA/Megatron-LM/pull/1284",
        "https://github.com/NVIDIA/Megatron-LM/pull/5213",
        "https://github.com/NVIDIA/Megatron-LM/issues/7173",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1917",
    ),
    symptom="the checkpoint's learning rate stays in use despite the override",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="`--override-opt-param-scheduler`",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_override_learning_rate.py",
)

SCHEDULER = "megatron.core.optimizer_param_scheduler"
CLASS = "OptimizerParamScheduler"
STEP = "self.step(increment=num_steps)"
UPSTREAMS = "_restore_param_group_scheduler_overrides"  # since Megatron-LM#5213, not in any release


def _bounds_of_param_group(param_group: "dict[str, Any]") -> "dict[str, float]":
    """Return the bounds of learning rate and weight decay in a param group."""
    keys = ("max_lr", "min_lr", "start_wd", "end_wd")
    return {key: param_group[key] for key in keys if key in param_group}


class OptimizerParamScheduler:
    """The method to insert into upstream's class."""

    if TYPE_CHECKING:
        optimizer: Any
        own_bounds: list[dict[str, float]]

    def _restore_own_bounds(self) -> None:
        """Replace the loaded bounds in the param groups by this run's bounds."""
        param_groups = self.optimizer.param_groups
        assert len(param_groups) == len(self.own_bounds), (
            f"expected the {len(self.own_bounds)} param groups that the scheduler was made with,"
            f" found {len(param_groups)}: override_opt_param_scheduler does not know their bounds"
        )
        for param_group, own_bounds in zip(param_groups, self.own_bounds, strict=True):
            for key in _bounds_of_param_group(param_group):
                del param_group[key]
            param_group.update(own_bounds)


REMEMBER = """# A load puts the checkpoint's bounds into the param groups.
self.own_bounds = [
    _bounds_of_param_group(param_group) for param_group in optimizer.param_groups
]
self.bounds_may_be_loaded = False"""
RESTORE = """if self.override_opt_param_scheduler:
    self._restore_own_bounds()"""
REPEAT = """# The optimizer may be loaded, or told other bounds, between this load and the next step.
self.bounds_may_be_loaded = self.override_opt_param_scheduler"""
RESTORE_IN_STEP = """if self.bounds_may_be_loaded:
    self._restore_own_bounds()
    self.bounds_may_be_loaded = False"""


@fix.edit(SCHEDULER)
def keep_own_bounds(source: Source) -> None:
    """Restored in the load and in the step after it: an optimizer load or global bounds may come between them."""
    if source.has_function(f"{CLASS}.{UPSTREAMS}"):
        raise NotNeeded
    init, step, load = (
        source.function(f"{CLASS}.{name}") for name in ("__init__", "step", "load_state_dict")
    )
    source.skip_if(
        ("self.own_bounds = ...", init),
        ("self.bounds_may_be_loaded = self.override_opt_param_scheduler", load),
        ("self._restore_own_bounds()", load),
        ("self._restore_own_bounds()", step),
        _bounds_of_param_group,
        OptimizerParamScheduler._restore_own_bounds,
    )
    source.insert_after(source.one("self.optimizer = optimizer", within=init), REMEMBER)
    source.insert_after(source.one("self.num_steps += increment", within=step), RESTORE_IN_STEP)
    source.insert_at_start(load, RESTORE)
    source.insert_after(source.one(STEP, within=load), REPEAT)
    source.insert_method_before(step, OptimizerParamScheduler._restore_own_bounds)
    source.insert_function_before(CLASS, _bounds_of_param_group)
