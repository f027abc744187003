"""universal_tensor_paddings: DeepSpeed's own converter converts paddings that are larger than a partition."""

from pathlib import Path
from typing import Any

import pytest

import edits
from trainers.lazy import dt
from upstream import affected, newest, proof, releases, run, run_json, tree, with_fix, without_fix
from zero_checkpoints import CRASH, convert, converted, differences, dp768, losses, trained

test_the_conversion_fails, test_it_is_converted_bit_for_bit = proof(
    __file__, "RuntimeError: narrow(): length must be non-negative", affected("universal_tensor_paddings")[-1:]
)


# Further cases

RELEASES = releases("deepspeed")
OLD_WRITER, NEW_WRITER = "0.16.2", newest("deepspeed")


@pytest.fixture(scope="module")
def checkpoints() -> dict[str, Path]:
    """Real trainings by kind: 11 elements on 8 ranks, 2 per rank, and a padding of 5 recorded on the last rank."""
    return {**trained(OLD_WRITER, "stage1", "stage2"), **trained(NEW_WRITER, "bf16_optimizer")}


@without_fix(RELEASES)
def test_upstream_crashes(version: str, delivery: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    outcome = convert(tmp_path, *checkpoints.values(), version=version, delivery=delivery, by_upstream=True)
    assert outcome == {"stage1": CRASH, "stage2": CRASH, "bf16_optimizer": CRASH}


@with_fix(RELEASES)
def test_converts_what_was_trained(version: str, delivery: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The result is bit-equal to the main parameters and moments at the save."""
    outcome = convert(tmp_path, *checkpoints.values(), version=version, delivery=delivery, by_upstream=True)
    assert outcome == {"stage1": "", "stage2": "", "bf16_optimizer": ""}
    for kind, source in checkpoints.items():
        assert differences(converted(tmp_path / kind), source) == []


@pytest.mark.parametrize("version", ["0.15.0", NEW_WRITER])
def test_the_report_dp768(version: str, tmp_path: Path) -> None:
    """The reported checkpoint converts: 65 x 4096 elements on 768 partitions of 348; the padding is 1024."""
    source = dp768()["dp768"]
    assert convert(tmp_path, source, version=version, delivery="hook", by_upstream=True) == {"dp768": ""}
    assert differences(converted(tmp_path / "dp768"), source) == []


@pytest.mark.parametrize(("kind", "version"), [("stage1", OLD_WRITER), ("bf16_optimizer", NEW_WRITER)])
def test_resumes_on_another_number_of_ranks(
    kind: str, version: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A resume from 8 ranks on 2, with equal samples per step, has equal state and the uninterrupted run's losses."""
    source = checkpoints[kind]
    assert convert(tmp_path, source, version=version, delivery="hook", by_upstream=True) == {kind: ""}
    arguments = ("resume", source.parent, "--tag", tmp_path / kind, "--ranks", "2")
    found = run_json("zero_resuming", *arguments, tree=tree("deepspeed", version), delivery="hook")
    resumed = found[str(source.parent)]
    assert resumed["different"] == []
    assert resumed["losses"] == pytest.approx(losses(source), rel=0.01)  # bf16 has a precision of 8 bits


@pytest.mark.slow
@pytest.mark.parametrize(("how", "version"), [("module", NEW_WRITER), ("script", OLD_WRITER), ("spawn", NEW_WRITER)])
def test_as_a_program(how: str, version: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As `python -m`; as a script, whose __main__ bypasses the hook, but not its imports; with spawned workers."""
    source = checkpoints["stage1"]
    on: dict[str, Any] = {"tree": tree("deepspeed", version), "delivery": "hook"}
    if how == "spawn":  # new interpreters import the converter themselves
        run("convert", source, "--output", tmp_path, "--start-method", "spawn", **on)
    else:
        arguments = ("--input_folder", source, "--output_folder", tmp_path / "stage1")
        run("converter_as", how, *arguments, **on, env={"CKPT_PATCHES_SKIP": "universal_converter"})
    assert differences(converted(tmp_path / "stage1"), source) == []


@pytest.mark.parametrize("version", ["0.15.0", OLD_WRITER, NEW_WRITER])
def test_fixed_upstream_in_another_form(version: str, tmp_path: Path) -> None:
    """A release that bounds the length in its own way and asks for no stripping needs no edit."""
    fix, strip = "universal_tensor_paddings", "raw_length = max(0, state_value.numel() - group_paddings[key])"
    copy = edits.copy_of(tree("deepspeed", version), fix, tmp_path)
    edits.write(edits.plan(copy, fix)[1])
    other = strip.replace("0, ", "").replace("[key])", "[key], 0)")
    edits.rewrite(copy, "deepspeed.checkpoint.zero_checkpoint", strip, other)
    edits.check_not_needed(copy, fix)


# What the ranks run


def bug(folder: Path) -> str:
    """A param group of one element."""
    return dt.trained_and_converted("bf16_optimizer-3", folder, ranks=2)
