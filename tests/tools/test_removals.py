"""Deleting or replacing any checkpoint entry (with its neighbor or the next save's value) is never silent.

The real DeepSpeed or megatron-core is the reference: if it loads the changed checkpoint to the same live state, WHOLE
is right. Without a record, a value replaced by another plausible value cannot be detected; with a record it must be.
"""

import functools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import universal
from ckpt_patches.audit.audit import WHOLE, audit
from megatron_checkpoints import Configuration
from megatron_checkpoints import written as written_by_megatron
from removals import DELETED, Change, changes, make
from upstream import newest, once, run, run_json, tree

pytestmark = pytest.mark.slow

NEWEST = newest("megatron-core")
# Most kinds take minutes: only `pytest -m exhaustive` has them.
OF_ZERO = (
    *("stage2", "stage0", "stage0_fp16", "stage1", "stage1_fp16", "bf16_optimizer", "stage2_round_robin", "stage3"),
    *("stage3_fp16", "stage3_frozen", "stage3_groups", "pipeline", "pipeline, tensor parallel", "autotp"),
    *("autotp, stage 3", "stage2, LoRA", "stage2, frozen, tied, masked", "stage1, SGD with momentum", "stage1, NAdam"),
    "stage2, RMSprop",
)
# Of DeepSpeed without ZeRO: a parameter that never had a gradient has no state either.
UNTOLD_OF_ZERO = r"\['state'\]\[\d+\] deleted"
OF_ZERO_IN_CI = {"stage2": [], "stage0": [pytest.mark.slow], "pipeline, tensor parallel": [pytest.mark.slow]}
KINDS = [pytest.param(kind, marks=OF_ZERO_IN_CI.get(kind, pytest.mark.exhaustive)) for kind in OF_ZERO]


class Found(NamedTuple):
    """The changes of a checkpoint by result."""

    reported: list[Change]
    same: list[Change]  # WHOLE, and loaded to the same live state
    missed: list[Change]  # WHOLE, but loaded to another state or not at all


@functools.cache
def written(kind: str, recorded: str) -> Path:
    """The folder of a run with two saves."""

    def write(out: Path) -> None:
        env = {"CKPT_PATCHES_FINGERPRINT": recorded}
        release = tree("deepspeed", newest("deepspeed"))
        run("zero_removals", "write", out, kind, tree=release, delivery="hook" if recorded == "1" else "none", env=env)

    return once(f"removals-{kind.replace(', ', '-').replace(' ', '-')}-{recorded}", write)


Loads = Callable[[Path], Any]  # from a file that lists folders, to the live state of each folder, or {"error": "..."}


def judged(folder: Path, later: Path, tmp_path: Path, loads: Loads) -> Found:
    """Sort the changes of a checkpoint by result; `later` is the next checkpoint of the run."""
    assert audit(folder).verdict == audit(later).verdict == WHOLE, audit(folder).findings
    reported, whole = [], {}
    for number, change in enumerate(changes(folder, later)):
        copy = Path(shutil.copytree(folder, tmp_path / str(number) / folder.name))
        make(change, copy, later)
        if audit(copy).verdict == WHOLE:
            whole[str(copy)] = change
        else:
            reported.append(change)
            shutil.rmtree(copy.parent)
    (tmp_path / "cases.json").write_text(json.dumps([str(folder), *whole]))
    loaded = loads(tmp_path / "cases.json")
    assert "error" not in loaded[str(folder)], loaded[str(folder)]
    same = [change for copy, change in whole.items() if loaded[copy] == loaded[str(folder)]]
    return Found(reported, same, [change for change in whole.values() if change not in same])


def of_zero(kind: str, tmp_path: Path, recorded: str = "0") -> Found:
    folder, later = (written(kind, recorded) / name for name in ("global_step2", "global_step4"))
    release = tree("deepspeed", newest("deepspeed"))
    return judged(folder, later, tmp_path, lambda cases: run_json("zero_removals", "load", cases, kind, tree=release))


def of_megatron(made: Configuration, tmp_path: Path) -> Found:
    folder, later = written_by_megatron(made).whole
    options, release = made.options(), tree("megatron-core", made.version)

    def loads(cases: Path) -> Any:
        return run_json("megatron_saving", folder, *options, f"--load={cases}", tree=release)

    return judged(folder, later, tmp_path, loads)


def of_universal(kind: str, tmp_path: Path) -> Found:
    """The reference is DeepSpeed with the fixes: without them it does not load experts."""

    def convert(out: Path) -> None:
        for name in ("global_step2", "global_step4"):
            universal.ours(written(kind, "0") / name, out / name, "--inject_missing_state")

    folder = once(f"removals-universal-{kind}", convert)
    release = tree("deepspeed", newest("deepspeed"))

    def loads(cases: Path) -> Any:
        return run_json("zero_removals", "load", cases, kind, "--universal", tree=release, delivery="hook")

    return judged(folder / "global_step2", folder / "global_step4", tmp_path, loads)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_missed_but_a_value_that_could_be(kind: str, tmp_path: Path) -> None:
    found = of_zero(kind, tmp_path)
    missed = [str(change) for change in found.missed if change.how == DELETED or not change.key]
    assert [text for text in missed if not (kind.startswith("stage0") and re.search(UNTOLD_OF_ZERO, text))] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["stage3", "autotp", "experts", "stage1", "pipeline", "autotp, stage 3"])
def test_nothing_of_a_universal_checkpoint_is_missed_but_a_value_that_could_be(kind: str, tmp_path: Path) -> None:
    found = of_universal(kind, tmp_path)
    missed = [str(change) for change in found.missed if change.how == DELETED]
    assert [text for text in missed if "['loss_scaler']" not in text] == []  # in bf16 runs, which do not scale the loss


# Changes that cannot be detected from Megatron's files alone.
UNTOLD = (
    r"param_groups'\]\[\d\] deleted",  # one of several groups: their number is stored nowhere
    r"\['param_state_sharding_type'\] deleted",  # zarr: another optimizer has states with these names and no such type
    r"\['consumed_train_samples'\] deleted",  # an argument of the run; these differ between releases
    r"^module\.frozen\.\w+ deleted",  # zarr: a weight that no optimizer state names
    r"^module\.\w+\.\w+ deleted",  # zarr: a small weight with buckets, which name no parameter
    r"\['model'\]\['[\w.]+'\] deleted",  # the same in a file
    r"__\d_0\.distcp from the next step",  # from one rank: no file states its step
    r"(distrib_optim|param_state/shard_0_1)\.pt from the next step",  # all buckets at once; they state no step
)


def megatron(version: str, backend: str, kind: str, *, parallel: int = 1, recorded: bool = False) -> Configuration:
    made = Configuration(version, 2 * parallel, parallel, iterations="1,3", format=kind, backend=backend, pp=parallel)
    # Buckets have padding. Random padding would make a change invisible to a load, or no change at all.
    return replace(made, recorded=recorded, memory="zeros")


MEGATRON = {
    "fully_reshardable": megatron(NEWEST, "torch_dist", "fully_reshardable"),
    "fully_reshardable, TP 2, PP 2": megatron(NEWEST, "torch_dist", "fully_reshardable", parallel=2),
    "fully_reshardable, fp16": replace(
        megatron(NEWEST, "torch_dist", "fully_reshardable"), dtype="fp16", iterations="30,32"
    ),
    "dp_reshardable": megatron(NEWEST, "torch_dist", "dp_reshardable"),
    "dp_zero_gather_scatter": megatron(NEWEST, "torch_dist", "dp_zero_gather_scatter"),
    "torch": megatron(NEWEST, "torch", "dp_reshardable"),
    "torch, TP 2, PP 2": megatron(NEWEST, "torch", "dp_reshardable", parallel=2),
    "torch_dist, 0.14": megatron("0.14.0", "torch_dist", "fully_sharded_model_space"),
    "torch_dist, 0.14, TP 2, PP 2": megatron("0.14.0", "torch_dist", "fully_sharded_model_space", parallel=2),
    "zarr, 0.14": megatron("0.14.0", "zarr", "fully_sharded_model_space"),
    "zarr, 0.14, TP 2, PP 2": megatron("0.14.0", "zarr", "fully_sharded_model_space", parallel=2),
    "zarr, buckets, 0.14": megatron("0.14.0", "zarr", "fully_sharded_bucket_space"),
    "zarr, gathered, 0.14": megatron("0.14.0", "zarr", "dp_zero_gather_scatter"),
}


OF_MEGATRON_IN_CI = {"fully_reshardable": [], "torch": [pytest.mark.slow]}
CASES = [pytest.param(case, marks=OF_MEGATRON_IN_CI.get(case, pytest.mark.exhaustive)) for case in MEGATRON]


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_megatron_is_missed_but_a_value_that_could_be(case: str, tmp_path: Path) -> None:
    found = of_megatron(MEGATRON[case], tmp_path)
    # A replacement is a plausible value, except for a file that holds more than one array.
    absent = [change for change in found.missed if change.how == DELETED or is_file_of_many(change)]
    texts = [str(change) for change in absent]
    assert [text for text in texts if not any(re.search(pattern, text) for pattern in UNTOLD)] == []


def is_file_of_many(change: Change) -> bool:
    return not change.key and change.file.endswith((".pt", ".distcp", ".metadata", ".json"))


# Not optimizer states: settings, the run's arguments, untrained weights. Buckets name no weight: there, all weights.
