"""Save and load param groups with a DeepSpeed release, for tests of the fixes that concern them."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from upstream import numbers, once, releases, run, run_json, tree
from zero_checkpoints import PERMISSIVE

PROGRAM = "universal_loading"
MASTERS = "w1.weight.fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")

# The checkout of the main branch, if there is one: the last entry of an open-ended range.
ON_MAIN = releases("deepspeed", oldest="999")

# First and last release with the bug of bf16_wrapper_name, which trains without ZeRO, not with BF16_Optimizer.
NO_BF16_OPTIMIZER = ("0.17.6", "0.18.4")


def kinds(version: str) -> tuple[str, ...]:
    """The kinds of zero_training with moments in flat partitions that a release trains."""
    first, last = map(numbers, NO_BF16_OPTIMIZER)
    return ("stage1", "stage2", *(() if first <= numbers(version) <= last else ("bf16_optimizer",)))


def written(version: str, delivery: str = "none", *, small: bool = False) -> dict[str, dict[str, Any]]:
    """The results of training and of loading its own files, by kind; the files are at `checkpoints`."""
    return _read(checkpoints(version, delivery, small=small) / "write.json")


@functools.cache
def checkpoints(version: str, delivery: str = "none", *, small: bool = False) -> Path:
    """The folder with a release's saved and converted checkpoints, created once per session."""
    name = f"universal-{version}-{delivery.replace(' ', '-')}{'-small' if small else ''}"

    def write(folder: Path) -> None:
        options = ["--small"] if small else []
        found = _run("write", folder, *kinds(version), *options, version=version, delivery=delivery)
        optimizers = {kind: result["optimizer"] for kind, result in found.items()}
        assert optimizers.get("bf16_optimizer", "BF16_Optimizer") == "BF16_Optimizer", optimizers
        assert optimizers["stage1"] == "DeepSpeedZeroOptimizer", optimizers

    return once(name, write)


def resumed(
    version: str, delivery: str, *options: str, small: bool = False, writer: str = "", fixes: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """The results of a run that loads what the unpatched release (or `writer`) wrote, by kind."""
    folder = checkpoints(writer or version, small=small)
    small_option = ["--small"] if small else []
    return _run(
        "resume", folder, *kinds(version), *small_option, *options, version=version, delivery=delivery, fixes=fixes
    )


def output_of_resume(
    version: str, delivery: str, *options: str, of: Sequence[str] = ()
) -> tuple[dict[str, dict[str, Any]], str]:
    """As `resumed`, for some kinds or all, and the run's output."""
    arguments: tuple[str | Path, ...] = ("resume", checkpoints(version), *(of or kinds(version)), *options)
    done = run(PROGRAM, *arguments, tree=tree("deepspeed", version), delivery=delivery)
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stdout + done.stderr


def error_of_resume(version: str, *options: str, small: bool = False, writer: str = "") -> str:
    """The stderr of the unpatched release when such a load fails, at stage 1."""
    folder = checkpoints(writer or version, small=small)
    small_option = ["--small"] if small else []
    root = tree("deepspeed", version)
    done = run(PROGRAM, "resume", folder, "stage1", *small_option, *options, tree=root, env=PERMISSIVE, check=False)
    assert done.returncode != 0
    return done.stderr


def _run(*arguments: str | Path, version: str, delivery: str, fixes: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Run the program; without the fixes, torch loads as it used to, so that the bug is reached."""
    env = PERMISSIVE if delivery == "none" else {}
    root = tree("deepspeed", version)
    found = run_json(PROGRAM, *arguments, tree=root, delivery=delivery, fixes=fixes, env=env)
    assert isinstance(found, dict)
    return found


def _read(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return found
