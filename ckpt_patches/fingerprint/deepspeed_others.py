"""DeepSpeed engine state besides parameters and optimizer states: buffers, scheduler, loss scale and counters."""

from collections.abc import Iterator
from typing import Any

import torch

from ckpt_patches.fingerprint.record import Settings, plain_values
from ckpt_patches.fingerprint.states import buffer_digest
from ckpt_patches.fingerprint.verdict import BUFFER

SCHEDULER = "learning-rate scheduler"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def others(engine: Any, *, scheduler: bool) -> dict[str, Settings]:
    """The values by their name in messages; for buffers, a digest of shape, dtype and bytes."""
    found: dict[str, Settings] = {f"{BUFFER}{name}": {"value": digest(one)} for name, one in buffers(engine.module)}
    if scheduler and engine.lr_scheduler is not None:
        found[SCHEDULER] = plain_values(engine.lr_scheduler.state_dict())
    if hasattr(engine.optimizer, "optimizer"):  # without ZeRO or 16-bit training there is no scale
        found["loss scale"] = _loss_scale(engine.optimizer)
    found["counters"] = {name: getattr(engine, name) for name in COUNTERS}
    return {what: its for what, its in found.items() if its}


def buffers(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The persistent buffers, which a checkpoint saves."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                yield name, buffer


def digest(buffer: torch.Tensor) -> str:
    """A digest of a buffer's shape, dtype and bytes."""
    data = memoryview(buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return buffer_digest(str(buffer.dtype).removeprefix("torch."), buffer.shape, [data] if buffer.numel() else [])


def _loss_scale(optimizer: Any) -> Settings:
    scaler = getattr(optimizer, "loss_scaler", getattr(optimizer, "loss_scale_config", optimizer))
    values = {"scale": getattr(optimizer, "loss_scale", None), "steps": getattr(scaler, "cur_iter", None)}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
