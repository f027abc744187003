"""Run the code of the real megatron-core that called `np.product`; prints JSON, what failed by function.

With a NumPy 2 in front of the path the name is gone for real.
"""

import importlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def main() -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    shards = [
        ShardedTensor("w", torch.zeros(6), torch.float32, (4, 3), (4, 3), (0, 0), (1, 1), flattened_range=part)
        for part in (slice(0, 6), slice(6, 12))
    ]
    whole = ShardedTensor("v", torch.zeros(4, 3), torch.float32, (4, 3), (4, 3), (0, 0), (1, 1))
    calls: dict[str, Callable[[], Any]] = {
        "mapping.global_coordinates": lambda: shards[1].global_coordinates(),
        "_shard_size": lambda: find("_shard_size")(whole),
        "_validate_sharding_for_key_flattened": lambda: find("_validate_sharding_for_key_flattened")(shards),
    }
    failed = {}
    for name, call in calls.items():
        try:
            call()
        except AttributeError as error:
            failed[name] = str(error)
    print(json.dumps({"numpy": np.__version__, "failed": failed}))


def find(name: str) -> Any:
    """Releases moved these functions."""
    for module in ("exchange_utils", "strategies.fully_parallel", "validation", "serialization"):
        try:
            found = getattr(importlib.import_module(f"megatron.core.dist_checkpointing.{module}"), name, None)
        except ModuleNotFoundError:
            continue
        if found is not None:
            return found
    raise LookupError(name)


if __name__ == "__main__":
    main()
