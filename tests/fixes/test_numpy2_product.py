"""numpy2_product: megatron-core before 0.16 runs with NumPy 2."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from upstream import affected, shown, tree, with_fix, without_fix

RELEASES = affected("numpy2_product")


@without_fix(RELEASES)
def test_the_places_and_sizes_of_shards_cannot_be_computed(version: str, delivery: str) -> None:
    assert "has no attribute 'product'" in shown(__file__, version, delivery, path=[tree("numpy", "2.2.6")])


@with_fix(RELEASES)
def test_the_places_and_sizes_of_shards_are_computed(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery, path=[tree("numpy", "2.2.6")]) == ""


# What the ranks run

# The callers of `np.product` moved between these modules from release to release.
MODULES = ("exchange_utils", "strategies.fully_parallel", "validation", "serialization")


def bug(folder: Path) -> str:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    place = (4, 3), (4, 3), (0, 0), (1, 1)
    whole = ShardedTensor("whole", torch.zeros(4, 3), torch.float32, *place)
    shards = [
        ShardedTensor("parts", torch.zeros(6), torch.float32, *place, flattened_range=part)
        for part in (slice(0, 6), slice(6, 12))
    ]
    calls = [
        shards[1].global_coordinates,
        lambda: find("_shard_size")(whole),
        lambda: find("_validate_sharding_for_key_flattened")(shards),
    ]
    failed = list(filter(None, map(error_of, calls)))
    return f"{len(failed)} of 3 calls fail with {failed[0]}" if failed else ""


def error_of(call: Any) -> str:
    try:
        call()
    except AttributeError as error:
        return f"AttributeError: {error}".partition(". ")[0]
    return ""


def find(name: str) -> Any:
    for module in MODULES:
        try:
            found = getattr(import_module(f"megatron.core.dist_checkpointing.{module}"), name, None)
        except ModuleNotFoundError:
            continue
        if found is not None:
            return found
    raise LookupError(name)
