"""zero3_fragment_bounds: DeepSpeed's own converter on ZeRO-3 checkpoints with ranks past the end of a parameter."""

import json
from pathlib import Path

import pytest

from upstream import affected, newest_affected, run, tree, with_fix, without_fix
from zero_checkpoints import (
    convert,
    converted,
    differences,
    dp768,
    element_counts,
    losses,
    trained,
)

FIX = "zero3_fragment_bounds"

AFFECTED = affected(FIX)
WRITER = "0.16.2"

# On 8 ranks: of w1.weight's 9 elements ranks 0 to 3 hold 2 each and rank 4 the last; ranks 5, 6, 7 write 1, 2, 2 more.
# Of 3 elements ranks 3 to 7 hold none and write 0, 1, 1, 1, 1. Of 1 element: 0, 1, 1, 1, 1, 1, 1.
TRAINED = {
    "w1.weight": (9, 14),
    "w1.bias": (3, 7),
    "ln.weight": (3, 7),
    "ln.bias": (3, 7),
    "w2.weight": (3, 7),
    "w2.bias": (1, 7),
    "scale": (1, 7),
}
# 4096 elements on 768 ranks are 6 per rank, on 683 ranks; the next writes 2 more, the last 84 write 6 each: 506.
DP768 = {"norm.weight": (4096, 4602)}


def right(table: dict[str, tuple[int, int]]) -> dict[str, int]:
    return {name: elements for name, (elements, _) in table.items()}


def wrong(table: dict[str, tuple[int, int]]) -> dict[str, int]:
    return {name: elements for name, (_, elements) in table.items()}


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """A checkpoint of a real training at stage 3 on 8 ranks."""
    return trained(WRITER, "stage3")["stage3"]


@without_fix(AFFECTED)
def test_upstream_writes_padding_as_data(version: str, delivery: str, checkpoint: Path, tmp_path: Path) -> None:
    """Upstream silently writes padding as data."""
    assert convert(tmp_path, checkpoint, version=version, delivery=delivery) == {"stage3": ""}
    assert element_counts(converted(tmp_path / "stage3")) == wrong(TRAINED)


@with_fix(AFFECTED)
def test_converts_what_was_trained(version: str, delivery: str, checkpoint: Path, tmp_path: Path) -> None:
    """The result is bit-equal to the main parameters and moments at the save."""
    assert convert(tmp_path, checkpoint, version=version, delivery=delivery) == {"stage3": ""}
    assert differences(converted(tmp_path / "stage3"), checkpoint) == []
    assert element_counts(converted(tmp_path / "stage3")) == right(TRAINED)


@pytest.mark.slow
def test_dp768(tmp_path: Path) -> None:
    source, output = dp768()["dp768_stage3"], tmp_path / "dp768_stage3"
    assert convert(tmp_path, source, version=newest_affected(FIX)[1], delivery="none") == {"dp768_stage3": ""}
    assert element_counts(converted(output)) == wrong(DP768)
    assert convert(tmp_path, source, version=newest_affected(FIX)[1], delivery="hook") == {"dp768_stage3": ""}
    assert element_counts(converted(output)) == right(DP768)
    assert differences(converted(output), source) == []


@pytest.mark.slow
@pytest.mark.parametrize(("how", "delivery"), [("module", "hook"), ("script", "in place")])
def test_as_a_program(how: str, delivery: str, checkpoint: Path, tmp_path: Path) -> None:
    """The output is right: `python -m` uses the hook; a bare script has the edit in its file."""
    arguments = ("--input_folder", checkpoint, "--output_folder", tmp_path)
    env = {"CKPT_PATCHES_SKIP": "universal_converter"}
    run("converter_as", how, *arguments, tree=tree("deepspeed", WRITER), delivery=delivery, env=env)
    assert differences(converted(tmp_path), checkpoint) == []


@pytest.mark.parametrize("delivery", ["none", "hook"])
def test_resumes_on_another_number_of_ranks(delivery: str, checkpoint: Path, tmp_path: Path) -> None:
    """With the fix, 4 ranks resume what 8 saved. DeepSpeed splits tensors by their stored length."""
    assert convert(tmp_path, checkpoint, version=WRITER, delivery=delivery) == {"stage3": ""}
    arguments = ("resume", checkpoint.parent, tmp_path / "stage3", "stage3", "--ranks", "4")
    done = run("zero_training", *arguments, tree=tree("deepspeed", WRITER), delivery=delivery, check=False)
    if delivery == "none":
        assert "RuntimeError: The size of tensor a (9) must match the size of tensor b (16)" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    resumed = json.loads(done.stdout.splitlines()[-1])
    assert resumed["different"] == []
    assert resumed["losses"] == pytest.approx(losses(checkpoint), rel=0.01)  # bf16 has a precision of 8 bits
