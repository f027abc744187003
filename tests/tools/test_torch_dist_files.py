"""The reader of torch.distributed.checkpoint reads the files that torch writes."""

import argparse
import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, audit
from ckpt_patches.cli.command_line import main
from ckpt_patches.formats import torch_dist
from ckpt_patches.formats.elements import read_elements
from crafted_files import found_in

FILE = "__0_0.distcp"
STEP = 7
TENSORS = {
    "weight": torch.arange(1.0, 25.0).view(4, 6).bfloat16(),
    "optimizer.state.param.weight": torch.arange(1.0, 25.0).view(4, 6),
    "optimizer.state.exp_avg.weight": torch.full((4, 6), 0.5),
    "optimizer.state.exp_avg_sq.weight": torch.full((4, 6), 0.25),
}


def common() -> dict[str, Any]:
    groups = [{"lr": 1e-3, "step": STEP, "betas": (0.9, 0.99), "params": [0]}]
    optimizer = {"param_groups": groups, "param_state_sharding_type": "fully_sharded_model_space"}
    return {"optimizer": optimizer, "iteration": STEP}


class Common:
    """A placeholder for the unsharded state."""


class Planner(dcp.DefaultSavePlanner):
    """Serializes objects itself, as a list of one, like Megatron's planner."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        if isinstance(object, Common):
            object = io.BytesIO()
            torch.save([common()], object)
        return object


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as megatron-core 0.19 writes it: the unsharded state is an object in the sharded files."""
    folder = tmp_path_factory.mktemp("dcp") / "iter_0000007"
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True)
    dcp.save({**TENSORS, torch_dist.COMMON_OBJECT: Common()}, storage_writer=writer, planner=Planner(), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "iter_0000007")


def test_tensors_and_what_is_not_sharded_are_found(written: Path) -> None:
    found = audit(written)
    assert (found.verdict, found.checkpoint.step, found.checkpoint.iteration) == (WHOLE, STEP, STEP)
    held = {
        own.array: read_elements(own, 0, shard.numel).tobytes()
        for shard in found.checkpoint.shards
        for own in shard.streams.values()
    }
    raw = {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in TENSORS.items()}
    assert raw.items() <= held.items()


def test_a_file_of_what_is_not_sharded_is_read_first(folder: Path) -> None:
    """A file of unsharded state is read before the object, as in megatron-core."""
    torch.save({"optimizer": {"param_groups": [{"step": 3}]}}, folder / "common.pt")
    assert audit(folder).checkpoint.step == 3
    torch.save(common(), folder / "common.pt", _use_new_zipfile_serialization=False)
    found = audit(folder)
    assert found.verdict == UNKNOWN
    assert [(f.kind.name, f.array) for f in found.findings if f.kind.severity != "note"] == [("not_read", "common.pt")]


def test_neither_a_file_nor_an_object_of_what_is_not_sharded(folder: Path) -> None:
    change_index(folder, lambda index: index.storage_data.pop(the_key(index, torch_dist.COMMON_OBJECT)))
    found = audit(folder)
    assert [(f.kind.name, f.array) for f in found.findings] == [("bad_metadata", "common.pt")]


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [({"data": 2}, 2), ({"data": 2, "context": 4}, 8), ({"data": 2, "context": 1 << 40}, 2), ({"data": "2"}, None)],
)
def test_ranks_of_context_parallelism_share_the_optimizers_states(
    sizes: dict[str, Any], ranks: int | None, folder: Path
) -> None:
    """How many slices can be lost depends on them. Megatron-LM's `data_parallel_size` counts others alone."""
    args = argparse.Namespace(**{f"{kind}_parallel_size": size for kind, size in sizes.items()})
    torch.save({**common(), "args": args, "checkpoint_version": 3.0}, folder / "common.pt")
    report = audit(folder)
    assert (report.verdict, report.checkpoint.data_parallel) == (WHOLE, ranks)


def change_index(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))


def the_key(index: Any, name: str) -> Any:
    return next(key for key in index.storage_data if key.fqn == name)


# Names that point to other folders


def leave(folder: Path, name: str) -> None:
    def change(index: Any) -> None:
        for key in (the_key(index, "weight"), the_key(index, torch_dist.COMMON_OBJECT)):
            index.storage_data[key].relative_path = name

    shutil.copy(folder / FILE, folder.parent / FILE)
    change_index(folder, change)


def link_elsewhere(folder: Path) -> None:
    (folder / FILE).rename(folder.parent / FILE)
    (folder / FILE).symlink_to(folder.parent / FILE)


def link_a_folder(folder: Path) -> None:
    (folder / "inner").symlink_to(folder.parent)
    leave(folder, f"inner/{FILE}")


LEAVING: dict[str, Callable[[Path], None]] = {
    "by the folder above": lambda folder: leave(folder, f"../{FILE}"),
    "by the folder above, inside": lambda folder: leave(folder, f"iter/../../{FILE}"),
    "by an absolute name": lambda folder: leave(folder, str(folder.parent / FILE)),
    "by a link": link_elsewhere,
    "by a link to a folder": link_a_folder,
}


def test_a_name_that_no_file_can_have_is_a_file_that_is_missing(folder: Path) -> None:
    change_index(
        folder, lambda index: setattr(index.storage_data[the_key(index, "weight")], "relative_path", "a" * 300)
    )
    found = audit(folder)
    assert (found.verdict, {own.array for own in found.findings if own.kind.severity == "damage"}) == (
        "DAMAGED",
        {"weight"},
    )


@pytest.mark.parametrize("how", LEAVING)
def test_a_file_outside_of_the_folder_is_refused(folder: Path, how: str) -> None:
    LEAVING[how](folder)
    found = audit(folder)
    assert (found.verdict, found.checkpoint.shards) == (UNKNOWN if "link" in how else DAMAGED, [])


def test_a_link_within_the_folder_is_followed(folder: Path) -> None:
    (folder / FILE).rename(folder / "other")
    (folder / FILE).symlink_to("other")
    assert audit(folder).verdict == WHOLE


# Damaged and unknown content


def test_another_tensor_than_the_index_says(folder: Path) -> None:
    def swap(index: Any) -> None:
        one, other = the_key(index, "weight"), the_key(index, "optimizer.state.param.weight")
        places = index.storage_data
        places[one], places[other] = places[other], places[one]

    change_index(folder, swap)
    found = {(f.kind.name, f.array) for f in audit(folder).findings}
    assert found == {("bad_file", "weight"), ("bad_file", "optimizer.state.param.weight")}


def test_an_unknown_type_of_elements_is_not_read_and_no_damage(folder: Path) -> None:
    path = folder / ".metadata"
    index = path.read_bytes()
    assert index.count(b"bfloat16") == 1
    path.write_bytes(index.replace(b"bfloat16", b"qfloat16"))
    found = audit(folder)
    assert (found.verdict, [f.kind.name for f in found.findings if f.kind.severity != "note"]) == (
        UNKNOWN,
        ["not_read"],
    )


@pytest.mark.parametrize("file", [".metadata", FILE])
def test_a_flipped_bit_is_a_finding_or_changes_nothing(folder: Path, file: str) -> None:
    whole, before, verdicts = (folder / file).read_bytes(), structure(folder), set()
    for at in range(0, len(whole), 3 if file == ".metadata" else 7):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        (folder / file).write_bytes(damaged)
        verdict, _ = found_in(folder)
        verdicts.add(verdict)
        assert verdict != WHOLE or structure(folder) == before or file == ".metadata", at  # such as another name
    assert verdicts >= {WHOLE, DAMAGED}


def structure(folder: Path) -> list[object]:
    return [(shard.parameter, shard.label, shard.shape, shard.streams) for shard in audit(folder, 1).checkpoint.shards]


def test_an_index_that_is_too_large_for_memory_is_not_read(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be right, so the verdict is UNKNOWN; the reason says what to do."""
    size = (written / torch_dist.INDEX).stat().st_size
    monkeypatch.setattr(torch_dist, "LARGEST", size)
    assert audit(written).verdict == WHOLE
    monkeypatch.setattr(torch_dist, "LARGEST", size - 1)
    report = audit(written)
    assert report.verdict == UNKNOWN
    assert "load the checkpoint in its own framework" in report.findings[0].detail
    assert "save it on fewer ranks" in report.findings[0].detail


def test_migrate_writes_nothing_without_its_index(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the tensors of an index that is not read, the new checkpoint would have none."""
    folder = Path(shutil.copytree(written, tmp_path / written.name))
    torch.save(common(), folder / torch_dist.COMMON)
    monkeypatch.setattr(torch_dist, "LARGEST", 1)
    assert main(["migrate", str(folder), "--output", str(tmp_path / "new")]) == 2
    assert "expected an index of at most 1 B" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
