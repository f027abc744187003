"""Later releases of the real megatron-core load migrated old checkpoints and continue, bit for bit."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ckpt_patches.cli import command_line
from ckpt_patches.formats import torch_dist
from every_checkpoint import in_torch_dist
from upstream import all_releases, newest, once, run_lines, tree

MODEL_SPACE, GATHERED = "fully_sharded_model_space", "dp_zero_gather_scatter"
TARGETS = {MODEL_SPACE: "fully_reshardable", GATHERED: GATHERED}
# 0.15.3 is the only release that reads the old formats and the new ones.
LOADED_BY = (
    ["0.15.3", "0.16.1", "0.17.1", "0.18.2", newest("megatron-core")] if all_releases() else [newest("megatron-core")]
)


def lines(program: str, version: str, *options: str | Path, delivery: str = "none") -> list[dict[str, Any]]:
    return run_lines(program, *options, tree=tree("megatron-core", version), delivery=delivery)


def migrated(old: Path, new: Path) -> Path:
    assert command_line.main(["migrate", str(old), "--output", str(new)]) == 0
    return new


# A tiny model, in every format, with every optimizer


@dataclass(frozen=True)
class Run:
    """A release and its format; the backend is zarr before 0.13."""

    version: str
    format: str = MODEL_SPACE
    optimizer: str = "plain"
    inner: str = "fused"
    default: bool = False


RUNS = [
    Run("0.14.0"),
    Run("0.12.3", default=True),
    Run("0.12.3", GATHERED),
    Run("0.14.0", GATHERED),
    *(Run(version) for version in ("0.12.0", "0.13.1", "0.15.3")),
    *(Run(version, optimizer="plain-fp32") for version in ("0.12.3", "0.14.0", "0.15.3")),
    *(Run(version, optimizer="precision-aware") for version in ("0.13.1", "0.14.0", "0.15.3")),
    *(Run(version, inner="torch") for version in ("0.12.3", "0.13.1", "0.14.0", "0.15.3")),
    Run("0.14.0", GATHERED, inner="torch"),
]


def saved(own: Run) -> Path:
    """The folder of a run: its checkpoint and its next steps."""

    def save(folder: Path) -> None:
        options = ("--formats", own.format, "--optimizers", own.optimizer, "--inner", own.inner, "--only", "save")
        lines("exact_resume", own.version, folder, *options, delivery=delivery(own))

    return once(f"to-migrate-{own.version}-{own.format}-{own.optimizer}-{own.inner}", save) / own.optimizer


def delivery(own: Run) -> str:
    """The delivery: with torch's own Adam, no upstream release resumes without a fix (torch_adam_step)."""
    return "hook" if own.inner == "torch" else "none"


@pytest.mark.parametrize("version", LOADED_BY)
@pytest.mark.parametrize("own", [own for own in RUNS if own.default or all_releases()], ids=str)
def test_the_run_goes_on_from_the_migrated_checkpoint_bit_for_bit(own: Run, version: str, tmp_path: Path) -> None:
    folder = tmp_path / own.optimizer
    folder.mkdir()
    (folder / "reference.pt").symlink_to(saved(own) / "reference.pt")
    migrated(saved(own) / own.format, folder / TARGETS[own.format])
    options = ("--formats", TARGETS[own.format], "--optimizers", own.optimizer, "--inner", own.inner)
    rows = lines("exact_resume", version, tmp_path, *options, "--only", "resume", delivery=delivery(own))
    assert [(row["ranks"], row["result"]) for row in rows] == [(2, "bit-equal"), (4, "bit-equal")]


# A GPT with SwiGLU, a padded vocabulary and tied embeddings, on several model-parallel ranks, and with experts


@dataclass(frozen=True)
class Gpt:
    """A release that saves, its layout of ranks, and another layout that loads."""

    version: str
    layout: str
    other: str
    kind: str = ""  # model options
    backend: str = "torch_dist"
    default: bool = False


GPTS = [
    Gpt("0.12.3", "--ep 2 --dp 2", "--ep 2 --dp 4", "--experts", "zarr"),
    Gpt("0.14.0", "--tp 2 --dp 2", "--pp 2 --dp 2", default=True),
    Gpt("0.14.0", "--pp 2 --dp 2", "--tp 2 --dp 2"),
    Gpt("0.14.0", "--ep 2 --dp 2", "--ep 2 --dp 4", "--experts"),
    Gpt("0.14.0", "--tp 2 --dp 1", "--tp 1 --dp 4", "--fp32"),
    Gpt("0.12.3", "--tp 2 --dp 2", "--pp 2 --dp 2", backend="zarr"),
    Gpt("0.15.3", "--tp 2 --dp 2", "--pp 2 --dp 2"),
    Gpt("0.15.3", "--tp 1 --dp 4", "--tp 2 --dp 1", backend="zarr"),
]


def trained(own: Gpt) -> Path:
    """The folder of a run: its checkpoint, and the state then and two steps later."""
    options = (*own.layout.split(), *own.kind.split(), "--backend", own.backend)
    name = "-".join([own.version, *options]).replace(" ", "")
    return once(f"gpt-{name}", lambda folder: lines("gpt_resume", own.version, "save", folder, *options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("own", [Gpt("0.14.0", "--tp 2 --dp 2", ""), Gpt("0.14.0", "--tp 2 --dp 2", "", "", "zarr")])
def test_a_run_of_0_15_3_with_the_fixes_does_the_same_on_the_same_ranks(own: Gpt, tmp_path: Path) -> None:
    """The way without `migrate`: load the checkpoint there, and save it in a format that later releases load."""
    for file in trained(own).glob("*.pt"):
        (tmp_path / file.name).symlink_to(file)
    options: tuple[str | Path, ...] = ("resume", tmp_path, *own.layout.split(), "--checkpoint")
    as_new = ("--save-as", "dp_reshardable")
    assert lines("gpt_resume", "0.15.3", *options, trained(own) / "checkpoint", *as_new, delivery="hook") == [
        {"result": "saved again"}
    ]
    again = (tmp_path / "again", "--format", "dp_reshardable")
    found = lines("gpt_resume", newest("megatron-core"), *options, *again, delivery="hook")
    assert found == [{"loaded": "bit-equal", "after": "bit-equal"}]


@pytest.mark.slow
@pytest.mark.parametrize("version", LOADED_BY)
@pytest.mark.parametrize("own", [own for own in GPTS if own.default or all_releases()], ids=str)
def test_a_gpt_goes_on_bit_for_bit_and_is_the_same_in_another_layout(own: Gpt, version: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for file in trained(own).glob("*.pt"):
        (folder / file.name).symlink_to(file)
    new = migrated(trained(own) / "checkpoint", tmp_path / "new")
    options: tuple[str | Path, ...] = (
        "resume",
        folder,
        "--checkpoint",
        new,
        "--format",
        "fully_reshardable",
        *own.kind.split(),
    )
    assert lines("gpt_resume", version, *options, *own.layout.split()) == [
        {"loaded": "bit-equal", "after": "bit-equal"}
    ]
    if not all_releases():
        return
    (result,) = lines("gpt_resume", version, *options, *own.other.split())
    if "loaded" in result:  # the same model-parallel ranks; norms over more data-parallel ones round differently
        assert result["loaded"] == "bit-equal"
    else:  # for others no state was saved
        assert elements(folder / "again") == elements(new)


class Whole(NamedTuple):
    """A release that saves in zarr with a non-distributed optimizer, or only the weights."""

    version: str
    optimizer: str
    default: bool = False


WHOLE = [
    Whole("0.12.3", "whole", default=True),
    Whole("0.12.3", "none"),
    Whole("0.15.3", "whole"),
]


@pytest.mark.slow
@pytest.mark.parametrize("version", LOADED_BY)
@pytest.mark.parametrize("own", [own for own in WHOLE if own.default or all_releases()], ids=str)
def test_weights_and_an_optimizer_that_is_not_distributed(own: Whole, version: str, tmp_path: Path) -> None:
    options = ("--tp", "2", "--dp", "2", "--optimizer", own.optimizer)

    def save(out: Path) -> None:
        lines("gpt_resume", own.version, "save", out, "--backend", "zarr", *options)

    folder = once(f"{own.optimizer}-{own.version}", save)
    saved, _ = torch.load(folder / "tp2-pp1-ep1.pt", weights_only=False)
    assert any(name.endswith("exp_avg_sq") for name in saved) == (own.optimizer == "whole")
    new = migrated(folder / "checkpoint", tmp_path / "new")
    (result,) = lines("gpt_resume", version, "resume", folder, "--checkpoint", new, *options)
    assert result["loaded"] == "bit-equal"
    assert result["after"] == "bit-equal" or own.optimizer == "none"  # that one starts over


def elements(folder: Path) -> dict[str, bytes]:
    """All tensors of a checkpoint, assembled from their chunks."""
    index = torch_dist.read_index(folder)
    found: dict[str, bytearray] = {}
    for place in (place for place in in_torch_dist(folder) if place.name in index.tensors):
        tensor = index.tensors[place.name]
        size = place.nbytes // place.numel
        whole = found.setdefault(place.name, bytearray(math.prod(tensor.size) * size))
        shape, data = tensor.chunks[place.first], place.data()
        row = shape[-1] * size if shape else size
        for number, index_ in enumerate(itertools.product(*map(range, shape[:-1]))):
            at = 0
            for first, i, n in zip(place.first, (*index_, 0), tensor.size, strict=True):
                at = at * n + first + i
            whole[at * size : at * size + row] = data[number * row : (number + 1) * row]
    return {name: bytes(whole) for name, whole in found.items()}
