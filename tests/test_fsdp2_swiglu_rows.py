"""fsdp2_swiglu_rows: the real megatron-core on other rank counts and in other releases, and mixed checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import shared
from ckpt_patches.audit.audit import audit
from ckpt_patches.cli import command_line
from upstream import newest, run, run_json, tree

SAVED_BY, NEWEST = "0.18.2", newest("megatron-core")  # the last release that mixes rows, and one that does not
IN_PLACE, MIXED = "", " of 0.18"  # as the release saves, and as those up to 0.18 do
TWO, THREE, FOUR = ("--ranks", "2"), ("--ranks", "3"), ("--ranks", "4", "--tensor-parallel", "2")
ALONE = ("--ranks", "1", "--without-fsdp2")
REFUSED = "refused"
TRUTH = "truth.json"  # the rows that the run had, beside its checkpoints


def saved(ranks: Sequence[str], delivery: str = "hook", version: str = SAVED_BY) -> Path:
    """The folder of a run: its checkpoints, and the rows that it had."""

    def save(folder: Path) -> None:
        folder.mkdir()
        run("fsdp2_rows", "save", folder, *ranks, tree=tree("megatron-core", version), delivery=delivery)

    return shared.once(f"fsdp2-rows-{version}-{delivery}-{'-'.join(ranks)}", save)


def mixed_by_audit(folder: Path) -> set[str]:
    """The tensors in which the audit finds mixed rows."""
    return {found.array for found in audit(folder).findings if found.kind.name == "mixed_rows"}


def migrated(ranks: Sequence[str], delivery: str = "hook") -> Path:
    """The folder of `saved` after migration, with rows in place."""

    def migrate(folder: Path) -> None:
        folder.mkdir()
        (folder / TRUTH).symlink_to(saved(ranks, delivery) / TRUTH)
        for form in (IN_PLACE, MIXED):
            old, new = (own / f"saved{form}" for own in (saved(ranks, delivery), folder))
            if mixed_by_audit(old):
                assert command_line.main(["migrate", str(old), "--output", str(new)]) == 0
            else:
                new.symlink_to(old)

    return shared.once(f"fsdp2-rows-migrated-{delivery}-{'-'.join(ranks)}", migrate)


def other_rows(folder: Path, ranks: Sequence[str], version: str, delivery: str) -> dict[str, int | str]:
    """The number of rows that differ from the saved run after a load, or `refused`, by form."""
    found: dict[str, int | str] = run_json(
        "fsdp2_rows", "load", folder, *ranks, tree=tree("megatron-core", version), delivery=delivery
    )
    return found


@pytest.mark.parametrize("ranks", [TWO, ALONE], ids=" ".join)
def test_the_newest_release_loads_what_the_fix_saved_on_three_ranks(ranks: Sequence[str]) -> None:
    """All rows are right, though the middle rank has rows of W and of V."""
    assert other_rows(saved(THREE), ranks, NEWEST, "none")[IN_PLACE] == 0


@pytest.mark.parametrize("ranks", [TWO, THREE], ids=" ".join)
def test_mixed_rows_of_three_ranks_load_on_as_many_and_are_refused_on_others(ranks: Sequence[str]) -> None:
    """Mixed rows are identified by the rank that wrote each chunk, not by the number of chunks."""
    mixed = 0 if ranks == THREE else REFUSED
    assert other_rows(saved(THREE), ranks, SAVED_BY, "hook") == {IN_PLACE: 0, MIXED: mixed}


@pytest.mark.long
def test_a_release_saves_mixed_rows_and_the_newest_one_loads_them_with_the_fix() -> None:
    """Rows are right with the fix, and silently wrong without. On three ranks, 0.18 neither saves nor loads."""
    folder = saved(TWO, "none")
    for form in (IN_PLACE, MIXED):
        assert other_rows(folder, TWO, SAVED_BY, "none")[form] == 0
        assert other_rows(folder, ALONE, SAVED_BY, "none")[form] not in (0, REFUSED)
        assert other_rows(folder, TWO, NEWEST, "none")[form] not in (0, REFUSED)
        assert other_rows(folder, TWO, NEWEST, "hook")[form] == 0


@pytest.mark.long
@pytest.mark.parametrize("ranks", [TWO, THREE, FOUR, ALONE], ids=" ".join)
def test_tensor_parallel_ranks(ranks: Sequence[str]) -> None:
    mixed = 0 if ranks == FOUR else REFUSED
    assert other_rows(saved(FOUR), ranks, SAVED_BY, "hook") == {IN_PLACE: 0, MIXED: mixed}
    if ranks != THREE:
        assert other_rows(saved(FOUR), ranks, NEWEST, "hook") == {IN_PLACE: 0, MIXED: mixed}


def test_the_audit_tells_which_rows_are_mixed() -> None:
    folder = saved(THREE)
    states = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    assert mixed_by_audit(folder / f"saved{MIXED}") == {f"{state}linear_fc1.weight" for state in states}
    assert mixed_by_audit(folder / f"saved{IN_PLACE}") == set()


@pytest.mark.long
def test_the_audit_finds_none_in_what_the_newest_release_saves() -> None:
    assert mixed_by_audit(saved(TWO, "none") / f"saved{IN_PLACE}")
    assert mixed_by_audit(saved(TWO, "none", NEWEST) / f"saved{IN_PLACE}") == set()


@pytest.mark.parametrize("loading", [TWO, ALONE], ids=" ".join)
def test_the_newest_release_loads_what_was_migrated(loading: Sequence[str]) -> None:
    assert other_rows(migrated(THREE), loading, NEWEST, "none") == {IN_PLACE: 0, MIXED: 0}


@pytest.mark.long
@pytest.mark.parametrize("loading", [TWO, FOUR, ALONE], ids=" ".join)
@pytest.mark.parametrize("saving", [TWO, FOUR], ids=" ".join)
def test_the_newest_release_loads_what_a_release_without_the_fix_saved_and_was_migrated(
    saving: Sequence[str], loading: Sequence[str]
) -> None:
    for delivery in ("none", "hook"):
        assert other_rows(migrated(saving, "none"), loading, NEWEST, delivery) == {IN_PLACE: 0, MIXED: 0}


@pytest.mark.long
def test_a_release_with_the_fix_loads_what_was_migrated() -> None:
    """The release loads all rows right; without the fix, it mixes rows that are in place."""
    folder = migrated(TWO, "none")
    for loading in (TWO, THREE, FOUR, ALONE):
        assert other_rows(folder, loading, SAVED_BY, "hook") == {IN_PLACE: 0, MIXED: 0}
    assert other_rows(folder, TWO, SAVED_BY, "none")[IN_PLACE] not in (0, REFUSED)
