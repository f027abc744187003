"""Every tensor in the files is judged, or named in a finding."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, audit
from ckpt_patches.formats import torch_file
from ckpt_patches.formats import zero as zero_files
from megatron_checkpoints import Configuration, written
from test_audit import check_that_a_nan_is_found, copied, names
from upstream import newest, once, run, tree
from zero_checkpoints import trained

WRITER = "0.16.2"


@pytest.fixture
def zero(tmp_path: Path) -> Path:
    return copied(trained(WRITER, "stage2")["stage2"], tmp_path)


def change(path: Path, make: Callable[[Any], object]) -> None:
    value = torch.load(path, weights_only=False)
    make(value)
    torch.save(value, path)


MODEL = "mp_rank_00_model_states.pt"
NAN = torch.full((40, 3), float("nan"))


@pytest.mark.parametrize(
    "place",
    [
        lambda value: value["module"].update(buffer=NAN.clone()),
        lambda value: value["module"].update(transposed=NAN.t()),
        lambda value: value["module"].update(inner={"list": [1, (NAN.clone(),)]}),
        lambda value: value.update(optimizer={"state": {0: {"momentum": NAN.clone()}}}),
    ],
    ids=["a buffer", "a transposed one", "a nested one", "of an optimizer"],
)
def test_a_tensor_anywhere_in_a_file_is_judged(zero: Path, place: Callable[[Any], object]) -> None:
    change(zero / MODEL, place)
    assert (audit(zero).verdict, names(audit(zero))) == (DAMAGED, {"not_finite"})


def test_a_tensor_whose_elements_do_not_lie_in_order_is_named(zero: Path) -> None:
    """A strided view of a storage that it shares with another tensor is a finding, and the verdict is UNKNOWN."""
    base = torch.ones(100)
    change(zero / MODEL, lambda value: value["module"].update(part=base[:10], strided=base[20::2]))
    report = audit(zero)
    (finding,) = [f for f in report.findings if f.kind.name == "not_judged"]
    assert (report.verdict, finding.array) == (UNKNOWN, "module.strided")


@pytest.mark.parametrize("kind", ["stage2", "stage3"])
def test_a_partition_of_padding_alone_can_hold_anything(kind: str, tmp_path: Path) -> None:
    """NaN in the padding of ranks without parameters only fails the checksum: DeepSpeed does not initialize it."""
    path = copied(trained(WRITER, kind)[kind], tmp_path)
    file = path / "bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt"
    state = zero_files.read_rank(torch_file.read(file, trust=True))
    padding = [p for p in state.partitions if kind == "stage3" or not p.fragments]
    whole = file.read_bytes()
    for partition in padding:
        for flat in partition.states.values():
            with open(file, "r+b") as changed:
                changed.seek(flat.offset)
                changed.write(NAN.numpy().tobytes()[: 4 * flat.numel])
            assert names(audit(path)) <= {"bad_file"}  # only by the checksum
            file.write_bytes(whole)
    assert padding or kind == "stage2"


def test_what_is_whole_stays_whole(zero: Path) -> None:
    base = torch.ones(100)
    change(zero / MODEL, lambda value: value["module"].update(tied=[base, base[:50], base.t()], empty=torch.ones(0, 3)))
    assert (audit(zero).verdict, names(audit(zero))) == (WHOLE, set())


# dp_zero_gather_scatter: the optimizer state is an object in the sharded files

OBJECTS = [
    Configuration(version=version, ranks=2, backend=backend, format="dp_zero_gather_scatter", iterations="3")
    for version, backend in (("0.14.0", "zarr"), ("0.14.0", "torch_dist"), ("0.16.1", "torch_dist"))
]


@pytest.mark.parametrize("configuration", OBJECTS, ids=str)
def test_the_gathered_state_in_an_object_is_judged(configuration: Configuration) -> None:
    report = audit(written(configuration).whole[-1])
    assert (report.verdict, names(report)) == (WHOLE, set())
    roles = {role for shard in report.checkpoint.shards if not shard.has_rows for role in shard.streams}
    assert roles == {"master", "exp_avg", "exp_avg_sq"}


# Experts, and files of no rank


@functools.cache
def experts(stage: int) -> Path:
    """A real checkpoint in which expert-parallel ranks 0 and 1 have different experts with the same names."""
    release = tree("deepspeed", newest("deepspeed"))
    return once(f"experts-{stage}", lambda out: run("experts", out, str(stage), tree=release)) / "global_step8"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_experts_are_judged_by_expert_parallel_ranks(stage: int) -> None:
    report = audit(experts(stage))
    assert (report.verdict, names(report)) == (WHOLE, set())
    labels = {shard.label for shard in report.checkpoint.shards if "master" in shard.streams}
    assert labels == {"", "expert-parallel rank 0", "expert-parallel rank 1"}


def test_damage_in_the_state_of_every_expert_is_found(tmp_path: Path) -> None:
    path = copied(experts(1), tmp_path)
    shards = [shard for shard in audit(path).checkpoint.shards if "expert" in shard.label]
    assert len(shards) == 8
    for shard in shards:
        check_that_a_nan_is_found(path, shard, shard.streams["exp_avg_sq"].extents[0])


@pytest.mark.parametrize("name", ["layer_0_expert_2_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt"])
def test_a_file_of_weights_is_read_to_its_end(tmp_path: Path, name: str) -> None:
    path = copied(experts(1), tmp_path)
    change(path / name, lambda value: poison(value))
    assert audit(path).verdict == DAMAGED
    (path / name).write_bytes((path / name).read_bytes()[:-100])
    assert "bad_file" in names(audit(path))


def poison(value: Any) -> None:
    weights = value.get("module", value)
    next(iter(weights.values())).view(-1)[0] = float("nan")
