"""Refuse to convert pipeline stages whose param groups have different settings.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/checkpoint/ds_to_universal.py#L624
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch
    from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE, OPTIMIZER_STATE_DICT
    from deepspeed.checkpoint.deepspeed_checkpoint import DeepSpeedCheckpoint

CONVERTER = "deepspeed.checkpoint.ds_to_universal"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/checkpoint/ds_to_universal.py#L624",),
    symptom="all pipeline stages resume with the first stage's rates and weight decays",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="conversion to universal, pipeline stages with other settings",
    silent=True,
    test="tests/unit/checkpoint/test_universal_stage_settings.py",
)

CALL = "_check_settings_of_stages(ds_checkpoint)"
GUARDED = f"if ds_checkpoint.pp_degree > 1:\n    {CALL}"


def _check_settings_of_stages(ds_checkpoint: "DeepSpeedCheckpoint") -> None:
    """Refuse stages with other settings than the first: a universal checkpoint has no others."""
    first_groups = []
    for pp_index in range(ds_checkpoint.pp_degree):
        path = ds_checkpoint.get_zero_files(pp_index=pp_index, tp_index=0, dp_index=0)[0]
        optim_sd = torch.load(path, map_location=torch.device("cpu"), weights_only=False)[OPTIMIZER_STATE_DICT]
        param_groups = optim_sd[BASE_OPTIMIZER_STATE]["param_groups"]
        first_groups = first_groups or param_groups
        for i in range(min(len(param_groups), len(first_groups))):
            found, expected = param_groups[i], first_groups[i]
            different = {key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)}
            different -= {"params", "param_names"}  # a stage's own parameters
            if different:
                message = f"{path}: {sorted(different)} of param group {i} differ from the first pipeline stage's, "
                raise ValueError(message + "which a universal load gives to all: resume with the stages of the save")


@fix.edit(CONVERTER, upstream_alone=True)
def compare_the_stages(source: Source) -> None:
    """Upstream writes the param groups of rank 0 alone."""
    source.skip_if(CALL, _check_settings_of_stages)
    source.insert_before(source.one("iteration = ds_checkpoint.get_iteration()"), GUARDED)
    source.insert_function_before(source.function("_check_for_required_state"), _check_settings_of_stages)
