"""Fingerprints of Megatron's checkpoints: those of the complete tensors that torch and zarr load, in any sharding."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import save

from ckpt_patches.cli import command_line
from ckpt_patches.fingerprint import contents, megatron_state
from ckpt_patches.fingerprint.buckets import Layout, layouts
from ckpt_patches.fingerprint.element_hash import LONG, MODULUS, Box, of_box, of_run
from ckpt_patches.fingerprint.files import of_megatron, opened, tensors_in_buckets
from ckpt_patches.fingerprint.record import NotARecord, Record, State, from_plain
from ckpt_patches.formats.checkpoint import MASTER, Checkpoint, Extent, Shard, Stream
from ckpt_patches.formats.chunked import Chunked, shards_of
from ckpt_patches.formats.torch_dist import Tensor
from every_checkpoint import EVERY
from test_fingerprint import by_formula
from torch_dist_indexes import loaded_by_torch
from upstream import all_releases

TORCH_DIST = ["0.19, fully_reshardable", "0.16, fully_reshardable, tensor parallel", "0.18, fully_reshardable"]
ZARR = ["0.14, zarr", "0.14, zarr, tensor parallel", "0.12, zarr"]
BUCKETS = ["0.14, zarr, buckets", "0.19, dp_reshardable"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def some(names: list[str]) -> list[str]:
    return names if all_releases() else names[:1]


def found_in(path: Path) -> dict[tuple[str, str], int]:
    return {(one.parameter, one.state): one.value for one in contents.of(opened(path)).fingerprints}


def loaded_by_zarr(path: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    folders = [file.parent for file in path.glob("*/.zarray")]
    for folder in [one for one in folders if one.suffix != ".sync"]:  # a folder of locks
        metadata = (folder / ".zarray").read_text()
        if "bfloat16" in metadata:  # which zarr does not know and stores as these integers
            copy = path.parent / "as_integers" / folder.name
            shutil.copytree(folder, copy)
            (copy / ".zarray").write_text(metadata.replace("bfloat16", "<i2"))
            tensors[folder.name] = torch.from_numpy(np.array(zarr.open(str(copy), "r"))).view(torch.bfloat16)
        else:
            tensors[folder.name] = torch.from_numpy(np.array(zarr.open(str(folder), "r")))
    return tensors


@pytest.mark.parametrize("name", [*some(TORCH_DIST), *some(ZARR)])
def test_they_are_those_of_what_torch_or_zarr_loads(name: str, tmp_path: Path) -> None:
    """The fingerprints are equal. In zarr, data-parallel ranks wrote ranges of a tensor-parallel rank's chunks."""
    path = Path(shutil.copytree(EVERY[name].path, tmp_path / "checkpoint"))
    tensors = (loaded_by_zarr if name in ZARR else loaded_by_torch)(path)
    expected = {of_megatron(key): by_formula(t) for key, t in tensors.items() if t.dtype in FLOATS}
    assert found_in(path) == expected
    assert {state for _, state in expected} == {"model", "master", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("name", some(BUCKETS))
def test_buckets_of_a_copy_are_equal(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Others may be in other places: they are not verified, and no success."""
    copy = Path(shutil.copytree(EVERY[name].path, tmp_path / "copy"))
    assert command_line.main(["compare", str(EVERY[name].path), str(copy)]) == 0
    assert "not verified" not in capsys.readouterr().out
    stream = next(iter(tensors_in_buckets(opened(copy), {}).values()))[0].stream
    with open(stream.extents[0].path, "r+b") as file:
        file.seek(stream.extents[0].offset)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert command_line.main(["compare", str(EVERY[name].path), str(copy)]) == 1
    assert "; 1 not verified" in capsys.readouterr().out
    weight = next(own.streams["weight"] for own in opened(copy).shards if "weight" in own.streams)
    with open(weight.extents[0].path, "r+b") as file:
        file.seek(weight.extents[0].offset)
        file.write(bytes(weight.extents[0].nbytes))
    assert command_line.main(["compare", str(EVERY[name].path), str(copy)]) == 1
    assert "differs: 1 " in capsys.readouterr().out  # whatever is not verified beside it


@pytest.mark.parametrize(
    ("bucket", "box"),
    [
        (0, [[2], [4], [4]]),
        (0, [[0], [1 << 60], [1 << 60]]),
        (0, [[0], [4]]),
        (0, [[0], ["x"], [4]]),
        (1, [[0], [4], [4]]),
    ],
)
def test_places_that_no_run_records_are_no_record(bucket: int, box: list[list[int]]) -> None:
    with pytest.raises(NotARecord):
        layouts({"dp_group_idx_0.gbuf_idx_0": [[4], [[bucket, 0, "weight", *box]]]})


@pytest.mark.parametrize("change", [{"states": {"w": {"master": [-4, 0, "float32"]}}}, {"sizes": {"w": -4}}])
def test_numbers_of_elements_that_no_run_records_are_no_record(change: dict[str, Any]) -> None:
    with pytest.raises(NotARecord):
        from_plain({**Record({("w", "master"): State(4, 0, 4, "float32")}).as_plain(), **change})


def test_a_bucket_of_which_the_record_has_no_places_is_compared_as_a_whole(tmp_path: Path) -> None:
    name = "optimizer.distributed.dp_group_idx_0.gbuf_idx_1.dtype_x.bucket_idx_0"
    (tmp_path / "file").write_bytes(bytes(16))
    stream = Stream(f"{name}.param", "float32", (Extent(str(tmp_path / "file"), 0, 16),))
    found = Checkpoint(tmp_path, "megatron", shards=[Shard(name, "", (4,), {MASTER: stream}, has_rows=False)])
    assert [*tensors_in_buckets(found, {"dp_group_idx_0.gbuf_idx_0": Layout((4,), ())})] == [stream.array]


def test_parts_of_a_bucket_are_read_in_the_order_of_their_elements(tmp_path: Path) -> None:
    """A gap before a parameter makes parts of 256, 64 and 320 elements, whose indexes in a grid are 0, 4 and 1."""
    name = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0"
    parts: dict[tuple[int, ...], tuple[int, ...]] = {(0,): (256,), (256,): (64,), (320,): (320,)}
    extents = {at: Extent(str(tmp_path / "file"), 4 * at[0], 4 * numel) for at, (numel,) in parts.items()}
    bucket = Chunked(Tensor(f"{name}.param", "float32", (640,), None, parts), extents)
    found = Checkpoint(tmp_path, "megatron")
    found.shards += shards_of(found, name, {MASTER: bucket})
    ((part,),) = tensors_in_buckets(found, {}).values()
    assert [extent.offset for extent in part.stream.extents] == [0, 1024, 1280]


def test_tensors_of_other_types_are_compared(tmp_path: Path) -> None:
    """The words of an element are on an axis of their own; torch cuts these tensors into chunks of any rows."""
    doubles, numbers = torch.ones(3, dtype=torch.float64), torch.arange(4)
    paths = [tmp_path / name for name in ("one", "same", "double", "number", "byte")]
    for path in paths:
        double = doubles + 1e-15 * (path.name == "double")
        number = numbers + (path.name == "number") * (1 << 40)
        byte = torch.tensor([1, 2, 3 + (path.name == "byte")], dtype=torch.uint8)
        save({"a": torch.ones(2), "b": double, "c": number, "d": byte}, checkpoint_id=path, no_dist=True)
    status = [command_line.main(["compare", str(paths[0]), str(path)]) for path in paths]
    assert status == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("name", ["0.14, zarr", "0.19, fully_reshardable"])
def test_a_lost_file_is_said_in_a_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(shutil.copytree(EVERY[name].path, tmp_path / "checkpoint"))
    lost = next(file for pattern in ("*.exp_avg.*/[0-9]*", "*.distcp") for file in sorted(path.glob(pattern)))
    lost.unlink()
    assert command_line.main(["fingerprint", str(path)]) == 2
    said = capsys.readouterr().err
    assert str(lost) in said
    assert said.count("\n") == 1


# Boxes in a tensor

SIZES = st.sampled_from([1, 2, 3, 7, 40])
SHAPES = st.one_of(st.lists(SIZES, min_size=1, max_size=4), st.sampled_from([[3, 2 * LONG], [2, 3, LONG + 1], []]))


@given(shape=SHAPES, data=st.data())
def test_boxes_that_fill_a_tensor_add_up(shape: list[int], data: st.DataObject) -> None:
    """Boxes cut along every axis, each in two runs, as ranks write it, add up to the tensor."""
    cuts = [sorted({0, size, data.draw(st.integers(0, size))}) for size in shape]
    whole = np.random.default_rng(len(shape)).integers(0, 2**32, tuple(shape), dtype=np.uint32)
    total = 0
    for index in np.ndindex(*(len(ends) - 1 for ends in cuts)):
        begins = tuple(ends[number] for ends, number in zip(cuts, index, strict=True))
        ends = tuple(ends[number + 1] for ends, number in zip(cuts, index, strict=True))
        part = np.ascontiguousarray(whole[tuple(map(slice, begins, ends))]).reshape(-1)
        box = Box(begins, tuple(end - begin for begin, end in zip(begins, ends, strict=True)), tuple(shape))
        middle = data.draw(st.integers(0, len(part)))
        total += of_box(part[:middle], 0, box) + of_box(part[middle:], middle, box)
    assert total % MODULUS == of_run(whole.reshape(-1), 0)


def test_an_optimizer_without_parameters_has_nothing_to_prove() -> None:
    """As on a pipeline stage without experts; one with parameters and no state is listed."""
    leaf = Leaf(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]))
    assert megatron_state.live(leaf, {}).left_out == {"Leaf": "it has no state yet"}
    leaf.optimizer.param_groups[0]["params"].clear()
    assert not megatron_state.live(leaf, {}).left_out


def test_states_of_other_sizes_are_listed() -> None:
    """As the factors of SOAP in Megatron's emerging optimizers."""
    param = torch.nn.Parameter(torch.ones(3, 2))
    leaf = Leaf(torch.optim.AdamW([param]))
    leaf.optimizer.state[param] = {"exp_avg": torch.ones(3, 2), "Q": torch.eye(3), "step": torch.tensor(1.0)}
    place = megatron_state.Place((megatron_state.Piece("w", 0, Box((0, 0), (3, 2), (3, 2))),), (0, 0, 0))
    found = megatron_state.live(leaf, {id(param): place})
    assert {part.state for part in found.parts()} == {"master", "exp_avg"}
    assert found.left_out == {"w Q": "it has no element for each of the parameter's"}


class Leaf:
    """The attributes by which an optimizer of Megatron that is not distributed is known."""

    fp32_from_float16_groups: tuple[list[torch.Tensor], ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_elements_that_do_not_lie_in_order_are_not_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the factors of SOAP."""
    state = {"weight": torch.ones(2), "optimizer.state.weight.Q": torch.arange(6.0).view(2, 3).t()}
    save(state, checkpoint_id=tmp_path, no_dist=True)
    assert command_line.main(["compare", str(tmp_path), str(tmp_path)]) == 0
    assert "Q  not verified: its elements" in capsys.readouterr().out
    assert command_line.main(["fingerprint", str(tmp_path)]) == 0
