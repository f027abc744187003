"""Save and load the fp32 master weights of FusedAdam, and load its moments in fp32.

https://github.com/NVIDIA/apex/pull/1625
"""

from collections.abc import Iterator
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NoMatch, NotNeeded, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import warnings

    import torch

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/apex/pull/1625",),
    symptom="the first step after a resume goes to the initial weights, or to NaN",
    releases=(("0.1", "0.1"),),
    stacks="FusedAdam, `capturable=True, master_weights=True`, fp16 weights",
    silent=True,
    test="tests/L0/run_optimizers/test_fused_adam_masters.py",
)

CHECK = "self._check_loaded_masters()"
NONE_LOADED = "self._loaded_masters = []"


class Optimizer:
    """The used part of torch's class."""

    param_groups: "list[dict[str, Any]]"
    state: "dict[torch.Tensor, dict[str, torch.Tensor]]"

    state_dict: Any
    load_state_dict: Any


class FusedAdam(Optimizer):
    """The methods to insert into upstream's class, and what they use."""

    param_groups_master: "list[dict[str, Any]]"
    _loaded_masters: "list[tuple[torch.Tensor, torch.Tensor, bool]]"

    def _masters(
        self, param_groups: "list[dict[str, Any]]"
    ) -> "Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]":
        """Yield each parameter's index in a state dict, the parameter, and its master weight.

        The last is None without master weights, and for BF16 params, which step() updates directly.
        """
        for group, group_master, saved in zip(
            self.param_groups, self.param_groups_master, param_groups, strict=False
        ):
            for p, master, index in zip(
                group["params"], group_master["params"], saved["params"], strict=True
            ):
                yield index, p, None if p.dtype == torch.bfloat16 else master

    def state_dict(self) -> "dict[str, Any]":
        """Return the optimizer state, with each FP32 master weight as ``master_param``."""
        state_dict: dict[str, Any] = super().state_dict()
        for index, _, master in self._masters(state_dict["param_groups"]):
            if master is not None:
                state = state_dict["state"].get(index, {})
                state_dict["state"][index] = {**state, "master_param": master}
        return state_dict

    def load_state_dict(self, state_dict: "dict[str, Any]") -> None:
        """Load a state. Moments and master weights are FP32, whatever the dtype of their parameter.

        Master weights that are not in the state are copied from the parameters at the next step.
        """
        super().load_state_dict(state_dict)
        self._loaded_masters = []
        rounded = 0
        for index, p, master in self._masters(state_dict["param_groups"]):
            saved = state_dict["state"].get(index, {})
            state = self.state.pop(p, {})
            state.pop("master_param", None)
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name] = saved[name].to(p.device, torch.float32, copy=True)
            if state:
                self.state[p] = state
            if master is not None:
                is_saved = "master_param" in saved
                master.copy_(saved["master_param"] if is_saved else p.detach())
                self._loaded_masters.append((p, master, is_saved))
                rounded += not is_saved and p.dtype != torch.float32
        if rounded:
            warnings.warn(
                f"The state has no FP32 master weights of {rounded} parameters, as it was saved "
                "without them. They are copied from the parameters: their rounding is lost.",
                stacklevel=2,
            )

    def _check_loaded_masters(self) -> None:
        """Check loaded master weights before a step: parameters may have been loaded later."""
        without_grad, differ = [], 0
        for p, master, is_saved in self._loaded_masters:
            if p.grad is None:
                without_grad.append((p, master, is_saved))
            elif torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "Expected the first step after load_state_dict outside of a CUDA graph: it "
                    "compares the loaded master weights with the parameters"
                )
            elif not is_saved:
                master.copy_(p.detach())
            elif not torch.allclose(master.to(p.dtype), p, rtol=0, atol=0, equal_nan=True):
                differ += 1
        if differ:
            raise RuntimeError(
                f"Expected loaded master weights that round to the parameters, found {differ} of "
                f"{len(self._loaded_masters)} parameters with others. Load the model and the "
                "optimizer from the same checkpoint. To continue from the weights of the model "
                "alone, remove 'master_param' from the states before they are loaded"
            )
        self._loaded_masters = without_grad


METHODS = (
    FusedAdam._masters,
    FusedAdam.state_dict,
    FusedAdam.load_state_dict,
    FusedAdam._check_loaded_masters,
)


@fix.edit("apex.optimizers.fused_adam")
def carry_masters(source: Source) -> None:
    """torch saves only `state`, and a load casts it to the parameter's dtype."""
    step, init = source.function("FusedAdam.step"), source.function("FusedAdam.__init__")
    if "master_weights" not in [argument.arg for argument in init.args.args]:
        raise NotNeeded  # before April 2023; every commit has version 0.1
    source.skip_if((NONE_LOADED, init), CHECK, *METHODS, within=step)
    bf16 = source.branch("p.dtype == torch.bfloat16", within=step)
    if any(source.has("p_master", within=statement) for statement in bf16.body):
        raise NoMatch("expected step() to update BF16 parameters without master weights")
    groups = source.loop("(group, group_master)", step)
    source.insert_before(source.one("import torch"), "import warnings")
    source.insert_after(source.one("self.param_groups_master = []", within=init), NONE_LOADED)
    source.insert_before(groups, CHECK)
    for method in METHODS:
        source.insert_method_before(source.function("FusedAdam.zero_grad"), method)
