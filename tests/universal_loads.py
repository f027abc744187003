"""What a DeepSpeed release does with param groups when it saves and loads, for the tests of the fixes of that."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shared
from upstream import numbers, releases, run, run_json, tree
from zero_checkpoints import PERMISSIVE

PROGRAM = "universal_loading"
MASTERS = "w1.weight.fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")

# A checkout of the main branch, if there is one: the last of a range without end.
ON_MAIN = releases("deepspeed", oldest="999")

# These take fp32 gradient accumulation for bf16, and train without ZeRO what should be BF16_Optimizer's.
NO_BF16_OPTIMIZER = ("0.17.6", "0.18.4")


def kinds(version: str) -> tuple[str, ...]:
    """Of zero_training, those with moments in flat partitions that a release trains."""
    first, last = map(numbers, NO_BF16_OPTIMIZER)
    return ("stage1", "stage2", *(() if first <= numbers(version) <= last else ("bf16_optimizer",)))


def written(version: str, delivery: str = "none", *, small: bool = False) -> dict[str, dict[str, Any]]:
    """What came of a training and a load of its own files, by kind; the files are at `checkpoints`."""
    return _read(checkpoints(version, delivery, small=small) / "write.json")


@functools.cache
def checkpoints(version: str, delivery: str = "none", *, small: bool = False) -> Path:
    """The folder with what a release has trained, saved and converted, made once a session."""
    name = f"universal-{version}-{delivery.replace(' ', '-')}{'-small' if small else ''}"

    def write(folder: Path) -> None:
        options = ["--small"] if small else []
        found = _run("write", folder, *kinds(version), *options, version=version, delivery=delivery)
        optimizers = {kind: result["optimizer"] for kind, result in found.items()}
        assert optimizers.get("bf16_optimizer", "BF16_Optimizer") == "BF16_Optimizer", optimizers
        assert optimizers["stage1"] == "DeepSpeedZeroOptimizer", optimizers

    return shared.once(name, write)


def resumed(
    version: str, delivery: str, *options: str, small: bool = False, writer: str = "", fixes: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """What came of a run that loads what the unedited release (or another one) has written, by kind."""
    folder = checkpoints(writer or version, small=small)
    small_option = ["--small"] if small else []
    return _run(
        "resume", folder, *kinds(version), *small_option, *options, version=version, delivery=delivery, fixes=fixes
    )


def output_of_resume(
    version: str, delivery: str, *options: str, of: Sequence[str] = ()
) -> tuple[dict[str, dict[str, Any]], str]:
    """As `resumed`, of some kinds or of all, and all that the run prints."""
    arguments: tuple[str | Path, ...] = ("resume", checkpoints(version), *(of or kinds(version)), *options)
    done = run(PROGRAM, *arguments, tree=tree("deepspeed", version), delivery=delivery)
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stdout + done.stderr


def error_of_resume(version: str, *options: str, small: bool = False, writer: str = "") -> str:
    """What the unedited release says when it dies of such a load, at stage 1."""
    folder = checkpoints(writer or version, small=small)
    small_option = ["--small"] if small else []
    root = tree("deepspeed", version)
    done = run(PROGRAM, "resume", folder, "stage1", *small_option, *options, tree=root, env=PERMISSIVE, check=False)
    assert done.returncode != 0
    return done.stderr


def _run(*arguments: str | Path, version: str, delivery: str, fixes: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Without the fixes torch is told to load as it used to, so that the bug is reached."""
    env = PERMISSIVE if delivery == "none" else {}
    root = tree("deepspeed", version)
    found = run_json(PROGRAM, *arguments, tree=root, delivery=delivery, fixes=fixes, env=env)
    assert isinstance(found, dict)
    return found


def _read(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return found
