"""zero3_universal_weights_alone: at ZeRO-3 a universal load of only the weights loads them, and nothing else."""

from pathlib import Path

from test_zero3_universal_sizes import larger
from trainers.lazy import dt
from upstream import affected, proof, shown, with_fix

RELEASES = affected("zero3_universal_weights_alone")
test_weights_or_more_than_the_weights_are_not_as_asked_for, test_the_weights_are_loaded_and_nothing_else = proof(
    __file__, "no error"
)


@with_fix(RELEASES)
def test_weights_of_another_size_are_refused(version: str, delivery: str) -> None:
    expected = "ValueError: scale has another size: 1 elements per rank, not 5"
    assert shown(__file__, version, delivery, "other_size") == expected


# What the ranks run

CASE, RANKS = "stage3-1", 2


def bug(folder: Path) -> str:
    return dt.universal_weights_alone(folder, CASE)


def other_size(folder: Path) -> str:
    return str(dt.results(load_into_other_size, RANKS, folder)[0])


def load_into_other_size(rank: int, folder: Path) -> str:
    dt.train_and_save(rank, folder, CASE, RANKS)
    dt.convert(folder)
    dt.Tiny = larger(dt.Tiny)  # type: ignore[misc]
    resumed = dt.engine_of(CASE, RANKS, universal=True, seed=1)
    resumed.load_checkpoint(str(folder), tag=dt.UNIVERSAL, load_optimizer_states=False)
    return "no error"
