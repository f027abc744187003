"""Wrappers that `fingerprint_deepspeed` adds to DeepSpeed: a save records the live state, a load verifies it.

The record is in the client state, which each model-states file has and which a converter copies.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ckpt_patches.fingerprint import deepspeed_state, proof
from ckpt_patches.fingerprint.comparison import Verdict
from ckpt_patches.fingerprint.record import STEP, of_step
from ckpt_patches.formats.recorded import KEY

Method = Callable[..., Any]


def saving(save: Method) -> Method:
    """Wrap `save_checkpoint`, which all ranks call."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def with_record(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        record = {**proof.recorded(deepspeed_state.live(self)), STEP: self.global_steps}
        bound.arguments["client_state"] = {**(bound.arguments["client_state"] or {}), KEY: record}
        return save(*bound.args, **bound.kwargs)

    return with_record


def loading(load: Method) -> Method:
    """Wrap `load_checkpoint`: after the load, compare the live state with the record."""
    signature = inspect.signature(load)

    @functools.wraps(load)
    def with_proof(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        path, client_state = load(self, *args, **kwargs)
        record = client_state.pop(KEY, None) if isinstance(client_state, dict) else None
        if path is None:
            return path, client_state
        if bound.arguments["load_module_only"] or not bound.arguments["load_optimizer_states"]:
            proof.conclude(Verdict(not_verified={"the optimizer's state": "it was not loaded"}))
        else:
            live = deepspeed_state.live(self, scheduler=bound.arguments["load_lr_scheduler_states"])
            proof.prove(live, of_step(record, self.global_steps))
        return path, client_state

    return with_proof
