"""Handmade zarr checkpoints: complete arrays in chunks, objects in their own files, and folders of locks."""

import errno
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import audit
from ckpt_patches.formats import torch_dist
from ckpt_patches.formats.damages import UNREADABLE
from old_checkpoints import settings
from test_migrate_refusals import migrate, refused
from torch_dist_indexes import loaded_by_torch

Shape = tuple[int, ...]
NAMES = {torch.float32: "<f4", torch.bfloat16: "bfloat16"}


def array(folder: Path, name: str, whole: torch.Tensor, fragments: Shape) -> None:
    path, chunks = folder / name, [n // parts for n, parts in zip(whole.shape, fragments, strict=True)]
    path.mkdir()
    (folder / f"{name}.sync").mkdir()
    (folder / f"{name}.sync" / ".zarray").touch()
    fixed = {"compressor": None, "filters": None, "order": "C", "fill_value": None, "zarr_format": 2}
    described = {"shape": list(whole.shape), "chunks": chunks, "dtype": NAMES[whole.dtype], **fixed}
    (path / ".zarray").write_text(json.dumps(described))
    for number in range(math.prod(fragments)):
        index = [int(i) for i in torch.unravel_index(torch.tensor(number), fragments)]
        part = whole[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, chunks, strict=True))].contiguous()
        (path / ".".join(map(str, index))).write_bytes(part.view(torch.uint8).numpy().tobytes())


def checkpoint(folder: Path, *, kind: str = "fully_sharded_model_space") -> tuple[Path, dict[str, torch.Tensor]]:
    folder.mkdir()
    config = {"sharded_backend": "zarr", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(
        json.dumps({**config, "common_backend": "torch", "common_backend_version": 1})
    )
    torch.save(settings(kind=kind) if kind else {"iteration": 1}, folder / "common.pt")
    truth = {}
    for number, (name, shape, fragments) in enumerate((("layers.weight", (2, 6, 4), (2, 1, 2)), ("bias", (6,), (2,)))):
        master = torch.randn(shape, generator=torch.Generator().manual_seed(number)) + 3
        truth[name] = master.to(torch.bfloat16)
        if kind:
            gradient = master * 0.01
            states = {"fp32_param": master, "exp_avg": gradient, "exp_avg_sq": gradient.square()}
            truth |= {f"optimizer.state.{role}.{name}": state for role, state in states.items()}
        for key in [key for key in truth if key.endswith(name)]:
            array(folder, key, truth[key], fragments)
    return folder, truth


def add_object(folder: Path, key: str, value: Any) -> None:
    path = folder / f"{key}.pt"
    path.parent.mkdir(exist_ok=True)
    torch.save(value, path)


@pytest.mark.parametrize("kind", ["fully_sharded_model_space", ""], ids=["optimizer", "weights alone"])
def test_torch_itself_loads_every_element(kind: str, tmp_path: Path) -> None:
    old, truth = checkpoint(tmp_path / "old", kind=kind)
    found = loaded_by_torch(migrate(old, tmp_path / "new"))
    assert found.keys() == {name.replace("fp32_param", "param") for name in truth}
    assert all(torch.equal(found[name.replace("fp32_param", "param")], tensor) for name, tensor in truth.items())
    common = torch.load(tmp_path / "new" / "common.pt")
    assert ("content_metadata" in common) == bool(kind)
    assert json.loads((tmp_path / "new" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_objects_are_wrapped_as_torch_dist_has_them(tmp_path: Path) -> None:
    old, _ = checkpoint(tmp_path / "old")
    tied = torch.arange(6.0)
    values = {
        "rng_state/shard_0_1": [{"cpu": torch.arange(9), "text": "x", "pair": (1, None)}],
        "module._extra_state/shard_0.0_1.2": io.BytesIO(b"abc"),
        "module._extra_state/shard_0.1_1.2": io.BytesIO(b"def"),
        "tied/shard_0_1": {"one": tied, "half": tied[2:4], "empty": torch.empty(0)},
    }
    for key, value in values.items():
        add_object(old, key, value)
    new = migrate(old, tmp_path / "new")
    index = torch_dist.read_index(new)

    def read(key: str) -> Any:
        place = index.objects[key]
        data = (new / place.path).read_bytes()[place.offset : place.offset + place.nbytes]
        (value,) = torch.load(io.BytesIO(data), weights_only=False)
        return value

    (rng,) = read("rng_state/shard_0_1")
    assert torch.equal(rng["cpu"], torch.arange(9))
    assert (rng["text"], rng["pair"]) == ("x", (1, None))
    assert [read(f"module._extra_state/shard_0.{n}_1.2").getvalue() for n in (0, 1)] == [b"abc", b"def"]
    found = read("tied/shard_0_1")
    assert torch.equal(found["half"], tied[2:4])
    assert found["half"].untyped_storage().data_ptr() == found["one"].untyped_storage().data_ptr()
    assert found["empty"].numel() == 0


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (lambda chunk: chunk.unlink(), "its chunk at [0, 0, 2] is not there"),
        (lambda chunk: chunk.write_bytes(chunk.read_bytes()[:-1]), "its chunk at [0, 0, 2] is not there, or not all"),
        (lambda chunk: (chunk.parent / ".zarray").write_text("{"), "is corrupt"),
        (lambda chunk: (chunk.parent / ".zarray").unlink(), ".zarray"),
        (lambda chunk: in_columns(chunk.parent / ".zarray"), "expected raw chunks in C order"),
        (lambda chunk: outside(chunk.parent), "outside of the checkpoint: put the file itself there"),
        (lambda chunk: outside(chunk.parent, is_there=False), "No such file or directory"),
    ],
    ids=["chunk missing", "chunk short", "metadata corrupt", "metadata missing", "order F", "a link", "a broken link"],
)
def test_an_array_that_is_not_all_there_is_refused(
    break_it: Any, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, _ = checkpoint(tmp_path / "old")
    break_it(old / "optimizer.state.exp_avg.layers.weight" / "0.0.1")
    assert expected in refused(capsys, old, tmp_path)


def in_columns(metadata: Path) -> None:
    metadata.write_text(metadata.read_text().replace('"order": "C"', '"order": "F"'))


def outside(path: Path, *, is_there: bool = True) -> None:
    """Put a link in place of a file or folder of the checkpoint `old`, to where it is now, or to nothing."""
    place = next(parent for parent in path.parents if parent.name == "old").with_name("elsewhere")
    path.rename(place)
    path.symlink_to(place if is_there else place / "gone")


def test_an_object_that_is_a_link_out_of_the_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, _ = checkpoint(tmp_path / "old")
    add_object(old, "rng_state/shard_0_1", {"cpu": torch.arange(3)})
    outside(old / "rng_state" / "shard_0_1.pt")
    for options in ((), ("--damaged-as-is",)):
        assert "cannot be read, and nothing was written" in refused(capsys, old, tmp_path, *options)


def test_a_chunk_that_the_system_cannot_look_up_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, _ = checkpoint(tmp_path / "old")
    chunk, looked_up = old / "optimizer.state.exp_avg.layers.weight" / "0.0.1", os.stat

    def failing(file: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(file) == str(chunk):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return looked_up(file, *arguments, **options)

    monkeypatch.setattr(os, "stat", failing)
    (finding,) = audit(old).findings
    assert (finding.kind, finding.array, finding.detail) == (UNREADABLE, str(chunk), "Input/output error")


def test_buckets_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, _ = checkpoint(tmp_path / "old", kind="fully_sharded_bucket_space")
    line = refused(capsys, old, tmp_path, "--damaged-as-is")
    assert "found fully_sharded_bucket_space: load it in the release that saved it" in line
