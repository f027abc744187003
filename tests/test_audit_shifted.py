"""Shifted checkpoints of the real megatron-core: each parameter's shift, lost elements, and other damage.

tests/programs/shifted_saving.py writes the true values, which the ranks had at the save, beside the checkpoint.
"""

import json
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

import shared
from ckpt_patches.audit.audit import DAMAGED, REPAIRED, WHOLE, Report, audit
from ckpt_patches.audit.judging.record_checksums import update_checksum
from ckpt_patches.audit.judging.shifted import Shift, explained
from ckpt_patches.audit.repair.plan import FROM_WEIGHT, RESET, plan
from ckpt_patches.audit.repair_list import NAME
from ckpt_patches.cli import main
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import MASTER, MOMENTS, WEIGHT, Shard
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.elements import read_elements
from test_audit import names
from test_audit_repair import contents
from upstream import all_releases, run, run_json, tree

STATES = dict(zip((MASTER, *MOMENTS), ("param", "exp_avg", "exp_avg_sq"), strict=True))
Bits: TypeAlias = "npt.NDArray[np.uint32]"


@dataclass(frozen=True)
class Save:
    """The options of a save."""

    version: str
    dp: int
    tp: int = 1
    gloo: bool = False

    @property
    def options(self) -> list[str]:
        """The program's options."""
        return ["--ranks", str(self.dp * self.tp), "--tp", str(self.tp), *(["--gloo"] if self.gloo else [])]

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
        run("shifted_saving", out, *how.options, tree=tree("megatron-core", how.version))

    return shared.once(f"shifted-{how}", write) / name


def rank_of(shard: Shard) -> int:
    """The tensor-parallel rank that saved a shard; the models are sharded along one axis only."""
    return max((int(part) for part in shard.label.split(".") if part), default=0)


def live(path: Path, shard: Shard) -> dict[str, Any]:
    """A shard's true states by role, and the total padding of the buckets before it."""
    with np.load(f"{path}.{rank_of(shard)}.npz") as found:
        states = {role: found[f"{shard.parameter}/{state}"].view(np.uint32) for role, state in STATES.items()}
        return {**states, "shift": int(found[f"{shard.parameter}/shift"])}


def in_file(shard: Shard) -> dict[str, Bits]:
    return {role: read_elements(shard.streams[role], 0, shard.numel).view(np.uint32) for role in STATES}


def elements(states: dict[str, Any]) -> list[tuple[int, ...]]:
    """The bits of each element's three states."""
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
    # Only zeros are saved of parameters beyond the end of the buffer.
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
    """The listed lost elements are those whose three true states are nowhere in the checkpoint."""
    path = saved(how)
    shift = shift_of(path)
    everywhere = Counter(element for shard in shift.shards for element in elements(in_file(shard)))
    held = [elements(live(path, shard)) for shard in shift.shards]
    often = Counter(element for own in held for element in own)
    for shard, own, ranges in zip(shift.shards, held, shift.lost, strict=True):
        listed = {number for begin, end in ranges for number in range(begin, end)}
        lost = {number for number, element in enumerate(own) if element not in everywhere}
        # Elements without a gradient can have the same three values as others.
        alike = {number for number, element in enumerate(own) if often[element] > 1 or not any(element[1:])}
        assert lost <= listed <= lost | alike, (shard.parameter, shard.label)


@pytest.mark.parametrize("name", ["one_bucket", "even"])
@pytest.mark.parametrize("how", SAVES, ids=str)
def test_one_bucket_and_buckets_without_padding_are_whole(how: Save, name: str) -> None:
    report = audit(saved(how, name))
    assert (report.verdict, names(report), report.shift) == (WHOLE, set(), None)


def set_masters(path: Path, parameter: str, make: Any) -> None:
    """Replace a parameter's main parameters in a checkpoint file by values computed from them."""
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


def test_what_cannot_be_compared_is_named_and_not_repaired() -> None:
    """A parameter without weights in a shifted checkpoint is named, and its repair is refused."""
    report = audit(saved(DEFAULT))
    found = report.checkpoint
    one = next(shard for shard in found.shards if shard.parameter == "module.layers.0.bias")
    streams = {role: stream for role, stream in one.streams.items() if role != WEIGHT}
    others = [shard for shard in found.shards if shard is not one]
    blind = replace(found, shards=[*others, replace(one, streams=streams)])
    suspicion = Finding(damages.UNROUNDED_MASTER, others[0].streams[MASTER].array, "", others[0].label)
    findings, shift = explained(blind, [suspicion])
    own = [f.detail for f in findings if f.array == one.streams[MASTER].array]
    assert own == [
        "whether it is shifted could not be told: other arrays or types than are compared "
        "(weight none, master float32, exp_avg float32, exp_avg_sq float32)"
    ]
    refused = plan(Report(blind, tuple(findings), shift), RESET).refused
    assert [(f.array, reason) for f, reason in refused] == [(one.streams[MASTER].array, own[0])]


# Repair


def repaired(how: Save, to: Path, *options: str) -> Path:
    options = options or ("--reset-moments",)
    assert main(["repair", str(saved(how)), "--output", str(to), *options]) == 0
    return to


@pytest.mark.parametrize("how", SAVES, ids=str)
def test_after_the_repair_each_state_is_what_the_ranks_held_but_for_what_is_in_no_file(
    how: Save, tmp_path: Path
) -> None:
    path = saved(how)
    before = contents(path)
    output = repaired(how, tmp_path / "output")
    assert contents(path) == before
    report = audit(output)
    assert (report.verdict, names(report)) == (REPAIRED, set())
    by_name = {(shard.parameter, shard.label): shard for shard in report.checkpoint.shards}
    for old, lost in zip(shift_of(path).shards, shift_of(path).lost, strict=True):
        shard, truth = by_name[old.parameter, old.label], live(path, old)
        is_lost = np.zeros(shard.numel, np.bool_)
        for begin, end in lost:
            is_lost[begin:end] = True
        weights = weights_of(shard)
        np.testing.assert_array_equal(weights, weights_of(old))
        for role, bits in in_file(shard).items():
            expected = np.where(is_lost, weights if role == MASTER else 0, truth[role])
            np.testing.assert_array_equal(bits, expected, f"{old.parameter} {old.label} {role}")


def weights_of(shard: Shard) -> Bits:
    """The weights' bits in fp32."""
    weights = read_elements(shard.streams[WEIGHT], 0, shard.numel).view(np.uint16)
    return weights.astype(np.uint32) << np.uint32(16)


@pytest.mark.parametrize("how", SAVES, ids=str)
def test_upstream_loads_the_repaired_checkpoint_as_it_was(how: Save, tmp_path: Path) -> None:
    path = saved(how)
    output = repaired(how, tmp_path / "output")
    options = [*how.options, "--load", str(output)]
    release = tree("megatron-core", how.version)
    wrong = run_json("shifted_saving", path.parent, *options, tree=release)
    shift = shift_of(path)
    cut = Counter(shard.parameter for shard in shift.shards)
    listed: dict[str, set[int]] = {}
    for shard, ranges in zip(shift.shards, shift.lost, strict=True):
        for rank in [rank_of(shard)] if cut[shard.parameter] > 1 else range(how.tp):
            listed[f"{rank}/{shard.parameter}"] = {number for begin, end in ranges for number in range(begin, end)}
    assert any(wrong.values())
    for rank, own in wrong.items():
        for key, numbers in own.items():
            assert set(numbers) <= listed[f"{rank}/{key.rpartition('/')[0]}"], key


def test_the_list_says_what_was_moved_and_what_filled(tmp_path: Path) -> None:
    output = repaired(DEFAULT, tmp_path / "output")
    content = json.loads((output / NAME).read_text())
    shift = shift_of(saved(DEFAULT))
    lost = {
        (shard.streams[role].array, begin, end)
        for shard, ranges in zip(shift.shards, shift.lost, strict=True)
        for begin, end in ranges
        for role in STATES
    }
    filled = content["repaired"]
    assert {(entry["array"], *ends) for entry in filled for ends in entry["ranges"]} == lost
    assert {entry["source"] for entry in filled} == {FROM_WEIGHT, RESET}
    moved = Counter[str]()
    for entry in content["moved"]:
        assert (entry["array"], entry["begin"]) != (entry["source"], entry["source_begin"])
        moved[entry["array"]] += entry["end"] - entry["begin"]
    for shard, by, ranges in zip(shift.shards, shift.by, shift.lost, strict=True):
        elements = shard.numel - sum(end - begin for begin, end in ranges)
        assert moved[shard.streams[MASTER].array] == (0 if by == 0 else elements)


def test_moments_that_are_in_no_file_come_from_an_older_checkpoint(tmp_path: Path) -> None:
    path, older = saved(DEFAULT), saved(DEFAULT, "one_bucket")
    output = repaired(DEFAULT, tmp_path / "output", "--from", str(older))
    found = {shard.parameter: in_file(shard) for shard in audit(output).checkpoint.shards if MASTER in shard.streams}
    held = {shard.parameter: in_file(shard) for shard in audit(older).checkpoint.shards if MASTER in shard.streams}
    places = 0
    for shard, ranges in zip(shift_of(path).shards, shift_of(path).lost, strict=True):
        for begin, end in ranges:
            for role in MOMENTS:
                ours, theirs = found[shard.parameter][role][begin:end], held[shard.parameter][role][begin:end]
                np.testing.assert_array_equal(ours, theirs)
                places += int(theirs.any())
    assert places


def refusal(path: Path, to: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["repair", str(path), "--output", str(to), *options]) == 2
    assert list(to.parent.glob(f"*{to.name}*")) == []
    return capsys.readouterr().err


def test_moments_are_not_taken_from_a_shifted_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = shutil.copytree(saved(DEFAULT), tmp_path / "older")
    said = refusal(saved(DEFAULT), tmp_path / "output", capsys, "--from", str(older))
    assert "is shifted itself" in said


def test_other_damage_of_a_shifted_parameter_is_not_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(saved(DEFAULT), tmp_path / "copy"))
    shard = next(s for s in audit(path).checkpoint.shards if s.parameter == "module.layers.1.weight")
    with open(shard.streams[MOMENTS[0]].extents[0].path, "r+b") as file:
        file.seek(shard.streams[MOMENTS[0]].extents[0].offset + 400)
        file.write(np.float32(np.nan).tobytes())
    update_checksums(path, shard)
    assert {"not_finite", "shifted_state"} == names(audit(path))
    said = refusal(path, tmp_path / "output", capsys)
    assert "not_finite" in said
    assert "its elements are saved in another place than their own" in said


def update_checksums(path: Path, shard: Shard) -> None:
    places = {(extent.path, extent.offset) for stream in shard.streams.values() for extent in stream.extents}
    for record in audit(path).checkpoint.records:
        if (record.path, record.offset) in places:
            update_checksum(record)
