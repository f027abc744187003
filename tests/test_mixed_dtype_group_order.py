"""mixed_dtype_group_order: the real megatron-core, and checkpoints that it saved without the fix."""

from pathlib import Path

import pytest

from upstream import newest_affected, run_lines, tree

NEWEST = newest_affected("mixed_dtype_group_order")[1]
REFUSED = "ValueError: Cannot tell whose states were loaded"


def line(delivery: str, what: str, folder: Path, *options: str, ranks: int) -> dict[str, object]:
    where = {"tree": tree("megatron-core", NEWEST), "delivery": delivery}
    (found,) = run_lines("mixed_groups", what, folder, "--ranks", str(ranks), *options, **where)
    return found


@pytest.mark.parametrize("kind", ["fully_reshardable", "torch"])
def test_what_a_release_saved_is_put_right_on_as_many_ranks_and_refused_on_others(kind: str, tmp_path: Path) -> None:
    options = ("--format", kind)
    assert line("none", "save", tmp_path, *options, ranks=2) == {"differ": [], "error": ""}
    assert line("hook", "load", tmp_path, *options, ranks=2) == {"differ": [], "error": ""}
    assert str(line("hook", "load", tmp_path, *options, ranks=1)["error"]).startswith(REFUSED)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fully_reshardable", "torch"])
def test_it_loads_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    for saved_on in (1, 2):
        folder = tmp_path / str(saved_on)
        folder.mkdir()
        line("hook", "save", folder, "--format", kind, ranks=saved_on)
        for ranks in (1, 2):
            found = line("hook", "load", folder, "--format", kind, ranks=ranks)
            assert found == {"differ": [], "error": ""}, (saved_on, ranks)


@pytest.mark.long
def test_a_release_reads_its_own_right_on_as_many_ranks_alone(tmp_path: Path) -> None:
    line("none", "save", tmp_path, ranks=2)
    assert line("none", "load", tmp_path, ranks=2) == {"differ": [], "error": ""}
    assert line("none", "load", tmp_path, ranks=1)["differ"]


@pytest.mark.long
@pytest.mark.parametrize("saved", ["none", "hook"])
def test_equal_weights_with_different_moments_are_refused(saved: str, tmp_path: Path) -> None:
    """Such states, as at a learning rate of 0, are refused: their owner is unknown."""
    assert line(saved, "save", tmp_path, "--alike", ranks=2)["error"] == ""
    assert str(line("hook", "load", tmp_path, "--alike", ranks=2)["error"]).startswith(REFUSED)
