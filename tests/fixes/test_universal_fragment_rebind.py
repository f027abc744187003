"""universal_fragment_rebind: after a universal load the main parameters are those that were loaded."""

from pathlib import Path

from trainers.lazy import dt
from upstream import affected, shown, with_fix, without_fix

RELEASES = affected("universal_fragment_rebind")


@without_fix(RELEASES)
def test_another_state_is_read_as_the_main_parameter(version: str, delivery: str) -> None:
    assert "parameters, and no error" in shown(__file__, version, delivery)


@without_fix(RELEASES)
def test_a_second_load_leaves_the_main_parameters_as_they_are(version: str, delivery: str) -> None:
    assert "differ after load 2, and no error" in shown(__file__, version, delivery, "two_loads")


@with_fix(RELEASES)
def test_the_main_parameters_that_were_loaded_are_read_and_loaded_again(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# What the ranks run

CASES, RANKS = ("stage1-2", "stage2-2"), 2


def bug(folder: Path) -> str:
    return two_loads(folder, ask=True)


def two_loads(folder: Path, ask: bool = False) -> str:
    dt.allow_pickles()
    found = {case: dt.results(load_twice, RANKS, folder / case, case, ask)[0] for case in CASES}
    return "; ".join(f"{case}: {wrong}" for case, wrong in found.items() if wrong)


def load_twice(rank: int, folder: Path, case: str, ask: bool) -> str:
    """Load, go on, load again and go on; with `ask`, ask for the main parameters as well."""
    from deepspeed.utils import safe_get_full_fp32_param

    saved, end = dt.train_and_save(rank, folder, case, RANKS)
    dt.convert(folder)
    run = dt.engine_of(case, RANKS, universal=True, seed=1)
    for number in (1, 2):
        dt.load(run, folder, dt.UNIVERSAL)
        if different := dt.on_any_rank(dt.differences(dt.snapshot(run), saved)):
            return f"{len(different)} states differ after load {number}, and no error"
        live, parameters = dt.state(run), dict(run.module.named_parameters()) if ask else {}
        asked = {name: safe_get_full_fp32_param(parameter) for name, parameter in parameters.items()}
        if wrong := [name for name, found in asked.items() if not found.equal(live[name]["fp32"])]:
            return f"another state for {len(wrong)} of {len(asked)} parameters, and no error"
        dt.train(run, rank, RANKS, first=dt.STEPS)
    different = dt.on_any_rank(dt.differences(dt.snapshot(run), end))
    return f"{len(different)} states differ {dt.STEPS} steps later, and no error" if different else ""
