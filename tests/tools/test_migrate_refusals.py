"""What is not migrated is refused in one line, before anything is written; written data equals the source."""

import errno
import io
import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from ckpt_patches.audit.audit import audit
from ckpt_patches.audit.judging import scan
from ckpt_patches.cli import command_line
from ckpt_patches.formats import torch_dist
from ckpt_patches.migrate import migrate as migrate_module
from ckpt_patches.runtime.progress import shown_in_order
from old_checkpoints import Old, flattened, settings
from test_migrate import elements
from torch_dist_indexes import loaded_by_torch

SHAPES: dict[str, tuple[int, ...]] = {"embedding.weight": (8, 6), "layer.weight": (6, 4), "norm.bias": (6,)}
FRAGMENTS: dict[str, tuple[int, ...]] = {"embedding.weight": (2, 1), "layer.weight": (1, 2)}
STATE = "optimizer.state.fp32_param.layer.weight"

Change = Callable[[Old], object]


def checkpoint(folder: Path, change: Change = lambda old: None, **kept: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    old, truth = flattened(folder, SHAPES, FRAGMENTS, ranks=3)
    change(old)
    return old.write({**settings(), **kept}), truth


def migrate(old: Path, new: Path, *options: str, status: int = 0) -> Path:
    assert command_line.main(["migrate", str(old), "--output", str(new), *options]) == status
    return new


def refused(capsys: pytest.CaptureFixture[str], old: Path, tmp_path: Path, *options: str, status: int = 2) -> str:
    """Check that a migration is refused and writes nothing; return its line."""
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    migrate(old, tmp_path / "new", *options, status=status)
    assert sorted(tmp_path.iterdir()) == before
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


def test_torch_itself_loads_every_element_of_what_was_migrated(tmp_path: Path) -> None:
    old, truth = checkpoint(tmp_path / "old")
    before = {path: path.read_bytes() for path in old.iterdir()}
    found = loaded_by_torch(migrate(old, tmp_path / "new"))
    assert {path: path.read_bytes() for path in old.iterdir()} == before
    assert found.keys() == {name.replace("fp32_param", "param") for name in truth}
    for name, tensor in truth.items():
        assert torch.equal(found[name.replace("fp32_param", "param")], tensor)
    assert audit(tmp_path / "new", workers=1).verdict == "WHOLE"


def test_what_is_not_sharded_says_how_the_state_is_cut_up_now(tmp_path: Path) -> None:
    old, _ = checkpoint(tmp_path / "old", iteration=7, rng=torch.arange(5))
    common = torch.load(migrate(old, tmp_path / "new") / "common.pt")
    assert common["optimizer"] == {**settings()["optimizer"], "param_state_sharding_type": "fully_reshardable"}
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert common["content_metadata"]["chained_optim_avoid_prefix"] is True
    assert common["iteration"] == 7
    assert torch.equal(common["rng"], torch.arange(5))


def test_chained_optimizers_lose_their_prefix(tmp_path: Path) -> None:
    def chain(old: Old) -> None:
        for name in [name for name in old.metadata.state_dict_metadata if name.startswith("optimizer")]:
            rename(old, name, f"chained_{int('norm' in name)}.{name}")

    old, truth = checkpoint(tmp_path / "old", chain)
    found = loaded_by_torch(migrate(old, tmp_path / "new"))
    assert found.keys() == {name.replace("fp32_param", "param") for name in truth}


def rename(old: Old, name: str, new: str) -> None:
    described, stored = old.metadata.state_dict_metadata, old.metadata.storage_data
    described[new] = described.pop(name)
    if name in old.wholes:
        old.wholes[new] = old.wholes.pop(name)
    for key in [key for key in stored if key.fqn == name]:
        stored[type(key)(new, key.offset)] = stored.pop(key)


def without(name: str, number: int, *, listed: bool = False) -> Change:
    """Take a chunk out of the index, or (`listed`) only its location."""

    def change(old: Old) -> None:
        chunks = old.metadata.state_dict_metadata[name].chunks
        chunk = chunks[number] if listed else chunks.pop(number)
        (key,) = [key for key in old.metadata.storage_data if (key.fqn, key.offset) == (name, chunk.offsets)]
        del old.metadata.storage_data[key]

    return change


def lap(old: Old) -> None:
    old.chunk(STATE, (0, 0, 2), torch.zeros(1, 1, 4))


def slid(old: Old) -> None:
    """Move the second of two chunks, so that it overlaps the first one."""
    (before,) = [key for key in old.metadata.storage_data if (key.fqn, key.offset) == ("embedding.weight", (4, 0))]
    old.metadata.storage_data[replace(before, offset=torch.Size((2, 0)))] = old.metadata.storage_data.pop(before)
    old.metadata.state_dict_metadata["embedding.weight"].chunks[1].offsets = torch.Size((2, 0))


def other_shape(old: Old) -> None:
    old.wholes[STATE] = {"nd_reformulated_orig_global_shape": (4, 6)}


def unknown_state(old: Old) -> None:
    old.tensor("optimizer.state.momentum.layer.weight", torch.float32, (6, 4))
    old.chunk("optimizer.state.momentum.layer.weight", (0, 0), torch.zeros(6, 4))


def without_its_weight(old: Old) -> None:
    rename(old, "layer.weight", "other.weight")


def two_of_one_name(old: Old) -> None:
    name = f"chained_0.{STATE}"
    old.tensor(name, torch.float32, (1, 1, 24), (6, 4))
    old.chunk(name, (0, 0, 0), torch.zeros(1, 1, 24), rank=9)


def elsewhere(old: Old) -> None:
    next(iter(old.metadata.storage_data.values())).relative_path = "../secret"


REFUSED = {
    "a slice is missing in the middle": (
        without(STATE, 1),
        f"{STATE}: its chunks have 20 elements, its shape (1, 2, 12) has 24",
    ),
    "a slice lies nowhere": (without(STATE, 2, listed=True), "its chunk at [0, 0, 8] is not there"),
    "slices overlap": (lap, f"{STATE}: its chunks have 28 elements, its shape (1, 2, 12) has 24"),
    "shards overlap, and leave a gap": (slid, "embedding.weight: a chunk overlaps another one"),
    "another shape than the weight": (other_shape, "expected"),
    "a state that is not known": (unknown_state, "optimizer.state.momentum.layer.weight is not a known state"),
    "a state without its parameter": (without_its_weight, "is the state of layer.weight, which is not there"),
    "two names become one": (two_of_one_name, "several arrays would become optimizer.state.param.layer.weight"),
    "a name leads out of the folder": (elsewhere, "'../secret'"),
    "an object's name of before 0.12": (
        lambda old: old.object("layers._extra_state/shard_0.2_1", 7),
        "found layers._extra_state/shard_0.2_1: load it in",
    ),
}
OPTIONS: tuple[tuple[str, ...], ...] = ((), ("--damaged-as-is",), ("--dry-run",))


@pytest.mark.parametrize("case", REFUSED)
def test_an_index_that_cannot_be_migrated_is_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, expected = REFUSED[case]
    old, _ = checkpoint(tmp_path / "old", change)
    for options in OPTIONS:
        assert expected in refused(capsys, old, tmp_path, *options)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO])
def test_a_file_that_cannot_be_read_is_named_with_the_error_of_the_system(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = checkpoint(tmp_path / "old")
    opened, named = os.open, f"{old}/__1_0.distcp: {os.strerror(number)}"

    def failing(file: Any, *arguments: Any, **options: Any) -> int:
        if str(file) == str(old / "__1_0.distcp"):
            raise OSError(number, os.strerror(number), str(file))
        return opened(file, *arguments, **options)

    monkeypatch.setattr(os, "open", failing)
    for options in OPTIONS:
        line = refused(capsys, old, tmp_path, *options)
        assert re.fullmatch(rf"ckpt-patches: \S+: its chunk at \[[\d, ]+\] cannot be read: {named}", line)


def test_other_steps_in_other_groups_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outside model space, the groups are an object of each data-parallel rank."""
    old, _ = checkpoint(tmp_path / "old", **settings(3, 4))
    assert "found 3, 4: megatron-core would refuse to load it" in refused(capsys, old, tmp_path)
    own, _ = flattened(tmp_path / "own", SHAPES)
    groups = [{"step": 3, "lr": torch.tensor(0.5)}, {"step": 4}]
    own.object("optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1", {"param_groups": groups})
    own.write({"optimizer": {"param_state_sharding_type": "dp_zero_gather_scatter"}})
    assert "found 3, 4" in refused(capsys, own.folder, tmp_path)


def test_a_group_without_a_step_gets_that_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Releases up to 0.13.1 save an empty group without one: empty_group_step."""
    old, _ = checkpoint(tmp_path / "old", **settings(3, None))
    common = torch.load(migrate(old, tmp_path / "new") / "common.pt")
    assert "1 of the optimizer's parameter groups have no step, and get that of the others" in capsys.readouterr().err
    assert [group["step"] for group in common["optimizer"]["optimizer"]["param_groups"]] == [3, 3]


def without_a_square(old: Old) -> None:
    name = "optimizer.state.exp_avg_sq.layer.weight"
    del old.metadata.state_dict_metadata[name]
    for key in [key for key in old.metadata.storage_data if key.fqn == name]:
        del old.metadata.storage_data[key]


def with_a_square_for_a_mean(old: Old) -> None:
    """Point exp_avg to the bytes of exp_avg_sq."""
    places = old.metadata.storage_data
    for key in [key for key in places if key.fqn == "optimizer.state.exp_avg.layer.weight"]:
        places[key] = places[replace(key, fqn="optimizer.state.exp_avg_sq.layer.weight")]


def with_an_object_in_no_file(old: Old) -> None:
    old.metadata.state_dict_metadata["rng_state/shard_0_1"] = BytesStorageMetadata()


NOT_COMPLETE: dict[str, tuple[Change, str]] = {
    "a square": (without_a_square, "missing_array layer.weight no exp_avg_sq"),
    "a state at another's bytes": (with_a_square_for_a_mean, "foreign_file optimizer.state.exp_avg"),
    "an object in no file": (with_an_object_in_no_file, "missing_array rng_state/shard_0_1"),
}


@pytest.mark.parametrize("case", NOT_COMPLETE)
def test_what_is_absent_or_foreign_is_refused_before_a_byte_is_written(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, expected = NOT_COMPLETE[case]
    old, _ = checkpoint(tmp_path / "old", change)
    for options in ((), ("--dry-run",)):
        line = refused(capsys, old, tmp_path, *options, status=1)
        assert f"{old} is damaged or incomplete, or was repaired, and nothing was written: {expected}" in line
    assert command_line.main(["fingerprint", str(old)]) == (0 if case == "a square" else 2)
    migrate(old, tmp_path / "new", "--damaged-as-is")


def test_an_output_in_the_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, _ = checkpoint(tmp_path / "old")
    before = sorted(old.iterdir())
    migrate(old, old / "new", status=2)
    assert f"expected an output folder outside of {old}" in capsys.readouterr().err
    assert sorted(old.iterdir()) == before


def test_gathered_states_are_not_cut_up_anew(tmp_path: Path) -> None:
    """Gathered states stay so: `fully_reshardable` would need the order of the model's buffers."""
    old = Old(tmp_path / "old")
    old.tensor("layer.weight", torch.bfloat16, (4,))
    old.chunk("layer.weight", (0,), torch.ones(4, dtype=torch.bfloat16))
    state = {0: {"type": {"param": torch.ones(4), "exp_avg": 2 * torch.ones(4), "exp_avg_sq": 3 * torch.ones(4)}}}
    old.object("optimizer.distributed.dp_group_idx_0.param_state/shard_0_1", state)
    new = migrate(old.write(settings(kind="dp_zero_gather_scatter")), tmp_path / "new")
    index = torch_dist.read_index(new)
    (place,) = index.objects.values()
    found = torch.load(io.BytesIO((new / place.path).read_bytes()[place.offset : place.offset + place.nbytes]))
    assert torch.equal(found[0][0]["type"]["exp_avg"], 2 * torch.ones(4))
    common = torch.load(new / "common.pt")
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "dp_zero_gather_scatter"


def test_what_is_loaded_as_it_is_needs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, _ = checkpoint(tmp_path / "old")
    new = migrate(old, tmp_path / "migrated")
    said = "needs nothing: megatron-core 0.16 and later load it as it is"
    assert said in refused(capsys, new, tmp_path, status=0)
    assert command_line.main(["migrate", str(new), "--output", str(tmp_path / "again"), "--json"]) == 0
    assert said in json.loads(capsys.readouterr().out)["nothing_to_do"]
    assert not (tmp_path / "again").exists()
    weights = Old(tmp_path / "weights")
    weights.tensor("layer.weight", torch.bfloat16, (4,))
    weights.chunk("layer.weight", (0,), torch.ones(4, dtype=torch.bfloat16))
    assert "needs nothing" in refused(capsys, weights.write({"iteration": 1}), tmp_path, status=0)


def test_optimizers_in_a_list_and_other_names_of_multipliers_stay_as_nemo_has_them(tmp_path: Path) -> None:
    groups = {"optimizer": {"param_groups": [{"pre_wd_mult": 1.0, "pre_lr_mult": 1.0, "step": 3}]}}
    states = [{**groups, "param_state_sharding_type": "fully_sharded_model_space"}]
    old, _ = flattened(tmp_path / "old", SHAPES)
    old.write({"optimizer_states": states, "pytorch-lightning_version": "2.4"})
    common = torch.load(migrate(old.folder, tmp_path / "new") / "common.pt")
    assert common["optimizer_states"] == [{**groups, "param_state_sharding_type": "fully_reshardable"}]


def test_a_source_that_changes_during_the_migration_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was audited is not what was copied then."""
    old, _ = checkpoint(tmp_path / "old")

    def changing(*arguments: Any, **options: Any) -> Any:
        os.utime(old / "__1_0.distcp", ns=(0, 0))
        return shown_in_order(*arguments, **options)

    monkeypatch.setattr(migrate_module, "shown_in_order", changing)
    migrate(old, tmp_path / "new", status=2)
    assert f"{old} has changed while it was migrated: run the same command again" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# Damage


def change_element(old: Path, name: str, value: float) -> None:
    """Change the first element and its checksum, as if the save had written it."""
    from every_checkpoint import in_torch_dist, put

    place = next(place for place in in_torch_dist(old) if place.name == name)
    put(place, torch.tensor([value]).numpy().tobytes())


@pytest.mark.parametrize("value", [float("nan"), 0.5])
def test_damage_is_found_before_a_byte_is_written(
    value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, _ = checkpoint(tmp_path / "old")
    change_element(old, STATE, value)
    kind = "unrounded_master" if value == 0.5 else "not_finite"
    migrate(old, tmp_path / "new", status=1)
    said = capsys.readouterr().err
    assert f"{old} is damaged or incomplete, or was repaired, and nothing was written: {kind} {STATE}" in said
    assert "--damaged-as-is" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]
    new = migrate(old, tmp_path / "new", "--damaged-as-is")
    said = capsys.readouterr().out
    assert f"damage: {kind} {STATE}" in said
    assert "DAMAGED" in said
    assert elements(new)[STATE.replace("fp32_param", "param")][:4] == struct.pack("<f", value)


def test_bytes_that_are_not_what_was_saved_are_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, _ = checkpoint(tmp_path / "old")
    tensor = torch_dist.read_index(old).tensors["optimizer.state.exp_avg.layer.weight"]
    place = tensor.places[min(tensor.places)]
    data = bytearray((old / place.path).read_bytes())
    with zipfile.ZipFile(io.BytesIO(data[place.offset : place.offset + place.nbytes])) as archive:
        (info,) = (info for info in archive.infolist() if info.filename.endswith("data/0"))
    begin = place.offset + info.header_offset + 30
    begin += sum(struct.unpack("<2H", data[begin - 4 : begin]))
    data[begin] ^= 1
    (old / place.path).write_bytes(data)
    assert "bad_file" in refused(capsys, old, tmp_path, status=1)


def test_what_the_audit_cannot_read_to_its_end_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An UNKNOWN of the audit is a suspicion, but these bytes were not judged."""
    old, _ = checkpoint(tmp_path / "old")

    def not_read(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(old / "__1_0.distcp"))

    monkeypatch.setattr(scan, "scan", not_read)
    line = refused(capsys, old, tmp_path, status=1)
    assert f"nothing was written: unreadable {old}/__1_0.distcp Input/output error" in line


# Names, files and classes in malicious checkpoints


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, (f"open({str(self.file)!r}, 'w')",))


def test_a_class_that_is_not_listed_is_refused_and_never_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, _ = checkpoint(tmp_path / "old", evil=Evil(tmp_path / "evil"))
    assert "__builtin__.exec, which is not on the list" in refused(capsys, old, tmp_path)
    migrate(old, tmp_path / "new", "--trust_checkpoint")
    assert not (tmp_path / "evil").exists()


def test_an_index_with_code_in_it_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, _ = checkpoint(tmp_path / "old")
    (old / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "evil")))
    refused(capsys, old, tmp_path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp", "common.pt"])
def test_a_file_that_is_cut_off_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, _ = checkpoint(tmp_path / "old")
    for kept in (0.95, 0.5, 0):
        os.truncate(old / name, int((old / name).stat().st_size * kept))
        refused(capsys, old, tmp_path)


# The output


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, _ = checkpoint(tmp_path / "old")
    migrate(old, tmp_path / "new", "--dry-run")
    out = capsys.readouterr().out
    assert "rank 0 alone" in out
    what = "optimizer's state: fully_sharded_model_space -> fully_reshardable; 12 tensors"
    assert re.search(rf"{what}, [1-9][\d.]* ([KM]i)?B in \d+ files; nothing was written", out)
    migrate(old, tmp_path / "new", "--dry-run", "--json")
    plan = json.loads(capsys.readouterr().out)
    assert (plan["source_type"], plan["target_type"]) == ("fully_sharded_model_space", "fully_reshardable")
    assert (plan["bytes"] > 0, plan["files"]) == (True, ["__0_0.distcp", "common.pt"])
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
