"""What the converter of the installed DeepSpeed does that others do not; read from its text, nothing is imported."""

from dataclasses import dataclass
from pathlib import Path

from ckpt_patches.engine.installed import locate
from ckpt_patches.engine.registry import DEEPSPEED
from deepspeed_patches.ds_to_universal import known_converters, syntax
from deepspeed_patches.ds_to_universal.syntax import Facts

CONVERTER = Path("deepspeed", "checkpoint", "ds_to_universal.py")


@dataclass(frozen=True)
class Traits:
    """Told by the converter's syntax and not by its version, so that forks and back-ports are what they are."""

    zero3: bool = True
    steps: bool = True  # zero/<parameter>/step.pt
    sub_params: bool = True  # `parameter_with_sub_params`
    # Sub-parameters of unequal shares, a count of them turned into widths, shapes by tensor-parallel rank
    shard_widths: bool = True
    module_weights: bool = True  # fp32.pt out of the model's weights, where the optimizer has none
    parallel_dimensions: bool = True  # the degrees by what the checkpoint says, and not by counting files
    zero3_tensor_parallel: bool = True
    affine_maps: bool = True
    autoep: bool = True  # experts by their placement, as the latest does
    two_sub_params: bool = True  # `parameter_with_2_sub_params_cat_dim_0`
    vocab_tensor: bool = True  # a vocabulary without its padding, and all patterns have to be used


SINCE = {
    "vocab_tensor": "0.12.3",
    "two_sub_params": "0.12.4",
    "steps": "0.14.1",
    "sub_params": "0.14.1",
    "zero3": "0.14.5",
    "zero3_tensor_parallel": "0.19.4",
    "parallel_dimensions": "0.19.5",
    "shard_widths": "0.19.6",
    "affine_maps": "0.19.7",
    "module_weights": "0.19.8",
    "autoep": "0.19.8",
}


def installed() -> tuple[Traits, str]:
    """Of the installed DeepSpeed, without one of the latest; and a warning, where it is none that is known."""
    root = locate(DEEPSPEED)
    if root is None or not (root / CONVERTER).is_file():
        return Traits(), ""
    return of_file(root / CONVERTER)


def of_file(path: Path) -> tuple[Traits, str]:
    """What a converter does; and a warning, where it is none that is known."""
    data = path.read_bytes()
    release = known_converters.release_of(syntax.shortened(data))
    if release:  # to parse it would take longer than to read the headers of a hundred ranks
        return of_release(release), ""
    unknown = f"{path} is none of the converters of DeepSpeed {known_converters.FIRST} to {known_converters.LAST}"
    try:
        facts = syntax.read(data)
    except (SyntaxError, ValueError) as error:
        return (
            Traits(),
            f"{unknown}, and no module for this Python ({error}): the output is as of {known_converters.LAST}",
        )
    if known_converters.release_of(facts.digest):
        return of_syntax(facts), ""
    traits = of_syntax(facts)
    lacking = ", ".join(sorted(name for name, has in vars(traits).items() if not has))
    but = f", but for: {lacking}" if lacking else ""
    return traits, (
        f"{unknown}; by its syntax it does what that of {known_converters.LAST} does{but}, and so does the output; "
        "compare one conversion with its own before you rely on it"
    )


def of_release(release: str) -> Traits:
    """What the converter of a release does."""
    return Traits(**{name: _numbers(release) >= _numbers(since) for name, since in SINCE.items()})


def of_syntax(module: Facts) -> Traits:
    """What a converter does, by what it defines and uses."""
    return Traits(
        zero3="extract_zero_shards_stage3" in module.functions,
        steps=any(text.rpartition("/")[2] == "step.pt" for text in module.strings),
        sub_params="PARAMETER_WITH_SUB_PARAMS" in module.used,
        shard_widths="SUB_PARAM_SHARD_WIDTHS" in module.used,
        module_weights="module_state" in module.used,
        parallel_dimensions="model_state_metadata" in module.used,
        zero3_tensor_parallel="_build_zero3_rank_grid" in module.functions,
        affine_maps="AFFINE_MAP" in module.used,
        autoep="_rebuild_zero3_autoep_rank_tensors" in module.functions,
        two_sub_params="PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0" in module.used,
        vocab_tensor="VOCAB_TENSOR" in module.used,
    )


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
