"""Keep each parameter linked to its main parameter in a universal load: link moments separately.

https://github.com/deepspeedai/DeepSpeed/pull/8474
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/8474",),
    symptom="`safe_get_full_fp32_param` returns a moment; a second load is ignored",
    releases=(("0.15.0", "0.19.6"),),
    stacks="universal load, ZeRO 1 and 2",
    silent=True,
)

FLATTEN = "map_to_flat_opt_states"
TO_MOMENT = "lp._hp_mapping.optim_fragment[key]"


@fix.edit("deepspeed.utils.tensor_fragment")
def link_moments_to_their_buffer(source: Source) -> None:
    """Upstream replaces the main parameter's view by a view of a moment's new buffer."""
    flatten = source.function(FLATTEN)
    source.skip_if(f"{TO_MOMENT} = hp_fragment", within=flatten)
    rebind = source.one("lp._hp_mapping.hp_fragment = hp_fragment", within=flatten)
    source.replace(rebind.targets[0], TO_MOMENT)
