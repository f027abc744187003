"""Send GPU tensors to the worker again if their storage has changed.

https://github.com/NVIDIA-NeMo/RL/issues/3312
"""

import ast

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA-NeMo/RL/issues/3312",
        "https://github.com/NVIDIA/nvidia-resiliency-ext/pull/314",
    ),
    symptom="every save repeats the first one's tensors",
    releases=(("0.6.0", "0.6.0"),),
    stacks="`--ckpt-assume-constant-structure`, tensors moved between saves",
    silent=True,
    test="tests/checkpointing/unit/test_nvrx_cached_storage.py",
)


def _storages_of(tensors: "list[torch.Tensor]") -> list[tuple[object, ...]]:
    """Return the tensors' storages: equal as long as the worker's handles refer to their memory."""
    unknown = object  # a tensor without a data pointer never compares equal
    return [(ten.device, ten.data_ptr() or unknown(), ten.stride()) for ten in tensors]


@fix.edit("nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async")
def follow_storages(source: Source) -> None:
    """Upstream's cache key has only names, shapes and dtypes, which a new allocation does not change."""
    source.function("_compute_data_structure_key_from_plan")  # before 0.6 a worker caches nothing
    prepare = source.function("FileSystemWriterAsync.prepare_write_data")
    source.skip_if(
        "FileSystemWriterAsync._cached_tensor_data_ptrs", within=prepare
    )  # upstream's own fix, since #314
    writer = source.class_named("FileSystemWriterAsync")
    source.skip_if(
        ("_cached_storages: dict = {}", writer),
        "storages = _storages_of(gpu_data)",
        "self._cached_storages.get(key) == storages",
        "self._cached_storages[key] = storages",
        _storages_of,
        within=prepare,
    )
    paths = source.branch("gpu_items and self.use_cpu_shm_for_gpu_tensors", prepare)
    reuse = paths.orelse[0]
    if not isinstance(reuse, ast.If) or source.text(reuse.test) != "cache_exists":
        raise NoMatch(f"expected `elif cache_exists` in {prepare.name}")
    source.insert_before(paths, "storages = _storages_of(gpu_data)")
    source.insert_at(reuse.test, " and self._cached_storages.get(key) == storages", end=True)
    sent = source.one("FileSystemWriterAsync._cached_identifiers.add(key)", reuse.orelse[0])
    source.insert_after(sent, "self._cached_storages[key] = storages")
    identifiers = source.one("_cached_identifiers: set = set()", writer)
    source.insert_after(
        identifiers,
        "# By identifier, the storages of the tensors that the worker holds\n_cached_storages: dict = {}",
    )
    source.insert_function_before(writer, _storages_of)
