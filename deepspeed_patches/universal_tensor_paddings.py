"""Convert checkpoints whose ZeRO padding exceeds a partition to universal: strip no padding from fragments.

https://github.com/deepspeedai/DeepSpeed/issues/6918
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

ZERO_CHECKPOINT = "deepspeed.checkpoint.zero_checkpoint"
DEEPSPEED_CHECKPOINT = "deepspeed.checkpoint.deepspeed_checkpoint"
CONVERTER = "deepspeed.checkpoint.ds_to_universal"

UNSTRIPPED = """sd = ds_checkpoint.get_zero_checkpoint_state(pp_index=pp_index,
                                             tp_index=tp_index,
                                             dp_index=dp_index,
                                             strip_tensor_paddings=False)"""

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/issues/6918",),
    symptom="`ds_to_universal` fails with `narrow(): length must be non-negative`",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="ZeRO 1 and 2, many data-parallel ranks",
    silent=False,
    test="tests/unit/checkpoint/test_universal_tensor_paddings.py",
)


@fix.edit(ZERO_CHECKPOINT)
def strip_at_most_the_partition(source: Source) -> None:
    """The last rank may record the padding of several ranks: 348 - 1024 = -676 elements.

    A converter run as a script is not patched by the import hook and still strips: only this edit fixes it.
    """
    strip = source.function("ZeROCheckpoint._strip_tensor_paddings")
    source.skip_if("raw_length = max(0, ...)", within=strip)
    source.skip_if("raw_length = max(..., 0)", within=strip)
    length = source.one("raw_length = state_value.numel() - group_paddings[key]", within=strip).value
    source.insert_at(length, "max(0, ")
    source.insert_at(length, ")", end=True)


@fix.edit(DEEPSPEED_CHECKPOINT, independent=True, releases=(("0.15.0", "0.17.2"),))
def accept_the_argument(source: Source) -> None:
    """The reader of a rank's file has the parameter, but the checkpoint class does not pass it on."""
    get = source.function("DeepSpeedCheckpoint.get_zero_checkpoint_state")
    read = source.one("self.zero_checkpoint.get_state_for_rank(...)", within=get)
    name = "strip_tensor_paddings"
    source.skip_if(
        name in [argument.arg for argument in get.args.args], name in [keyword.arg for keyword in read.keywords]
    )
    last = [*get.args.args, *get.args.defaults][-1]
    source.insert_at(last, ", strip_tensor_paddings: bool = True", end=True)
    source.add_keyword(read, "strip_tensor_paddings", "strip_tensor_paddings")


@fix.edit(CONVERTER)
def ask_for_no_stripping(source: Source) -> None:
    """Each parameter's fragment is cut from the partition by its start and length, without padding."""
    extract = source.function("extract_zero_shards")
    source.skip_if(UNSTRIPPED, within=extract)
    read = source.one(
        "sd = ds_checkpoint.get_zero_checkpoint_state(pp_index=pp_index, tp_index=tp_index, dp_index=dp_index)",
        within=extract,
    )
    source.replace(read, UNSTRIPPED)
