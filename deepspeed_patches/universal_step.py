"""Set the optimizer's step in a universal load, because Adam's bias correction depends on it.

https://github.com/deepspeedai/DeepSpeed/pull/4588
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import AlreadyThere, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import torch

ENGINE = "deepspeed.runtime.engine"
UNIVERSAL_CHECKPOINT = "deepspeed.checkpoint.universal_checkpoint"


def loads_no_step(source: Source) -> bool:
    """Whether the load ignores the step; since 0.14.1 it is loaded with the moments."""
    return b'"step"' not in source.data


fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/4588",),
    symptom="the step count restarts at 1, and the first updates are far too large",
    releases=(("0.12.0", "0.12.2"),),
    stacks="universal load, ZeRO 1 and 2",
    silent=True,
    concerns=UNIVERSAL_CHECKPOINT,
    where=loads_no_step,
    test="tests/unit/checkpoint/test_universal_step.py",
)

SET = """if load_zero_checkpoint:
    self._set_optimizer_step()"""


class DeepSpeedEngine:
    """The method to insert into the class, and what it uses."""

    optimizer: "Any"
    global_steps: int
    skipped_steps: int

    def _set_optimizer_step(self) -> None:
        """Set the step to the loaded states' steps, plus one for the optimizer's initial step."""
        step = self.global_steps - self.skipped_steps + 1
        inner_optimizer = self.optimizer.optimizer
        for state in [*inner_optimizer.param_groups, *inner_optimizer.state.values()]:
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].fill_(step)
            elif "step" in state:
                state["step"] = step


@fix.edit(ENGINE)
def set_the_step(source: Source) -> None:
    """Upstream keeps the step of the new run."""
    if b"update_optimizer_step(" in source.data:  # its definition or a call; checks only the text: parsing takes long
        raise AlreadyThere
    load = source.function("DeepSpeedEngine.load_checkpoint")
    method = DeepSpeedEngine._set_optimizer_step
    source.check_parts({**source.functions_there("DeepSpeedEngine.", method), SET: source.has(SET, within=load)})
    source.insert_after(source.one("self.optimizer.update_lp_params()", within=load), SET)
    source.insert_method_before(load, method)
