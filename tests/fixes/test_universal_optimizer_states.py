"""universal_optimizer_states: universal checkpoints of Lion, SGD and Muon have their states."""

import re
from pathlib import Path

from trainers.lazy import dt, optimizers
from upstream import proof

test_the_conversion_fails_or_a_load_misses_states, test_they_are_converted_and_loaded_bit_for_bit = proof(
    __file__, re.compile("KeyError: |are not as saved")
)


# What the ranks run

SAVED, LOADED = 2, (2, 3)  # ranks
FIRST_OF_MUON_AT_ZERO3, EQUAL_AGAIN = (0, 18, 9), (0, 19, 8)


def bug(folder: Path) -> str:
    dt.allow_pickles()
    every = [f"{name}-{stage}" for stage in (1, 3) for name in optimizers.OPTIMIZERS]
    chosen = [*every, *(f"Muon-{stage}" for stage in stages_of_muon())]
    dt.results(optimizers.train_and_keep, SAVED, folder, chosen, SAVED)
    found = dt.results(convert, 1, folder, chosen)[0]
    converted = [case for case in chosen if case not in found]
    for ranks in LOADED:
        for case, wrong in dt.results(optimizers.load, ranks, folder, converted, ranks, dt.UNIVERSAL)[0].items():
            if wrong:
                found.setdefault(case, f"on {ranks} ranks {len(wrong)} are not as saved: {wrong[0]}")
    return "; ".join(f"{case}: {wrong}" for case, wrong in sorted(found.items()))


def stages_of_muon() -> tuple[int, ...]:
    """From 0.18.9 to 0.19.7 ranks' momenta of a matrix differ at ZeRO 1, and CPU ranks cannot train at ZeRO 3."""
    import deepspeed

    if not optimizers.has_muon():
        return ()
    release = dt.numbers(deepspeed.__version__)
    if release >= EQUAL_AGAIN:
        return (1, 3)
    return () if release >= FIRST_OF_MUON_AT_ZERO3 else (1,)


def convert(rank: int, folder: Path, chosen: list[str]) -> dict[str, str]:
    """The errors of the converter that DeepSpeed's `main` runs, by case: this project's with the fixes.

    It alone can locate the momentum of Muon at ZeRO 1.
    """
    found = {}
    for case in chosen:
        if case == "Muon-1":
            dt.convert(folder / case)
            continue
        try:
            dt.convert_by_upstream(0, folder / case / dt.TAG, folder / case / dt.UNIVERSAL, 1, handed_over=True)
        except KeyError as error:
            found[case] = f"KeyError: {error}"
    return found
