"""round_robin_links: conversions and universal loads of the real DeepSpeed with `round_robin_gradients`."""

from collections.abc import Iterator
from pathlib import Path

from trainers.lazy import dt
from upstream import affected, called, shown, with_fix, without_fix

RELEASES = affected("round_robin_links")
IN_PLACE = {"CKPT_PATCHES": "warn"}  # for the converter in the file of a tree: it reads the switch when it starts


@without_fix(RELEASES)
def test_data_of_other_parameters_is_converted_and_loaded(version: str, delivery: str) -> None:
    found = shown(__file__, version, delivery)
    assert found.count("converted: ") == found.count("loaded: ") == 4
    assert found.count(" differ") >= 8


@with_fix(RELEASES)
def test_each_parameter_gets_its_own(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery, env=IN_PLACE if delivery == "in place" else {}) == ""


@with_fix(RELEASES)
def test_what_was_saved_without_the_fix_is_converted_right(version: str, delivery: str, tmp_path: Path) -> None:
    called(__file__, "save", version=version, delivery="none", folder=tmp_path)
    env = IN_PLACE if delivery == "in place" else {}
    assert called(__file__, "convert", version=version, delivery=delivery, folder=tmp_path, env=env) == ""


@with_fix(RELEASES)
def test_it_loads_on_another_number_of_ranks(version: str, delivery: str, tmp_path: Path) -> None:
    env = IN_PLACE if delivery == "in place" else {}
    assert called(__file__, "loaded_elsewhere", version=version, delivery=delivery, folder=tmp_path, env=env) == ""


# What the ranks run


def cases(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """The cases, ranks and folders."""
    for case in ("stage1_round_robin-2", "stage2_round_robin-2"):
        for ranks in (2, 3):
            yield case, ranks, folder / f"{case} on {ranks}"


def bug(folder: Path) -> str:
    save(folder)
    found = [convert(folder)]
    for case, ranks, own in cases(folder):
        wrong = dt.resumed(case, own / "resumed", ranks=ranks, universal=True)
        found += [f"{own.name} loaded: {wrong}"] * bool(wrong)
    return "; ".join(filter(None, found))


def save(folder: Path) -> None:
    dt.allow_pickles()
    for case, ranks, own in cases(folder):
        dt.results(dt.train_and_keep, ranks, own, case, ranks)


def convert(folder: Path) -> str:
    dt.allow_pickles()
    found = {own.name: dt.converted(own, handed_over=True) for _, _, own in cases(folder)}
    return "; ".join(f"{name} converted: {wrong}" for name, wrong in found.items() if wrong)


def loaded_elsewhere(folder: Path) -> str:
    save(folder)
    found = [convert(folder)]
    for case, ranks, own in cases(folder):
        other = 5 - ranks
        wrong = dt.results(load, other, own, case, other)[0]
        found += [f"{own.name} loaded on {other}: {wrong}"] * bool(wrong)
    return "; ".join(filter(None, found))


def load(rank: int, folder: Path, case: str, ranks: int) -> str:
    import torch

    run = dt.engine_of(case, ranks, universal=True, seed=1)
    dt.load(run, folder, dt.UNIVERSAL)
    truth, found = torch.load(folder / dt.TRUTH), dt.state(run)
    wrong = [f"{name} {key}" for name in truth for key, live in truth[name].items() if not live.equal(found[name][key])]
    return f"{len(wrong)} states differ, and no error" if wrong else ""
