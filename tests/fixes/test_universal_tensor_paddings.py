"""universal_tensor_paddings: DeepSpeed's own converter converts paddings that are larger than a partition."""

from pathlib import Path

import pytest

import edits
from ckpt_patches.engine.plan import Outcome
from trainers.lazy import dt
from upstream import affected, newest, releases, run, run_json, shown, tree, with_fix, without_fix
from zero_checkpoints import CRASH, convert, converted, differences, dp768, losses, trained

RELEASES = affected("universal_tensor_paddings")[-1:]


@without_fix(RELEASES)
def test_the_conversion_fails(version: str, delivery: str) -> None:
    assert "RuntimeError: narrow(): length must be non-negative" in shown(__file__, version, delivery)


@with_fix(RELEASES)
def test_it_is_converted_bit_for_bit(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# Further cases

FIX = "universal_tensor_paddings"

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
@pytest.mark.parametrize(("how", "version"), [("module", NEW_WRITER), ("script", NEW_WRITER), ("script", OLD_WRITER)])
def test_as_a_program(how: str, version: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The output is right as `python -m`, and as a script: its __main__ bypasses the hook, but not its imports."""
    arguments = ("--input_folder", checkpoints["stage1"], "--output_folder", tmp_path / "universal")
    env = {"CKPT_PATCHES_SKIP": "universal_converter"}
    run("converter_as", how, *arguments, tree=tree("deepspeed", version), delivery="hook", env=env)
    assert differences(converted(tmp_path / "universal"), checkpoints["stage1"]) == []


@pytest.mark.slow
def test_spawned_workers(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Spawned workers convert correctly: new interpreters import the converter themselves."""
    options = ("--start-method", "spawn")
    found = convert(
        tmp_path, checkpoints["stage1"], version=NEW_WRITER, delivery="hook", by_upstream=True, options=options
    )
    assert found == {"stage1": ""}
    assert differences(converted(tmp_path / "stage1"), checkpoints["stage1"]) == []


# The edits themselves

STRIP_AT_MOST = "raw_length = max(0, state_value.numel() - group_paddings[key])"


@pytest.fixture(params=["0.15.0", OLD_WRITER, NEW_WRITER])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The edited files of a release, writable."""
    return edits.copy_of(tree("deepspeed", request.param), FIX, tmp_path)


def test_fixed_upstream_in_another_form(copy: Path) -> None:
    """A release that bounds the length in its own way and asks for no stripping needs no edit."""
    edits.write(edits.plan(copy, FIX)[1])
    edits.rewrite(
        copy,
        "deepspeed.checkpoint.zero_checkpoint",
        STRIP_AT_MOST,
        STRIP_AT_MOST.replace("0, ", "").replace("[key])", "[key], 0)"),
    )
    result, plan = edits.plan(copy, FIX)
    assert (result.outcome, plan.files) == (Outcome.NOT_NEEDED, {})


# What the ranks run


def bug(folder: Path) -> str:
    """A param group of one element."""
    return dt.trained_and_converted("bf16_optimizer-3", folder, ranks=2)
