"""Refresh all copies in the hybrid CPU-offload optimizer if only the model's weights were loaded.

https://github.com/NVIDIA/Megatron-LM/pull/5071
"""

from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NotNeeded, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch
    from megatron.core.fp8_utils import is_float8tensor

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/pull/5071",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3949",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4082",
        "https://github.com/NVIDIA-NeMo/RL/issues/2371",
    ),
    symptom="fine-tuning: the second loss is that of a random model, with CPU offload",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="optimizer CPU offload",
    silent=True,
    test="tests/unit_tests/test_hybrid_offload_reload.py",
)


class HybridDeviceOptimizer:
    """The method to insert into upstream's class."""

    if TYPE_CHECKING:
        gpu_params_map_cpu_copy: dict[torch.Tensor, torch.Tensor]
        param_to_fp32_param: dict[torch.Tensor, torch.Tensor]
        state: dict[torch.Tensor, dict[str, Any]]

    def reload_param(self, param: "torch.Tensor", value: "torch.Tensor") -> None:
        """Set a parameter and every copy of it: the CPU clone, the fp32 working copy, and the
        main parameter in its state.

        Args:
            param (torch.Tensor): a parameter of the param groups.
            value (torch.Tensor): its new value, of the same shape and any precision.
        """
        copies = (
            param,
            self.gpu_params_map_cpu_copy.get(param),
            self.param_to_fp32_param.get(param),
            self.state.get(param, {}).get("master_param"),
        )
        for copy in copies:
            if copy is not None:
                copy.data.copy_(value)


class DistributedOptimizer:
    """The method to insert into upstream's class."""

    if TYPE_CHECKING:
        optimizer: Any
        model_param_group_index_map: dict[torch.nn.Parameter, tuple[int, int]]
        _get_model_param_range_map: Any
        _build_model_param_to_state_dict_param_map: Any

    def _copy_model_params_to_hybrid_optimizer(
        self, state_dict: "dict[str, Any] | None" = None
    ) -> None:
        """Copy model params to all copies of this rank's shards in the hybrid optimizer.

        Args:
            state_dict (dict, optional): copy its params instead, in their higher precision.
        """
        sources = {}
        if state_dict is not None:
            sources = self._build_model_param_to_state_dict_param_map(state_dict)
        # Megatron-FSDP has no such map: the hybrid optimizer holds its params directly.
        indices = getattr(self, "model_param_group_index_map", None)
        if indices is None:
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    self.optimizer.reload_param(param, param.detach())
            return
        for model_param, (group_index, group_order) in indices.items():
            param_range = self._get_model_param_range_map(model_param)["param"]
            source = sources.get(model_param, model_param).detach()
            if is_float8tensor(source):
                source = source.float()  # FP8 tensors have no flat view
            self.optimizer.reload_param(
                self.optimizer.param_groups[group_index]["params"][group_order],
                source.reshape(-1)[param_range.start : param_range.end],
            )


@fix.edit("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
def add_reload_param(source: Source) -> None:
    """Upstream refreshes only the fp32 working copies, and in 0.12 nothing."""
    if source.has_function("HybridDeviceOptimizer.reload_param"):
        raise NotNeeded
    zero_grad = source.function("HybridDeviceOptimizer.zero_grad")
    source.insert_method_before(zero_grad, HybridDeviceOptimizer.reload_param)


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def reload_hybrid_optimizer(source: Source) -> None:
    """For the hybrid optimizer, upstream returns before it copies any main parameter."""
    method = DistributedOptimizer._copy_model_params_to_hybrid_optimizer
    reload = source.function("DistributedOptimizer._copy_model_params_to_main_params")
    source.skip_if(f"self.{method.__name__}", method, within=reload)
    branch = source.branch("isinstance(self.optimizer, HybridDeviceOptimizer)", within=reload)
    has_state_dict = any(argument.arg == "state_dict" for argument in reload.args.args)
    call = f"self.{method.__name__}({'state_dict' if has_state_dict else ''})"
    source.insert_before(source.one("return", within=branch), call)
    source.insert_method_before(reload, method)
