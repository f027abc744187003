"""Load the moments of all param groups from a universal checkpoint, also before the run's first step.

https://github.com/deepspeedai/DeepSpeed/pull/5263
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import AlreadyThere, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import torch

    lazy_init_hp_params_optimizer_state: Any = None

STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
BF16_OPTIMIZER = "deepspeed.runtime.bf16_optimizer"


def loads_into_states_of_a_step(source: Source) -> bool:
    """Whether the load uses states that a step created (0.13.2 to 0.14.0). Checks only the text."""
    return all(name in source.data for name in (b"def _load_hp_checkpoint_state(", b"_lazy_init_hp_params_"))


fix = Fix(
    __name__,
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/pull/5263",
        "https://github.com/deepspeedai/DeepSpeed/pull/5104",
    ),
    symptom="only the first group's moments load, or `'NoneType' ... 'keys'`",
    releases=(("0.13.2", "0.14.0"),),
    stacks="universal load, ZeRO 1 and 2",
    silent=True,
    concerns=STAGE_1_AND_2,
    where=loads_into_states_of_a_step,
    test="tests/unit/checkpoint/test_universal_all_moments.py",
)


class ZeROOptimizer:
    """The method to insert into DeepSpeedZeroOptimizer and BF16_Optimizer, and what it uses."""

    optimizer: "torch.optim.Optimizer"

    def _link_states_to_load(self, lp_groups: "list[list[torch.Tensor]]") -> None:
        """Link all parameters to their states. A step with zero gradients creates missing states.

        That step changes nothing else: the partition is restored, and the load sets the step count.
        """
        param_groups = self.optimizer.param_groups
        for i, param_group in enumerate(param_groups):
            flat_hp_partition = param_group["params"][0]
            if not self.optimizer.state[flat_hp_partition]:
                values, grad = flat_hp_partition.detach().clone(), flat_hp_partition.grad
                flat_hp_partition.grad = torch.zeros_like(flat_hp_partition)
                self.optimizer.param_groups = [param_group]
                self.optimizer.step()
                self.optimizer.param_groups = param_groups
                flat_hp_partition.grad = grad
                flat_hp_partition.data.copy_(values)
            lazy_init_hp_params_optimizer_state(lp_groups[i], flat_hp_partition, self.optimizer.state)
        self._hp_optimizer_states_linked = True


@fix.edit(STAGE_1_AND_2)
def link_states_of_stage_1_and_2(source: Source) -> None:
    """Upstream loads only linked states: none before a step, and the first group's after it."""
    _link_states(source, "DeepSpeedZeroOptimizer", "bit16_groups")


@fix.edit(BF16_OPTIMIZER)
def link_states_of_bf16_optimizer(source: Source) -> None:
    """Here upstream links no group before a step, and all groups after it."""
    _link_states(source, "BF16_Optimizer", "bf16_groups")


def _link_states(source: Source, owner: str, groups: str) -> None:
    load = source.function(f"{owner}._load_hp_checkpoint_state")
    link = f"self._link_states_to_load(self.{groups})"
    source.check_parts(
        {
            **source.functions_there(f"{owner}.", ZeROOptimizer._link_states_to_load),
            link: source.has(link, within=load),
        }
    )
    source.insert_before(source.loop("i, _", within=load), link)
    source.insert_method_before(load, ZeROOptimizer._link_states_to_load)


@fix.edit("deepspeed.runtime.engine")
def count_no_step_of_the_set_up(source: Source) -> None:
    """Up to 0.13.1 the optimizer took a step at its setup, and was one ahead of the iterations."""
    load = source.function("DeepSpeedEngine.load_checkpoint")
    update = "self.update_optimizer_step(step=client_states['iteration'])"
    if source.has(update, within=load):
        raise AlreadyThere
    source.replace(source.one(update.replace("])", "] + 1)"), within=load), update)
