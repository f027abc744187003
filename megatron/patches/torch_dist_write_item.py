"""Write `torch_dist` checkpoints with torch 2.7 and later, which added arguments to `_write_item`.

https://github.com/ROCm/Megatron-LM/pull/83
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NoMatch, NotNeeded, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from torch.distributed.checkpoint.filesystem import _write_item

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/ROCm/Megatron-LM/pull/83",
        "https://github.com/pytorch/pytorch/pull/151452",
        "https://github.com/modelscope/ms-swift/issues/4111",
    ),
    symptom="`_write_item() missing … 'serialization_format'` in a save",
    releases=(("0.12.0", "0.12.3"),),
    stacks="torch_dist format, torch 2.7 or later",
)


def _write_one(stream: "Any", data: "Any", write_item: "Any", storage_key: str) -> "Any":
    """Write an item with torch's `_write_item`.

    torch 2.7 added transforms as its first parameter, and 2.8 a serialization format as its last.
    """
    import inspect

    from torch.distributed.checkpoint import filesystem

    parameters = inspect.signature(_write_item).parameters
    arguments: tuple[object, ...] = (stream, data, write_item, storage_key)
    if "transforms" in parameters:
        arguments = (filesystem._StorageWriterTransforms(), *arguments)
    if "serialization_format" in parameters:
        arguments = (*arguments, filesystem.SerializationFormat.TORCH_SAVE)
    return _write_item(*arguments)


@fix.edit("megatron.core.dist_checkpointing.strategies.filesystem_async")
def give_torch_what_it_asks_for(source: Source) -> None:
    """Upstream passes them since 0.13."""
    if b"serialization_format" in source.data and b"_write_one" not in source.data:
        raise NotNeeded
    calls = source.all("local_results.append(_write_item(...))")
    called = source.all("local_results.append(_write_one(...))")
    source.skip_if(_write_one, bool(called), bool(called) and not calls)
    if len(calls) != 2:
        raise NoMatch(f"expected two calls of _write_item, found {len(calls)}")
    for call in calls:
        arguments = ", ".join(map(source.text, call.args[0].args[-4:]))
        source.replace(call, f"local_results.append(_write_one({arguments}))")
    source.insert_function_before("FileSystemWriterAsync", _write_one)
