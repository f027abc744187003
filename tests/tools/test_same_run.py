"""`repair --from` accepts an earlier checkpoint of the same run and refuses another run's, on real trainings."""

import functools
import itertools
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_patches.audit.repair.same_run import BOUND, check, distance
from ckpt_patches.cli import main
from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import WEIGHT, Checkpoint, Extent, Shard, Stream
from ckpt_patches.formats.reading import reader_of
from crafted_files import with_other_value
from every_checkpoint import put, tensors
from upstream import newest, once, run, tree
from zero_checkpoints import trained

pytestmark = pytest.mark.slow

STEPS = (2, 10, 50)


@functools.cache
def of_seed(seed: int, stage: int = 1) -> Path:
    """A run's folder, with a checkpoint of each of `STEPS`."""

    def write(out: Path) -> None:
        options = {"seed": seed, "stage": stage, "rate": 1e-2, "steps": ",".join(map(str, STEPS))}
        arguments = [f"--{name}={value}" for name, value in options.items()]
        run("run_of_seed", out, *arguments, tree=tree("deepspeed", newest("deepspeed")))

    return once(f"run-{seed}-{stage}", write)


def between(one: Path, other: Path) -> float:
    readers = [reader_of(path) for path in (one, other)]
    found = distance(*(reader(path) for reader, path in zip(readers, (one, other), strict=True) if reader))
    assert found is not None
    return found


def test_the_bound_is_between_runs() -> None:
    runs = [of_seed(seed) for seed in range(2)]
    for earlier, later in itertools.combinations_with_replacement(STEPS, 2):
        here, there = (f"global_step{step}" for step in (later, earlier))
        assert between(runs[0] / here, runs[0] / there) < 0.8 * BOUND
        assert between(runs[0] / here, runs[1] / there) > 1.2 * BOUND


@pytest.fixture(params=[1, 3])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    """A checkpoint with a lost first moment, and its ZeRO stage."""
    folder = shutil.copytree(of_seed(0, request.param) / "global_step10", tmp_path / "run" / "global_step10")
    place = max((p for p in tensors(folder) if p.name.endswith("exp_avg")), key=lambda place: place.numel)
    put(place, np.full(10, np.nan, np.float32).tobytes())
    return folder, request.param


def refusal(capsys: pytest.CaptureFixture[str], path: Path, source: Path) -> str:
    capsys.readouterr()
    output = path.parent / "new"
    assert main(["repair", str(path), "--output", str(output), "--from", str(source)]) == 2
    assert not output.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--from {source}: expected an older checkpoint of the run of {path}, but " in line
    return line


def test_another_run_itself_and_a_later_step_are_refused(
    damaged: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, stage = damaged
    assert "its weights are 1." in refusal(capsys, path, of_seed(1, stage) / "global_step2")
    (tmp_path / "link").symlink_to(path)
    for same in (path, tmp_path / "link"):
        assert "it is the damaged one itself" in refusal(capsys, path, same)
    assert "its step is 50, expected 10 at the latest" in refusal(capsys, path, of_seed(0, stage) / "global_step50")


def test_other_settings_and_shapes_are_refused(
    damaged: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, stage = damaged
    source = shutil.copytree(of_seed(0, stage) / "global_step2", tmp_path / "other" / "global_step2")

    def other_betas(value: Any) -> None:
        optimizer = value["optimizer_state_dict"]
        base = optimizer["base_optimizer_state" if stage < 3 else "optimizer_state_dict"]
        base["param_groups"][0]["betas"] = (0.8, 0.99)

    for file in source.glob("*_optim_states.pt"):
        with_other_value(file, other_betas)
    refusal(capsys, path, trained("0.16.2", "stage2")["stage2"])
    assert "betas of group 0 is (0.8, 0.99) there, and (0.9, 0.999) here" in refusal(capsys, path, source)


def checkpoint(path: Path, name: str, betas: list[Any], more: str = "") -> Checkpoint:
    weight = np.linspace(1, 2, 64, dtype=np.float32)
    (path / name).mkdir()
    (path / name / "file").write_bytes(weight.tobytes())
    extent = Extent(str(path / name / "file"), 0, weight.nbytes)
    shards = [Shard(own, "", (8, 8), {WEIGHT: Stream(own, "float32", (extent,))}) for own in ("weight", more) if own]
    return Checkpoint(path / name, "of a test", groups=[{"betas": own} for own in betas], shards=shards)


RAGGED = [[0.9], [0.9, 0.999]]


@pytest.mark.parametrize(
    ("older", "reason"),
    [
        ({"betas": [(0.9, 0.99), (0.9, 0.99)]}, "it has 2 param groups, and here are 1"),
        ({"betas": [[0.9, 0.99]], "more": "classifier"}, "it has 'classifier', which is not here"),
        ({"betas": [RAGGED]}, "betas of group 0 is"),
        ({"betas": [[0.9, 0.99]]}, ""),
    ],
)
def test_runs_of_other_parameters_or_groups_are_refused(older: dict[str, Any], reason: str, tmp_path: Path) -> None:
    own, source = checkpoint(tmp_path, "own", [(0.9, 0.99)]), checkpoint(tmp_path, "older", **older)
    with pytest.raises(UserError, match=reason) if reason else nullcontext():
        check(own, source)
