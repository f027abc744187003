"""Keep the non-persistent checkpoint that the tracker names until the next one is complete.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4820
"""

from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    get_checkpoint_tracker_filename: Any = None

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4820",),
    symptom="after two interrupted saves no non-persistent checkpoint is left",
    releases=(("0.17.0", newest("megatron-core")),),
    stacks="`megatron.training`: `--non-persistent-ckpt-type global`",
    silent=False,
    test="tests/unit_tests/dist_checkpointing/test_non_persistent_cleanup.py",
)

KEPT = "kept_ckpts = non_persistent_ckpts_to_keep(save_dir, sorted_iter_ckpts, leave_ckpt_num, do_async)"
LATEST = "sorted_iter_ckpts[-leave_ckpt_num:]"  # in a message
OTHERS = "[ckpt for ckpt in sorted_iter_ckpts if ckpt not in kept_ckpts]"


def non_persistent_ckpts_to_keep(
    save_dir: "Path", iter_ckpts: "list[Path]", number: int, do_async: bool
) -> "list[Path]":
    """Return the checkpoints to keep during the next save.

    The tracker names the newest complete one. Newer folders are those of interrupted saves. An
    asynchronous save may still be writing into one: then they are kept, too.

    Args:
        save_dir: the folder of the non-persistent checkpoints.
        iter_ckpts: their folders, in the order of their iterations.
        number: how many complete ones to keep.
        do_async: whether saves are asynchronous.
    """
    try:
        latest = int(Path(get_checkpoint_tracker_filename(save_dir)).read_text())
    except (OSError, ValueError):  # no save is complete yet
        return iter_ckpts[-number:]
    complete = [ckpt for ckpt in iter_ckpts if int(ckpt.name[len("iter_") :]) <= latest]
    newer = iter_ckpts[len(complete) :]
    return complete[-number:] + (newer if do_async or not complete else [])


@fix.edit("megatron.training.checkpointing")
def keep_the_complete_one(source: Source) -> None:
    """The newest folder is kept and all others are removed, whether a save completed it or not."""
    clean = source.function("cleanup_old_non_persistent_checkpoint")
    shown = source.all(LATEST, within=clean)
    source.skip_if(
        (KEPT, clean), (f"rm_iter_ckpts = {OTHERS}", clean), not shown, non_persistent_ckpts_to_keep
    )
    removed = source.one("rm_iter_ckpts = sorted_iter_ckpts[:-leave_ckpt_num]", within=clean)
    source.insert_before(removed, KEPT)
    source.replace(removed.value, OTHERS)
    for expression in shown:
        source.replace(expression, "kept_ckpts")
    source.insert_function_before(clean, non_persistent_ckpts_to_keep)
