"""zero3_universal_save: a ZeRO-3 run that has loaded a universal checkpoint saves the model states of all ranks."""

from pathlib import Path

from trainers.lazy import dt
from upstream import proof

test_what_is_saved_again_does_not_resume, test_what_is_saved_again_resumes_bit_for_bit = proof(
    __file__, "AssertionError: no model states of this rank in the checkpoint"
)


# What the ranks run

CASE, RANKS = "stage3-1", 4


def save_again(rank: int, folder: Path) -> str:
    """Load a universal checkpoint, go on, save, and resume from that, as it is and converted."""
    saved, end = dt.train_and_save(rank, folder, CASE, RANKS)
    dt.convert(folder)
    resumed = dt.engine_of(CASE, RANKS, universal=True, seed=1)
    dt.load(resumed, folder, dt.UNIVERSAL)
    if wrong := dt.on_any_rank(dt.differences(dt.snapshot(resumed), saved)):
        return f"{len(wrong)} states of the run that saves differ"
    dt.train(resumed, rank, RANKS, first=dt.STEPS)
    dt.save(resumed, folder / "again")
    for tag in (dt.TAG, dt.UNIVERSAL):
        if tag == dt.UNIVERSAL:
            dt.convert(folder / "again")
        last = dt.engine_of(CASE, RANKS, universal=tag == dt.UNIVERSAL, seed=2)
        try:
            dt.load(last, folder / "again", tag)
        except AssertionError as error:
            raise AssertionError("no model states of this rank in the checkpoint") from error
        if wrong := dt.on_any_rank(dt.differences(dt.snapshot(last), end)):
            return f"{tag}: {len(wrong)} states differ, and no error"
    return ""


def bug(folder: Path) -> str:
    dt.allow_pickles()
    return str(dt.results(save_again, RANKS, folder)[0])
