"""Everything in checkpoints in turn deleted, or replaced by its neighbor or by the next save's: never silent.

The judge of ZeRO is the real DeepSpeed: where it loads the changed checkpoint to the same live state, WHOLE is right.
A value that was replaced by another that could be it cannot be told without a record; with a record it must be.
"""

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import shared
from ckpt_patches.audit.audit import WHOLE, audit
from megatron_checkpoints import Configuration
from megatron_checkpoints import written as written_by_megatron
from removals import DELETED, Change, changes, make
from upstream import newest, run, run_json, tree

NEWEST = newest("megatron-core")
KINDS = [
    "stage2",
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in (
            "stage0",
            "stage0_fp16",
            "stage1",
            "stage1_fp16",
            "bf16_optimizer",
            "stage2_round_robin",
            "stage3",
            "stage3_fp16",
            "stage3_frozen",
            "stage3_groups",
        )
    ),
]
TABLE = Path(__file__).parent.parent / "docs/audit.md"


class Found(NamedTuple):
    """The changes of a checkpoint by what came of each."""

    reported: list[Change]
    same: list[Change]  # WHOLE, and loaded to the same live state
    missed: list[Change]  # WHOLE, and not

    def row(self, kind: str) -> str:
        cells = (len(self.reported) + len(self.same) + len(self.missed), *map(len, self))
        return f"| {kind} | {' | '.join(map(str, cells))} |"


@functools.cache
def written(kind: str, recorded: str) -> Path:
    """The run's folder, of two saves."""

    def write(out: Path) -> None:
        env = {"CKPT_PATCHES_FINGERPRINT": recorded}
        release = tree("deepspeed", newest("deepspeed"))
        run("zero_removals", "write", out, kind, tree=release, delivery="hook" if recorded == "1" else "none", env=env)

    return shared.once(f"removals-{kind}-{recorded}", write)


def judged(kind: str, tmp_path: Path, recorded: str = "0") -> Found:
    folder, later = (written(kind, recorded) / name for name in ("global_step2", "global_step4"))
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
    loaded = by_upstream(kind, [str(folder), *whole], tmp_path)
    same = [change for copy, change in whole.items() if loaded[copy] == loaded[str(folder)]]
    return Found(reported, same, [change for change in whole.values() if change not in same])


def by_upstream(kind: str, folders: list[str], tmp_path: Path) -> dict[str, Any]:
    """The live state after a load of each, or the error."""
    (tmp_path / "cases.json").write_text(json.dumps(folders))
    found = run_json(
        "zero_removals", "load", tmp_path / "cases.json", kind, tree=tree("deepspeed", newest("deepspeed"))
    )
    assert isinstance(found, dict)
    assert "error" not in found[folders[0]]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_missed_but_a_value_that_could_be(kind: str, tmp_path: Path) -> None:
    found = judged(kind, tmp_path)
    missed = [change for change in found.missed if change.how == DELETED or not change.key]
    assert missed == [], [str(change) for change in missed]
    assert found.row(kind) in TABLE.read_text(), f"expected in {TABLE}: {found.row(kind)}"


@pytest.mark.parametrize("kind", ["stage2", pytest.param("stage3", marks=pytest.mark.slow)])
def test_with_a_record_no_state_is_missed(kind: str, tmp_path: Path) -> None:
    found = judged(kind, tmp_path, recorded="1")
    states = [change for change in found.missed if change.key and not is_counter(change)]
    assert states == [], [str(change) for change in states]


def is_counter(change: Change) -> bool:
    """Of the engine or the client: they are no states of an optimizer, and are not recorded."""
    return re.search("model_states", change.file) is not None and len(change.key) == 1


# Megatron's: what loads of them come to is not asked here. What cannot be told by the files alone is listed.
UNTOLD = (
    r"param_groups'\]\[\d\] deleted",  # one of several groups: nothing says how many there are
    r"\['(param_state_sharding_type|checkpoint_version|args)'\]",  # of the run, and no state of it
    r"\.sync(/\S+)? deleted",  # locks, which no load reads
    r"^module\.frozen\.\w+ deleted",  # a weight that no optimizer state names
    r"\['model'\]\['[\w.]+'\] deleted",  # a weight beside buckets, which name no parameter
    r"\['(buckets_coalesced|numel_unpadded)'\] deleted",
    r"^\.metadata from the next step",  # which has the same places
    r"distrib_optim\.pt from the next step",  # all buckets at once; they state no step
)
MEGATRON = {
    "fully_reshardable": (NEWEST, "torch_dist", "fully_reshardable"),
    "dp_zero_gather_scatter": (NEWEST, "torch_dist", "dp_zero_gather_scatter"),
    "torch": (NEWEST, "torch", "dp_reshardable"),
    "torch_dist, 0.14": ("0.14.0", "torch_dist", "fully_sharded_model_space"),
    "zarr, 0.14": ("0.14.0", "zarr", "fully_sharded_model_space"),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (n > 0)) for n, c in enumerate(MEGATRON)])
def test_nothing_of_megatron_is_missed_but_a_value_that_could_be(case: str, tmp_path: Path) -> None:
    version, backend, kind = MEGATRON[case]
    made = Configuration(version, 2, iterations="1,3", format=kind, backend=backend)
    folder, later = written_by_megatron(made).whole
    assert audit(folder).verdict == WHOLE
    every, whole = list(changes(folder, later)), []
    for change in every:
        copy = Path(shutil.copytree(folder, tmp_path / "copy" / folder.name))
        make(change, copy, later)
        whole += [change] if audit(copy).verdict == WHOLE else []
        shutil.rmtree(copy.parent)
    # A part of a file, or the file of one array, is a value.
    absent = [change for change in whole if change.how == DELETED or change.file.endswith((".pt", ".distcp", "a"))]
    missed = [str(change) for change in absent if change.how == DELETED or not change.key]
    assert [text for text in missed if not any(re.search(pattern, text) for pattern in UNTOLD)] == []
    row = f"| {case} | {len(every)} | {len(every) - len(whole)} | {len(whole)} |"
    assert row in TABLE.read_text(), f"expected in {TABLE}: {row}"
