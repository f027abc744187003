"""reshardable_padding_save: the real megatron-core saves buckets with padding beyond the end of one rank's shard."""

from pathlib import Path

import pytest

from upstream import affected, newest_affected, numbers, run_lines, tree, with_fix, without_fix

FIX = "reshardable_padding_save"
AFFECTED = affected(FIX)
NEWEST = newest_affected(FIX)[1]
EMPTY = ("small bucket", "gap", "rank without parameters")


def cases(version: str) -> tuple[str, ...]:
    """The cases whose save fails. Up to 0.14 the end padding is saved as well, and no gap extends beyond it."""
    return ("shared embedding", *EMPTY) if numbers(version) >= (0, 15) else EMPTY


def reshardable(version: str) -> str:
    """The name of the format in a release."""
    return "dp_reshardable" if numbers(version) >= (0, 15) else "fully_sharded_bucket_space"


def results(
    version: str,
    delivery: str,
    folder: Path,
    *names: str,
    ranks: int = 4,
    load: Path | None = None,
    kind: str = "",
) -> dict[str, str]:
    """The result of each case's save and load, in the format of buckets or in `kind`."""
    options = ["--format", kind or reshardable(version), "--ranks", str(ranks), "--cases", ",".join(names)]
    options += ["--load", str(load)] if load else []
    lines = run_lines("padded_saving", folder, *options, tree=tree("megatron-core", version), delivery=delivery)
    return {line["case"]: line["result"] for line in lines}


@without_fix(AFFECTED)
def test_upstream_dies_saving(version: str, delivery: str, tmp_path: Path) -> None:
    found = results(version, delivery, tmp_path, "plain", *cases(version))
    assert found.pop("plain") == "bit-equal"
    assert found.keys() == set(cases(version))
    assert all(result.startswith("save died: ") for result in found.values()), found
    words = {"shared embedding": "out of bounds chunk", **dict.fromkeys(EMPTY, "empty bucket encountered")}
    assert all(words[case] in result for case, result in found.items()), found


@with_fix(AFFECTED)
def test_a_resume_is_bit_equal(version: str, delivery: str, tmp_path: Path) -> None:
    names = ("plain", *cases(version))
    assert results(version, delivery, tmp_path, *names) == dict.fromkeys(names, "bit-equal")


@pytest.mark.slow
def test_on_another_number_of_ranks(tmp_path: Path) -> None:
    names = ("plain", *cases(NEWEST))
    results(NEWEST, "hook", tmp_path, *names, ranks=2)
    assert results(NEWEST, "hook", tmp_path, *names, load=tmp_path) == dict.fromkeys(names, "bit-equal")


@pytest.mark.slow
def test_a_load_without_the_fix_dies_where_a_rank_has_saved_nothing_of_a_bucket(tmp_path: Path) -> None:
    results(NEWEST, "hook", tmp_path, *cases(NEWEST))
    found = results(NEWEST, "none", tmp_path, *cases(NEWEST), load=tmp_path)
    assert found.pop("shared embedding") == "bit-equal"
    assert {result.partition(": ")[0] for result in found.values()} == {"load died"}


@pytest.mark.slow
def test_a_checkpoint_that_was_saved_without_the_fix_loads(tmp_path: Path) -> None:
    results(NEWEST, "none", tmp_path, "plain")
    assert results(NEWEST, "hook", tmp_path, "plain", load=tmp_path) == {"plain": "bit-equal"}
