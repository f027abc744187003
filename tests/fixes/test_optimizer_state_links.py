"""optimizer_state_links: the moments that the real DeepSpeed's `safe_get_full_optimizer_state` finds."""

from pathlib import Path
from typing import Any

from trainers.lazy import dt
from upstream import affected, called, with_fix, without_fix

AFFECTED = affected("optimizer_state_links")
FIRST_GROUP = {"w1.weight", "w2.weight"}
OTHER_GROUPS = {"w1.bias", "ln.weight", "ln.bias", "w2.bias", "scale"}


@without_fix(AFFECTED)
def test_upstream_finds_those_of_the_first_group_and_none_after_a_load(version: str, delivery: str) -> None:
    for case, found in called(__file__, "unlinked", version=version, delivery=delivery).items():
        if case == "bf16_optimizer-2":  # all groups step at once
            assert found["trained"] == {}
        else:
            assert found["trained"].keys() == OTHER_GROUPS
            assert set(found["trained"].values()) == {"ValueError: exp_avg not found in optimizer state fragment"}
        assert found["loaded"].keys() == FIRST_GROUP | OTHER_GROUPS
        assert set(found["loaded"].values()) == {"TypeError: argument of type 'NoneType' is not iterable"}
        assert found["a step later"] == found["loaded"]


@with_fix(AFFECTED)
def test_those_of_every_group_are_found(version: str, delivery: str) -> None:
    """The moments equal the flat partitions; the run, and a load of its own files, do not change."""
    for found in called(__file__, "unlinked", version=version, delivery=delivery).values():
        assert found == {"trained": {}, "loaded": {}, "a step later": {}, "reloaded": [], "later": []}


# What the ranks run

RANKS = 2
NO_BF16_OPTIMIZER = ((0, 17, 6), (0, 18, 4))  # the releases with the bug of bf16_wrapper_name


def unlinked(folder: Path) -> dict[str, dict[str, Any]]:
    """By case, the parameters whose moments are not found; and the states that are not those of the save."""
    import deepspeed

    dt.allow_pickles()
    first, last = NO_BF16_OPTIMIZER
    cases = ["stage1-2", "stage2-2"]
    cases += ["bf16_optimizer-2"] * (not first <= dt.numbers(deepspeed.__version__) <= last)
    return {case: dt.results(of_case, RANKS, folder / case, case)[0] for case in cases}


def of_case(rank: int, folder: Path, case: str) -> dict[str, Any]:
    run = dt.engine_of(case, RANKS, universal=False, seed=0)
    dt.train(run, rank, RANKS, first=0)
    found: dict[str, Any] = {"trained": errors_of(run)}
    saved, end = dt.save_and_go_on(run, rank, folder, RANKS, dt.snapshot)
    dt.load(run, folder, dt.TAG)
    found |= {"loaded": errors_of(run), "reloaded": dt.on_any_rank(dt.differences(dt.snapshot(run), saved))}
    dt.train(run, rank, RANKS, first=dt.STEPS)
    return found | {"a step later": errors_of(run), "later": dt.on_any_rank(dt.differences(dt.snapshot(run), end))}


def errors_of(run: Any) -> dict[str, str]:
    """By parameter, the error of `safe_get_full_optimizer_state` on a rank, or that it returns another state."""
    from deepspeed.utils import safe_get_full_optimizer_state

    live, found = dt.state(run), {}
    for name, parameter in run.module.named_parameters():
        errors = [error for error in dt.gathered(error_of_link(parameter)) if error]
        if errors:  # on some ranks; the others would wait for them
            found[name] = errors[0]
        elif not all(safe_get_full_optimizer_state(parameter, key).equal(live[name][key]) for key in dt.MOMENTS):
            found[name] = "another state"
    return found


def error_of_link(parameter: Any) -> str:
    try:
        for key in dt.MOMENTS if parameter._hp_mapping is not None else ():
            parameter._hp_mapping.get_hp_fragment(key)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
