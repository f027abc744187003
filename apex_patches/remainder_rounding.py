"""Load fp32 master weights exactly from remainders if torch has rounded the bf16 weights.

https://github.com/NVIDIA/apex/issues/1842
"""

from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NotNeeded, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import warnings

    import torch

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/apex/issues/1842",),
    symptom="1 of 130,000 fp32 masters is off by up to 0.8 % after a load",
    releases=(("0.1", "0.1"),),
    stacks="DistributedFusedAdam, `store_param_remainders=True`",
    silent=True,
    test="apex/contrib/test/optimizers/test_remainder_rounding.py",
)

OWNER = "DistributedFusedAdam"
NONE_LOADED = "self._loaded_params = []"
NOTE = """
if self.state["buckets"][fragment.bucket_id].param_remainders_shard is not None:
    self._note_loaded_param(param, param_state)
""".strip()
SETTLE_AT_LOAD = "self._settle_loaded_params(at_load=True)"
SETTLE = "self._settle_loaded_params()"


class DistributedFusedAdam:
    """The methods to insert into upstream's class, and what they use."""

    state: "Any"
    device: "torch.device"
    _loaded_params: "list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]"

    def _note_loaded_param(self, param: "torch.Tensor", fp32: "torch.Tensor") -> None:
        """Record what the Adam kernel rounds a loaded FP32 param to: nearest, ties away from zero.

        PyTorch rounds ties to even, so some elements of a BF16 param are one unit smaller.
        """
        bits = fp32.float().view(torch.int32)
        rounded = ((bits + 0x8000) >> 16).to(torch.int16)
        smaller = ((bits & 0x1FFFF) == 0x8000).nonzero().view(-1)
        self._loaded_params.append((param, rounded, smaller))

    def _settle_loaded_params(self, at_load: bool = False) -> None:
        """Make BF16 params match their loaded remainders, before these are used.

        Ties that PyTorch rounded are rounded as the kernel does. Other differences may disappear
        when the model is loaded after the optimizer. If not, the params are used as they are,
        without remainders.
        """
        loaded, self._loaded_params = self._loaded_params, []
        others = 0
        for param, rounded, smaller in loaded:
            bits = param.detach().view(-1).view(torch.int16)
            target, ties = rounded.to(bits.device), smaller.to(bits.device)
            ties = ties[bits[ties] == target[ties] - 1]
            other = bits != target
            other[ties] = False
            if at_load and other.any():
                self._loaded_params.append((param, rounded, smaller))
                continue
            bits[ties] = target[ties]
            others += int(other.sum())
            for fragment in self.state[param]["fragments"]:
                if fragment.in_local_shard:
                    remainders = self.state["buckets"][fragment.bucket_id].param_remainders_shard
                    without = other[slice(*fragment.shard_param_range)].to(self.device)
                    remainders[slice(*fragment.shard_range)].masked_fill_(without, 0)
        if others:
            warnings.warn(
                f"Expected BF16 params that the loaded FP32 params round to, found {others} "
                "elements that are others. They are taken from the model, without remainders. Load "
                "the model and the optimizer from the same checkpoint",
                stacklevel=2,
            )


METHODS = (DistributedFusedAdam._note_loaded_param, DistributedFusedAdam._settle_loaded_params)


@fix.edit("apex.contrib.optimizers.distributed_fused_adam")
def settle_ties(source: Source) -> None:
    """Only a checkpoint's fp32 main parameters show to which of two weights a tie was rounded."""
    source.class_named(OWNER)
    if b"state_dict_v2" not in source.data and b"state_dict_format" not in source.data:
        raise NotNeeded  # before August 2023: states have no masters; every commit has version 0.1
    functions = ("__init__", "load_state_dict", "_load_state_dict_v2", "state_dict")
    init, load, load_v2, save = (source.function(f"{OWNER}.{name}") for name in functions)
    step = source.function(f"{OWNER}._local_step_with_param_remainders")
    source.skip_if(
        (NONE_LOADED, init),
        (NONE_LOADED, load),
        NOTE,
        SETTLE_AT_LOAD,
        (SETTLE, step),
        (SETTLE, save),
        *METHODS,
        within=load_v2,
    )
    option = source.one("self.store_param_remainders: bool = store_param_remainders", within=init)
    source.insert_after(option, NONE_LOADED)
    source.insert_at_start(load, NONE_LOADED)
    source.one(
        "fragment = self.state[param]['fragments'][0]", within=load_v2
    )  # the fragment that NOTE uses
    flat = source.one('param_state = state_dict["state"][index]["param"].view(-1)', within=load_v2)
    source.insert_after(flat, NOTE)
    end = source.one("torch.cuda.current_stream().synchronize()", within=load_v2)
    source.insert_after(end, SETTLE_AT_LOAD)
    source.insert_at_start(step, SETTLE)
    source.insert_at_start(save, SETTLE)
    for method in METHODS:
        source.insert_method_before(load, method)
