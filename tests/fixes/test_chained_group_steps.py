"""chained_group_steps: experts keep their step in a resume where the first pipeline stage has no experts."""

from pathlib import Path
from typing import Any

import pytest

from trainers.lazy import mt
from upstream import affected, called, outcomes

# The steps of the groups with parameters on the second stage: those of the dense layer, those of the expert.
test_experts_lose_their_step, test_experts_keep_their_step = outcomes(
    __file__, "resume", [2, 2, None, None], [2, 2, 2, 2], rank=1, layout=[2, 2]
)


@pytest.mark.parametrize("delivery", ["none", "hook"])
@pytest.mark.parametrize("version", affected("chained_group_steps"))
def test_with_torchs_adam_experts_keep_their_step(version: str, delivery: str) -> None:
    """By dp_zero_empty_state, which counts the steps of an optimizer without parameters."""
    on: dict[str, Any] = {"version": version, "delivery": delivery, "layout": [2, 2]}
    if delivery == "hook":
        assert called(__file__, "resume", "torch", **on)[1] == [2, 2, 2, 2]
        return
    with pytest.raises(AssertionError, match="RankError: AssertionError"):
        called(__file__, "resume", "torch", **on)


# What the ranks run


def resume(rank: int, folder: Path, inner: str = "fused") -> list[Any]:
    """Two pipeline stages train, save in fully_reshardable, and resume. Returns the steps of groups with parameters."""
    mt.use_inner_optimizer(inner)
    model, optimizer = mt.build(make_model=stage)
    for iteration in range(2):
        mt.step(model, optimizer, iteration)
    mt.save("fully_reshardable", model, optimizer, folder)
    resumed, of_resumed = mt.build(make_model=stage)
    mt.load("fully_reshardable", resumed, of_resumed, folder)
    return [step for part in of_resumed.chained_optimizers for step in steps(part.optimizer, inner)]


def steps(optimizer: Any, inner: str) -> list[Any]:
    """The steps of the groups with parameters; torch's Adam keeps them in the states of the parameters."""
    if inner == "torch":
        return [state["step"].item() for state in optimizer.state.values()]
    return [group.get("step") for group in optimizer.param_groups if group["params"]]


def stage(config: Any, dtype: Any, native_fp32: bool) -> Any:
    """A dense layer on the first pipeline stage; on the second, another one and an expert."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.module import MegatronModule

    class Stage(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            if parallel_state.is_pipeline_first_stage():
                self.layers = torch.nn.ModuleDict({"a": torch.nn.Linear(16, 16)})
                return
            self.layers = torch.nn.ModuleDict({"second_a": torch.nn.Linear(16, 16), "expert": torch.nn.Linear(16, 16)})
            for parameter in self.layers["expert"].parameters():
                parameter.allreduce = False  # as Megatron marks parameters of experts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return x

    return Stage().to(dtype)
