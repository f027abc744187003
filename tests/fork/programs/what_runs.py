"""Import two upstream modules that fixes edit; print what runs; then fail in a method that a fix has added.

Prints one line of JSON: the source that Python shows of each module, and the DeepSpeed converter's request to the
checkpoint. The error is not caught, so that its traceback is printed.
"""

import inspect
import json
from typing import Any

import deepspeed.checkpoint.ds_to_universal as converter
import megatron.core.optimizer.distrib_optimizer as distrib_optimizer


class Asked(Exception):
    """Carries the options of the request."""


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
    """The source that Python shows for a method that a fix adds; None without the fix."""
    brought = getattr(distrib_optimizer.DistributedOptimizer, "_step_without_states", None)
    return brought and inspect.getsource(brought)


shown = {"megatron": inspect.getsource(distrib_optimizer), "deepspeed": inspect.getsource(converter)}
print(json.dumps({"shown": shown, "method": method(), "asked": asked()}), flush=True)
distrib_optimizer.DistributedOptimizer._step_without_states(None)
