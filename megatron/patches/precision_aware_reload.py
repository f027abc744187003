"""Reload the main parameters of the precision-aware optimizer from the loaded model weights.

https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.2/megatron/core/optimizer/distrib_optimizer.py
"""

from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.2/megatron/core/optimizer/distrib_optimizer.py",
    ),
    symptom="weights that are loaded into a run are gone after its next step",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="precision-aware optimizer, weights loaded into a run that has trained",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_precision_aware_reload.py",
)

CLASS = "DistributedOptimizer"


class DistributedOptimizer:
    """The method to insert into upstream's class."""

    if TYPE_CHECKING:
        optimizer: Any

    def _reload_precision_aware(self, state_dict: "dict[str, Any] | None" = None) -> None:
        """Set the inner optimizer's main params to the params, if it has created them.

        Raises:
            ValueError: `state_dict` is given. This optimizer cannot load main params from it,
                because it creates them from the params.
        """
        if state_dict is not None:
            raise ValueError(
                "expected an optimizer with main params of its own for load_main_params_from_ckpt,"
                " found the precision-aware one, which takes them from the params: load without"
            )
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                main_param = self.optimizer.state.get(param, {}).get("master_param")
                if main_param is None:
                    continue
                if main_param.dtype == torch.int16:
                    main_param.zero_()  # the lower 16 bits of the main param
                else:
                    self.optimizer.set_scaled_state(param, "master_param", param.detach().float())


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def reload_main_params(source: Source) -> None:
    """Upstream returns early and leaves the copy to the inner optimizer, which copies in the other direction."""
    settings = ("use_precision_aware_optimizer_no_fp8_or_ds_fp8", "use_precision_aware_optimizer")
    reload = source.function(f"{CLASS}._copy_model_params_to_main_params")
    used = [name for name in settings if source.has(f"self.config.{name}", within=reload)]
    if not used:
        raise NoMatch(f"expected one of {', '.join(settings)} in {reload.name}, found none")
    method = DistributedOptimizer._reload_precision_aware
    branch = source.branch(f"self.config.{used[0]}", within=reload)
    source.skip_if(f"self.{method.__name__}", method, within=branch)
    has_state_dict = any(argument.arg == "state_dict" for argument in reload.args.args)
    source.insert_before(
        source.one("return", within=branch),
        f"self.{method.__name__}({'state_dict' if has_state_dict else ''})",
    )
    source.insert_method_before(reload, method)
