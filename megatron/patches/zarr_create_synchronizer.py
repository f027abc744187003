"""Give the rank that creates a Zarr array the same synchronizer as all other writers.

https://github.com/NVIDIA/Megatron-LM/issues/1053
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NoMatch, NotNeeded, Source

ZARR = "megatron.core.dist_checkpointing.strategies.zarr"

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/issues/1053",),
    symptom="the loss jumps after a resume: slices of the state are saved as zeros",
    releases=(("0.9.0", "0.14.0"),),
    stacks="zarr format, distributed optimizer",
    silent=True,
)


@fix.edit(ZARR)
def synchronize_creation(source: Source) -> None:
    """Without it, the creator's read-modify-write of chunk 0,…,0 overwrites other ranks' concurrent writes."""
    create = source.one("zarr.create(...)", within=source.function("_create_zarr_array"))
    given = [keyword.value for keyword in create.keywords if keyword.arg == "synchronizer"]
    if any(source.text(value) != "None" for value in given):
        raise NotNeeded
    if given:
        raise NoMatch(
            "expected zarr.create to get a synchronizer or none at all, found synchronizer=None"
        )
    synchronizer = """(
    zarr.ProcessSynchronizer(str(checkpoint_dir / f"{sharded_tensor.key}.sync"))
    if sharded_tensor.flattened_range is not None
    else None
)"""
    source.add_keyword(create, "synchronizer", synchronizer)


@fix.edit(ZARR)
def skip_lock_directories(source: Source) -> None:
    """The lock for `.zarray` is a file with the same name, so a lock directory looks like an array."""
    listing = source.function("load_zarr_based_sharded_metadata")
    source.skip_if("'.sync'", within=listing)
    not_an_array = source.one("not (subdir / '.zarray').exists()", within=listing)
    source.insert_at(not_an_array, ' or subdir.suffix == ".sync"', end=True)
