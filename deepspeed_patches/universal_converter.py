"""Convert with the converter of this package where DeepSpeed's is called: it hands over at the start of its `main`.

https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/343
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/343",
        "https://github.com/deepspeedai/DeepSpeed/issues/6918",
    ),
    symptom="`ds_to_universal` mixes slices, writes padding as data, needs disk space twice",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="conversion to universal",
    silent=True,
)

CALL = "_converted_by_ckpt_patches(args)"


def _converted_by_ckpt_patches(args: "Any") -> bool:
    """Convert with `ckpt-patches to-universal`; False if a switch, which is read now, leaves it to the code below."""
    try:
        from ckpt_patches.convert.convert_command import take_over
    except ImportError as error:
        import sys

        print(f"ckpt-patches: DeepSpeed's own converter runs; ours cannot be imported: {error}", file=sys.stderr)
        return False
    return take_over(args, __name__)


@fix.edit("deepspeed.checkpoint.ds_to_universal", ours_alone=True)
def hand_over(source: Source) -> None:
    """The text stays upstream's after the call: it runs where a switch says so, or this package is not there."""
    main = source.function("main")
    source.skip_if((CALL, main), _converted_by_ckpt_patches)
    if [argument.arg for argument in main.args.args] != ["args"]:
        raise NoMatch("expected main(args)")
    source.insert_at_start(main, f"if {CALL}:\n    return")
    source.insert_function_before(main, _converted_by_ckpt_patches)
