"""One number per state of a parameter, independent of its division among ranks, files and formats.

In a training script with plain torch (`torch.nn`, DDP, FSDP1, FSDP2, HSDP, tensor parallelism):

    from ckpt_patches import fingerprint

    state["ckpt_patches_fingerprint"] = fingerprint.of_training(model, optimizer)            # into what is saved
    …
    fingerprint.prove(model, optimizer, state["ckpt_patches_fingerprint"])                   # after a load

The fixes are not involved: nothing is recorded or verified unless a script calls these functions.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpt_patches.errors import FingerprintError

if TYPE_CHECKING:
    from torch import nn, optim

__all__ = ["FingerprintError", "of_training", "prove"]


def of_training(model: "nn.Module", optimizer: "optim.Optimizer | Sequence[optim.Optimizer]", group: Any = None) -> str:
    """The record of a model and its optimizers, to be saved under the key `ckpt_patches_fingerprint`.

    Every rank of the group calls it, and all get the same record. It is one string, so torch.distributed.checkpoint
    stores it as one entry.

    Args:
        model: the trained model, with its wrappers.
        optimizer: one or several optimizers of its parameters.
        group: the process group of all ranks that hold the model; None for the default one.
    """
    import json

    from ckpt_patches.fingerprint import proof, training_state

    return json.dumps(proof.recorded(training_state.live(model, optimizer), group))


def prove(
    model: "nn.Module",
    optimizer: "optim.Optimizer | Sequence[optim.Optimizer]",
    recorded: str | None,
    group: Any = None,
) -> None:
    """Compare the live state after a load with the record of the save; rank 0 logs the result.

    Every rank of the group calls it. The ranks, the mesh and the kind of parallelism may differ from those of the save.

    Args:
        model, optimizer, group: as for `of_training`.
        recorded: the result of `of_training` at the save; None if the checkpoint has no record.

    Raises:
        FingerprintError: on all ranks, if a state or a setting differs from the saved one, or no state of the record
            could be compared. With CKPT_PATCHES_FINGERPRINT=warn it is logged instead.
    """
    from ckpt_patches.fingerprint import proof, training_state
    from ckpt_patches.formats.recorded import from_text

    proof.prove(training_state.live(model, optimizer), from_text(recorded), group)
