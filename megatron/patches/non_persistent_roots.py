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

    _NON_PERSISTENT_CKPT_SUBDIR: str = ""
    checkpoint_exists: Any = None
    get_checkpoint_tracker_filename: Any = None
    read_metadata: Any = None

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


def find_non_persistent_global_dir(load_dir: "str", args: "Any") -> "str":
    """Return the folder of a run's global non-persistent checkpoints.

    They are written below `--save`. Those below `--load` may be of a run before, or of this one if
    both are the same folder. The folder with the newest checkpoint is returned. Finetuning begins
    with `--load` at each start, and other models than the trained one have no checkpoints below
    `--save`.

    Args:
        load_dir: the folder to load from.
        args: the arguments of the run.
    """
    folders = [os.path.join(load_dir, _NON_PERSISTENT_CKPT_SUBDIR)]
    is_resume = load_dir == args.load and not args.finetune
    if is_resume and args.save and args.non_persistent_ckpt_type == "global":
        folders.append(os.path.join(args.save, _NON_PERSISTENT_CKPT_SUBDIR))
    trackers = {
        folder: get_checkpoint_tracker_filename(folder)
        for folder in folders
        if checkpoint_exists(folder)
    }
    if len(trackers) < 2:
        return next(iter(trackers), folders[0])
    return max(trackers, key=lambda folder: read_metadata(trackers[folder])[0])


@fix.edit("megatron.training.checkpointing")
def look_below_both(source: Source) -> None:
    """A load looks below `--load` alone."""
    load = source.function("_load_base_checkpoint")
    source.skip_if((NEWEST, load), find_non_persistent_global_dir)
    source.replace(source.one(BELOW_LOAD, within=load), NEWEST)
    source.insert_function_before(load, find_non_persistent_global_dir)
