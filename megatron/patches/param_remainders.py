"""Load main parameters that were saved as 16-bit remainders, whether or not this run stores remainders.

https://github.com/NVIDIA/Megatron-LM/pull/4222
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import torch

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/pull/4222",),
    symptom="`AssertionError` in `set_scaled_state` at a resume, or wrong main parameters",
    releases=(("0.13.0", "0.19.2"),),
    stacks="precision-aware optimizer, `store_param_remainders` (default)",
    test="tests/unit_tests/dist_checkpointing/test_param_remainders.py",
)

CLASS = "DistributedOptimizer"
KEPT = "tensors = {**tensors, 'param': self._main_param_as_kept(model_param, tensors['param'])}"


class DistributedOptimizer:
    """The method to insert into upstream's class."""

    if TYPE_CHECKING:
        optimizer: Any
        _get_model_param_range_map: Any

    def _main_param_as_kept(self, model_param: "torch.Tensor", saved: "Any") -> "Any":
        """Return a checkpoint's main parameter in the form that this run's optimizer keeps.

        With `store_param_remainders`, the optimizer keeps and saves only the lower 16 bits of a
        bf16 parameter's main param, as int16. Formats that gather the state convert them to fp32.

        Raises:
            ValueError: the run keeps remainders, but the checkpoint has main parameters.
        """
        is_plain = type(model_param.data) is torch.Tensor and model_param.dtype == torch.bfloat16
        if not is_plain or not isinstance(saved, torch.Tensor):
            return saved
        keeps_remainders = getattr(self.optimizer, "store_param_remainders", False)
        flat, size = saved.view(-1), 1 << 14
        pieces = (flat[start : start + size] for start in range(0, flat.numel(), size))
        is_complete = saved.is_floating_point() and any(  # usually decided by the first piece
            bool(((piece != piece.round()) | (piece.abs() > 1 << 15)).any()) for piece in pieces
        )
        if is_complete and not keeps_remainders:
            return saved
        owned = self._get_model_param_range_map(model_param)["param"]
        weights = model_param.detach().view(-1)[owned.start : owned.end]
        values = flat.to(weights.device)
        if saved.is_floating_point() and torch.equal(values.to(weights.dtype), weights):
            is_complete = True  # main params can be integers, too
        if keeps_remainders:
            if is_complete and values.any():
                raise ValueError(
                    "expected remainders of main parameters, found main parameters in the"
                    " checkpoint: resume with store_param_remainders=False"
                )
            return values.to(torch.int16).view_as(saved)
        if is_complete:
            return saved
        remainders = values.int()
        upper = weights.view(torch.int16).int() - (remainders < 0).int()  # undo rounding up
        return ((upper << 16) | (remainders & 0xFFFF)).view(torch.float32).view_as(saved)


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def load_remainders(source: Source) -> None:
    """Transformer Engine's optimizer asserts int16 if it keeps remainders; others load remainders as main params."""
    source.some("self.config.store_param_remainders")  # up to 0.12 the setting is off
    method = DistributedOptimizer._main_param_as_kept
    load = source.function(f"{CLASS}._set_main_param_and_optimizer_states")
    source.skip_if(KEPT, method, within=load)
    first = source.one(
        "group_index, group_order = self.model_param_group_index_map[model_param]", within=load
    )
    source.insert_before(first, KEPT)
    source.insert_method_before(
        source.function(f"{CLASS}._get_main_param_and_optimizer_states"), method
    )
