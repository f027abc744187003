"""Shifted checkpoints of the real megatron-core: how far each parameter is, what is in no file, and what is no shift.

The truth is what the ranks held when they saved: tests/programs/shifted_saving.py writes it beside the checkpoint.
"""

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

import shared
from ckpt_patches.audit import damages
from ckpt_patches.audit.audit import DAMAGED, WHOLE, audit
from ckpt_patches.audit.checkpoint import MASTER, MOMENTS, Shard
from ckpt_patches.audit.scan import read_elements
from ckpt_patches.audit.shifted import Shift
from test_audit import names
from upstream import all_releases, run, tree

STATES = dict(zip((MASTER, *MOMENTS), ("param", "exp_avg", "exp_avg_sq"), strict=True))
Bits: TypeAlias = "npt.NDArray[np.uint32]"


@dataclass(frozen=True)
class Save:
    """How a checkpoint is saved."""

    version: str
    dp: int
    tp: int = 1
    gloo: bool = False

    def __str__(self) -> str:
        return f"{self.version}-dp{self.dp}-tp{self.tp}{'-gloo' if self.gloo else ''}"


DEFAULT = Save("0.16.1", dp=3)
MORE = [
    Save("0.15.0", dp=2),
    Save("0.15.3", dp=3, gloo=True),
    Save("0.15.3", dp=2, tp=2),
    Save("0.16.0", dp=4),
    Save("0.16.1", dp=4, gloo=True),
    Save("0.16.1", dp=2, tp=2),
]
SAVES = [DEFAULT, *(MORE if all_releases() else [])]


def saved(how: Save, name: str = "shifted") -> Path:
    """A checkpoint that the release saved: "shifted", "one_bucket" or "even"."""

    def write(out: Path) -> None:
        options = ["--ranks", str(how.dp * how.tp), "--tp", str(how.tp), *(["--gloo"] if how.gloo else [])]
        run("shifted_saving", out, *options, tree=tree("megatron-core", how.version))

    return shared.once(f"shifted-{how}", write) / name


def live(path: Path, shard: Shard) -> dict[str, Any]:
    """What the ranks held of a shard: its states by role, and the padding of the buckets before it."""
    rank = max((int(part) for part in shard.label.split(".") if part), default=0)  # the models are cut in one way alone
    with np.load(f"{path}.{rank}.npz") as found:
        states = {role: found[f"{shard.parameter}/{state}"].view(np.uint32) for role, state in STATES.items()}
        return {**states, "shift": int(found[f"{shard.parameter}/shift"])}


def in_file(shard: Shard) -> dict[str, Bits]:
    return {role: read_elements(shard.streams[role], 0, shard.numel).view(np.uint32) for role in STATES}


def elements(states: dict[str, Any]) -> list[tuple[int, ...]]:
    """The bits of an element's three states."""
    return [tuple(bits) for bits in np.stack([states[role] for role in STATES], axis=1).tolist()]


def shift_of(path: Path) -> Shift:
    found = audit(path).shift
    assert found is not None
    return found


@pytest.mark.parametrize("how", SAVES, ids=str)
def test_each_parameter_is_said_to_be_shifted_by_the_padding_before_it(how: Save) -> None:
    path = saved(how)
    report, shift = audit(path), shift_of(path)
    truth = {shard.streams[MASTER].array + shard.label: live(path, shard)["shift"] for shard in shift.shards}
    assert sum(1 for by in truth.values() if by) > len(truth) / 2
    told = dict(zip(truth, shift.by, strict=True))
    # Of what lies behind the end of the buffer nothing but zeros is saved.
    zeros = {name for name, s in zip(truth, shift.shards, strict=True) if not any(v.any() for v in in_file(s).values())}
    assert told == {name: None if name in zeros else by for name, by in truth.items()}
    assert (report.verdict, names(report)) == (DAMAGED, {"shifted_state"})
    found = {f.array + f.shard: f.detail for f in report.findings if f.kind is damages.SHIFTED_STATE}
    assert found.keys() == {name for name, by in truth.items() if by}
    said = {
        name: "by how many elements could not be told" if told[name] is None else f"by {by}"
        for name, by in truth.items()
    }
    assert all(detail.startswith(said[name]) for name, detail in found.items())


@pytest.mark.parametrize("how", SAVES, ids=str)
def test_what_is_in_no_file_is_listed(how: Save) -> None:
    """Which an element is whose three states, as the ranks held them, are nowhere in the checkpoint."""
    path = saved(how)
    shift = shift_of(path)
    everywhere = Counter(element for shard in shift.shards for element in elements(in_file(shard)))
    held = [elements(live(path, shard)) for shard in shift.shards]
    often = Counter(element for own in held for element in own)
    for shard, own, ranges in zip(shift.shards, held, shift.lost, strict=True):
        listed = {number for begin, end in ranges for number in range(begin, end)}
        lost = {number for number, element in enumerate(own) if element not in everywhere}
        # Elements without gradient can have the same three numbers as others.
        alike = {number for number, element in enumerate(own) if often[element] > 1 or not any(element[1:])}
        assert lost <= listed <= lost | alike, (shard.parameter, shard.label)


@pytest.mark.parametrize("name", ["one_bucket", "even"])
@pytest.mark.parametrize("how", SAVES, ids=str)
def test_one_bucket_and_buckets_without_padding_are_whole(how: Save, name: str) -> None:
    report = audit(saved(how, name))
    assert (report.verdict, names(report), report.shift) == (WHOLE, set(), None)


def set_masters(path: Path, parameter: str, make: Any) -> None:
    """Write other masters into a checkpoint's file, as they are made from those that are there."""
    report = audit(path)
    shard = next(shard for shard in report.checkpoint.shards if shard.parameter == parameter)
    (extent,) = shard.streams[MASTER].extents
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset)
        data = np.frombuffer(file.read(extent.nbytes), np.float32)
        file.seek(extent.offset)
        file.write(make(data).astype(np.float32).tobytes())


@pytest.mark.parametrize(
    "make",
    [
        lambda masters: np.random.default_rng(0).normal(size=len(masters)),
        lambda masters: np.roll(masters, -40),
        lambda masters: masters[::-1],
    ],
    ids=["others", "rolled", "reversed"],
)
def test_other_wrong_masters_are_not_called_shifted(tmp_path: Path, make: Any) -> None:
    path = Path(shutil.copytree(saved(DEFAULT, "one_bucket"), tmp_path / "copy"))
    set_masters(path, "module.layers.1.weight", make)
    report = audit(path)
    assert (report.verdict, report.shift) == (DAMAGED, None)
    assert "unrounded_master" in names(report)
    assert "shifted_state" not in names(report)
