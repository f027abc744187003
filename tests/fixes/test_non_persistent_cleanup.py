"""non_persistent_cleanup: a save that fails leaves the non-persistent checkpoint before it."""

from pathlib import Path
from typing import Any

from trainers.lazy import megatron_lm
from upstream import affected, called, with_fix, without_fix

AFFECTED = affected("non_persistent_cleanup")


def after_two_failed_saves(version: str, delivery: str) -> Any:
    """The folders and the iteration of the resume, or the error, after a save at 3 and failed ones at 6 and 9."""
    return called(__file__, "resume", version=version, delivery=delivery, layout=[2])[0]


@without_fix(AFFECTED)
def test_the_complete_checkpoint_is_removed_and_nothing_can_be_loaded(version: str, delivery: str) -> None:
    found = after_two_failed_saves(version, delivery)
    assert found["left"] == ["iter_0000006", "iter_0000009"]
    assert found["resumed"] == "CheckpointingException: Checkpoint directory None does not exist"


@with_fix(AFFECTED)
def test_the_complete_checkpoint_stays_and_is_loaded(version: str, delivery: str) -> None:
    assert after_two_failed_saves(version, delivery) == {
        "left": ["iter_0000003", "iter_0000009"],
        "resumed": [3, 3],
        "later": ["iter_0000003", "iter_0000012"],
    }


# What the ranks run


def resume(rank: int, folder: Path) -> dict[str, Any]:
    import errno

    import torch

    def fail(*args: Any, **keywords: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = megatron_lm.begin(folder, non_persistent_ckpt_type="global")
    run.train(1, 3)
    run.save(3, non_persistent_ckpt=True)
    saved = {3: run.state()}
    saves = run.checkpointing.dist_checkpointing
    writes = saves.save
    saves.save = fail  # a full disk: the folder is there, and no file
    for iteration in (6, 9):
        run.train(iteration - 2, iteration)
        try:
            run.save(iteration, non_persistent_ckpt=True)
        except OSError:
            torch.distributed.barrier()
    saves.save = writes
    left = folders(folder)
    torch.distributed.barrier()
    resumed = megatron_lm.begin(folder, non_persistent_ckpt_type="global")
    try:
        found = resumed.load()
    except Exception as error:
        return {"left": left, "resumed": f"{type(error).__name__}: {error}"}
    is_at = resumed.is_at(saved)
    resumed.save(12, non_persistent_ckpt=True)
    return {"left": left, "resumed": [found, is_at], "later": folders(folder)}


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "non_persistent").glob("iter_*"))
