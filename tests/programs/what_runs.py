"""Import two upstream modules that fixes edit; say what runs; then fail in a method that a fix has brought.

Prints one line of JSON: the source that Python shows of each module, and what the DeepSpeed converter asks the
checkpoint for. The error is not caught, for what is printed of it.
"""

import inspect
import json
from typing import Any

import deepspeed.checkpoint.ds_to_universal as converter
import megatron.core.optimizer.distrib_optimizer as distrib_optimizer


class Asked(Exception):
    """What was asked for."""


class Checkpoint:
    def get_zero_checkpoint_state(self, **options: Any) -> None:
        raise Asked(options)


def asked() -> dict[str, Any]:
    try:
        converter.extract_zero_shards("", Checkpoint(), (1, 2, 3))
    except Asked as error:
        options: dict[str, Any] = error.args[0]
        return options
    raise AssertionError("expected extract_zero_shards to read a shard")


def method() -> str | None:
    """What Python shows of a method that a fix brings; None where it is not there."""
    brought = getattr(distrib_optimizer.DistributedOptimizer, "_has_stepped", None)
    return brought and inspect.getsource(brought)


shown = {"megatron": inspect.getsource(distrib_optimizer), "deepspeed": inspect.getsource(converter)}
print(json.dumps({"shown": shown, "method": method(), "asked": asked()}), flush=True)
distrib_optimizer.DistributedOptimizer._has_stepped(None, {})
