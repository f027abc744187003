"""Save torch_dist checkpoints of megatron-core up to 0.12 under torch 2.8 and later."""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import AlreadyThere, Source

fix = Fix(
    __name__,
    symptom="saving torch_dist fails: `_write_item()` misses `serialization_format`",
    requires=("torch>=2.8", "megatron-core<0.13"),
)


@fix.edit("megatron.core.dist_checkpointing.strategies.filesystem_async")
def name_the_format(source: Source) -> None:
    if source.imports("SerializationFormat"):
        raise AlreadyThere
    calls = source.some("_write_item(*transform_list, stream, ..., write_item, storage_key)")
    for call in calls:
        source.add_keyword(call, "serialization_format", "SerializationFormat.TORCH_SAVE")
    source.insert_import("from torch.distributed.checkpoint.filesystem import SerializationFormat")
