"""Find the non-persistent checkpoints that a run has written, if `--save` is not `--load`.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5090
"""

from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

    import torch

    _NON_PERSISTENT_CKPT_SUBDIR: str = ""
    get_checkpoint_tracker_filename: Any = None

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5090",),
    symptom="a restart with `--load A --save B` goes back to A, past its non-persistent checkpoints",
    releases=(("0.17.0", newest("megatron-core")),),
    stacks="`megatron.training`: `--non-persistent-ckpt-type global`, another `--save` than `--load`",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_non_persistent_roots.py",
)

BELOW_LOAD = "os.path.join(load_dir, _NON_PERSISTENT_CKPT_SUBDIR)"
NEWEST = "find_non_persistent_global_dir(load_dir, args)"


def _latest_iteration(folder: "str") -> int:
    """Return the iteration that a folder's tracker names, or -1 if there is no number in it."""
    try:
        with open(get_checkpoint_tracker_filename(folder)) as tracker:
            return int(tracker.read())
    except (OSError, ValueError):
        return -1


def find_non_persistent_global_dir(load_dir: "str", args: "Any") -> "str":
    """Return the folder of a run's global non-persistent checkpoints.

    They are written below `--save`, and looked for below `--load`. The folder below `--save` is
    returned if its checkpoint is newer than all below `--load`. Finetuning begins with `--load` at
    each start, `--ckpt-step` asks for a checkpoint of it, and other models than the trained one
    have no checkpoints below `--save`.

    Args:
        load_dir: the folder to load from.
        args: the arguments of the run.
    """
    found = [os.path.join(load_dir, _NON_PERSISTENT_CKPT_SUBDIR)]
    if args.non_persistent_ckpt_type != "global" or args.finetune or load_dir != args.load:
        return found[0]
    if not args.save or getattr(args, "ckpt_step", None):
        return found[0]
    saved = os.path.join(args.save, _NON_PERSISTENT_CKPT_SUBDIR)
    if _latest_iteration(saved) > max(map(_latest_iteration, (load_dir, found[0]))):
        found = [saved]
    if torch.distributed.is_initialized():  # what a rank sees of a folder can be outdated
        torch.distributed.broadcast_object_list(found, src=0)
    return found[0]


@fix.edit("megatron.training.checkpointing")
def look_below_both(source: Source) -> None:
    """A load looks below `--load` alone."""
    load = source.function("_load_base_checkpoint")
    source.skip_if((NEWEST, load), _latest_iteration, find_non_persistent_global_dir)
    source.replace(source.one(BELOW_LOAD, within=load), NEWEST)
    for function in (_latest_iteration, find_non_persistent_global_dir):
        source.insert_function_before(load, function)
