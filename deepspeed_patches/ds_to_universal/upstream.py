"""What the converter of the installed DeepSpeed does that others do not; read from its text, nothing is imported."""

from dataclasses import dataclass
from pathlib import Path

from ckpt_patches.engine.installed import locate
from ckpt_patches.engine.registry import DEEPSPEED

CONVERTER = Path("deepspeed", "checkpoint", "ds_to_universal.py")


@dataclass(frozen=True)
class Traits:
    """Told by names in the converter's text and not by its version, so that forks and back-ports are what they are."""

    zero3: bool = True  # since 0.14.5
    steps: bool = True  # zero/<parameter>/step.pt; since 0.14.1
    param_groups: bool = True  # in zero/optimizer_state.pt; since 0.14.5
    sub_params: bool = True  # `parameter_with_sub_params`; since 0.14.1
    # Sub-parameters of unequal shares, a count of them turned into widths, shapes by tensor-parallel rank; after 0.19.3
    shard_widths: bool = True
    module_weights: bool = True  # fp32.pt out of the model's weights, where the optimizer has none; after 0.19.3
    parallel_dimensions: bool = True  # the degrees by what the checkpoint says, and not by counting files; after 0.19.3
    zero3_tensor_parallel: bool = True  # after 0.19.3
    affine_maps: bool = True  # after 0.19.3
    two_sub_params: bool = True  # `parameter_with_2_sub_params_cat_dim_0`; since 0.12.4
    vocab_tensor: bool = True  # a vocabulary without its padding, and all patterns have to be used; since 0.12.3


def installed() -> Traits:
    """Of the installed DeepSpeed; without one, of the latest."""
    root = locate(DEEPSPEED)
    if root is None or not (root / CONVERTER).is_file():
        return Traits()
    return of_converter((root / CONVERTER).read_text(encoding="utf-8"))


def of_converter(text: str) -> Traits:
    return Traits(
        zero3="extract_zero_shards_stage3" in text,
        steps='step.pt"' in text,
        param_groups="[PARAM_GROUPS]" in text,
        sub_params="PARAMETER_WITH_SUB_PARAMS," in text,
        shard_widths="SUB_PARAM_SHARD_WIDTHS" in text,
        module_weights="module_state" in text,
        parallel_dimensions="model_state_metadata" in text,
        zero3_tensor_parallel="_build_zero3_rank_grid" in text,
        affine_maps="AFFINE_MAP" in text,
        two_sub_params="PARAMETER_WITH_2_SUB_PARAMS" in text,
        vocab_tensor="VOCAB_TENSOR" in text,
    )
