"""Save a 16-bit optimizer that also has fp32 or frozen parameters, without the distributed optimizer.

https://github.com/NVIDIA/Megatron-LM/pull/5929
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/pull/5929",),
    symptom="`Optimizer shape … does not match model shape` in a save with fp32 parameters",
    releases=(("0.12.0", "0.19.2"),),
    stacks="bf16 or fp16 without the distributed optimizer; fp32 parameters",
    silent=False,
    test="tests/unit_tests/dist_checkpointing/test_float16_fp32_params.py",
)


def _params_by_state_id(self: "Any") -> "Any":
    """Return the model's parameters by state id, and the ids of those with fp32 copies."""
    groups = zip(self.float16_groups, self.fp32_from_float16_groups, strict=True)
    pairs = [pair for params, copies in groups for pair in zip(params, copies, strict=True)]
    param_of_copy = {id(copy): param for param, copy in pairs}
    inner = [param for group in self.optimizer.param_groups for param in group["params"]]
    copied = {state_id for state_id, param in enumerate(inner) if id(param) in param_of_copy}
    return [param_of_copy.get(id(param), param) for param in inner], copied


@fix.edit("megatron.core.optimizer.optimizer")
def map_all_params(source: Source) -> None:
    """State ids number all parameters, but upstream assigns them only to the 16-bit ones."""
    state = source.function("Float16OptimizerWithFloat16Params.sharded_state_dict")
    # Upstream's own fix; not in any release up to 0.19.2.
    source.skip_if("main_param_id_to_model_param", within=state)
    ids = "(i for i in state_group['params'] if i in copied)"
    backfills = source.all(
        "_backfill_gtp_sharded_param_map(...)", within=state
    )  # also uses the ids, since 0.19
    source.skip_if(
        "params, copied = self._params_by_state_id()",
        "get_param_id_to_sharded_param_map(..., params)",
        ids,
        *(["[params]"] if backfills else []),
        _params_by_state_id,
        within=state,
    )
    mapped = source.one("id_to_sharded_param_map = ...", within=state)
    source.insert_before(mapped, "params, copied = self._params_by_state_id()")
    source.replace(
        source.one("chain.from_iterable(g for g in self.float16_groups)", within=mapped), "params"
    )
    for call in backfills:
        first, _, last = map(source.text, call.args)
        source.replace(call, f"{source.text(call.func)}({first}, [params], {last})")
    arguments = source.one("zip(state_group['params'], fp32_group)", within=state)
    source.replace(arguments, f"zip(\n    {ids}, fp32_group\n)")
    source.insert_method_before(state, _params_by_state_id)
