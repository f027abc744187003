"""Every tensor in the files is judged, or named in a finding; padding and masks can hold anything."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, UNKNOWN, WHOLE, audit
from ckpt_patches.audit.run_folder import saves
from ckpt_patches.convert.convert import Options, convert
from ckpt_patches.formats import torch_file
from ckpt_patches.formats import zero as zero_files
from crafted_files import change, copied, found_in, names
from every_checkpoint import EVERY, Place, experts, put, tensors
from explore.spaces import plainer
from explore.test_explore import SMALL
from megatron_checkpoints import Configuration, written
from torch_dist_indexes import changed_index
from upstream import newest, run_json, tree
from zero_checkpoints import trained

MODEL = "mp_rank_00_model_states.pt"
NAN = torch.tensor([float("nan")]).numpy().tobytes()
MASK = torch.full((4, 4), float("-inf")).triu(1)


def copy_of(kind: str, to: Path) -> Path:
    return Path(shutil.copytree(EVERY[kind].path, to / "checkpoint"))


# Padding


@pytest.mark.parametrize("kind", ["stage2", "stage3"])
def test_a_partition_of_padding_alone_can_hold_anything(kind: str, tmp_path: Path) -> None:
    """NaN in the padding of ranks without parameters only fails the checksum: DeepSpeed does not initialize it."""
    path = copied(trained("0.16.2", kind)[kind], tmp_path)
    file = path / "bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt"
    padding = [p for p in partitions(file) if kind == "stage3" or not p.fragments]
    whole = file.read_bytes()
    for flat in (flat for partition in padding for flat in partition.states.values()):
        put_nan(flat)
        assert names(audit(path)) <= {"bad_file"}  # only by the checksum
        file.write_bytes(whole)
    assert padding or kind == "stage2"


@pytest.mark.parametrize("of_autoep", [{}, {"ds_autoep_layers": [{}]}], ids=["plain", "AutoEP"])
def test_what_may_be_padding_is_not_judged_where_no_file_states_the_shapes(
    of_autoep: dict[str, Any], tmp_path: Path
) -> None:
    """That no parameter can be found is a finding already."""
    path = copied(trained("0.16.2", "stage3")["stage3"], tmp_path)
    for file in path.glob(f"zero_pp_rank_*_{MODEL}"):
        change(file, lambda value: value.update(param_shapes=[], **of_autoep))
    for partition in partitions(path / "bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt"):
        for flat in partition.states.values():
            put_nan(flat)
    found = names(audit(path))
    assert "fragments" in found
    assert "not_finite" not in found


def partitions(file: Path) -> tuple[zero_files.Partition, ...]:
    return zero_files.read_rank(torch_file.read(file, trust=True)).partitions


def put_nan(flat: zero_files.Flat) -> None:
    with open(flat.file, "r+b") as changed:
        changed.seek(flat.offset)
        changed.write(NAN * flat.numel)


def test_what_pads_a_frozen_parameter_of_zero_3_is_not_judged(tmp_path: Path) -> None:
    """Nor after a conversion. The first 3 of 8 ranks have one element each."""
    name, source = "ln.weight", copied(trained("0.19.8", "stage3_frozen")["stage3_frozen"], tmp_path)
    convert(source, tmp_path / "universal", Options(workers=1))
    for folder in (source, tmp_path / "universal"):
        files = sorted(folder.glob("zero_pp_rank_*_model_states.pt"))
        for file, verdict in ((files[-1], WHOLE), (files[0], DAMAGED)):
            change(file, lambda value: value["frozen_param_fragments"][name].fill_(torch.nan))
            assert found_in(folder)[0] == verdict


# Buckets


def test_every_chunk_of_a_bucket_is_judged_but_for_what_lies_between_parameters(tmp_path: Path) -> None:
    """All chunks of a bucket are judged, of any size, and NaN is ignored only between parameters."""
    path = copy_of("0.16, dp_reshardable", tmp_path)
    parts = [place for place in tensors(path) if "bucket_idx" in place.name]
    judged = [shard for shard in audit(path, workers=1).checkpoint.shards if not shard.has_rows]
    assert sum(shard.numel * len(shard.streams) for shard in judged) == sum(place.numel for place in parts)
    assert all((place.first[0] % 64 == 0) == (verdict_of(path, place) == UNKNOWN) for place in parts)
    gaps = [place for place in parts if place.first[0] % 64]
    assert {place.name.rpartition(".")[2] for place in gaps} == {"param", "exp_avg", "exp_avg_sq"}
    for byte in (b"\0", b"\1", b"\xff"):  # upstream saves uninitialized memory there
        for place in gaps:
            put(place, 4 * place.numel * byte)
        assert found_in(path) == (WHOLE, set())


def verdict_of(path: Path, place: Place) -> str:
    before = place.path.read_bytes()
    put(place, NAN, place.numel // 2)
    verdict, found = found_in(path)
    place.path.write_bytes(before)
    assert found <= {"odd_in_bucket"}
    return verdict


def test_a_chunk_that_no_rank_has_planned_is_missing(tmp_path: Path) -> None:
    """Neither index nor plans name it; its elements are in the tensor's shape."""
    path = copy_of("0.16, dp_reshardable", tmp_path)
    with changed_index(path) as index:
        name, tensor = next(named for named in index.state_dict_metadata.items() if "exp_avg" in named[0])
        lost = tensor.chunks.pop().offsets
        places = index.storage_data
        index.storage_data = {key: places[key] for key in places if (key.fqn, key.offset) != (name, lost)}
        index.all_local_plans = None
    assert (found_in(path), audit(path).findings[0].array) == ((DAMAGED, {"fragments"}), name)


def test_nan_in_a_small_bucket_is_not_called_whole(tmp_path: Path) -> None:
    """NaN in a rank's part of a bucket is UNKNOWN, even if all of that part could be padding."""
    path = copy_of("0.12, zarr, buckets", tmp_path)
    parts = [place for place in tensors(path) if "bucket_idx" in place.name]
    assert {place.numel for place in parts} == {1088}
    assert {verdict_of(path, place) for place in parts} == {UNKNOWN}


def test_what_lies_between_parameters_of_a_bucket_is_no_moment(tmp_path: Path) -> None:
    """A save before the first step has zeros, and there what memory had; a parameter begins at a multiple of 64."""
    path = copy_of("0.12, zarr, buckets", tmp_path)
    (settings,) = path.glob("*.optimizer/*.pt")
    change(settings, lambda own: [group.update(step=0) for group in own["param_groups"]])
    squares = [place for place in tensors(path) if place.name.rpartition("/")[0].endswith("exp_avg_sq")]
    for place in tensors(path):
        if "exp_avg" in place.name:
            put(place, bytes(place.nbytes))
    for first in (17, 1050):
        put(squares[0], torch.ones(30).numpy().tobytes(), first)
    assert found_in(path) == (WHOLE, set())
    put(squares[0], torch.ones(1).numpy().tobytes(), 64)
    assert found_in(path) == (DAMAGED, {"contradiction"})


def test_where_no_parameter_is_known_to_be_trained_infinity_is_not_detected(tmp_path: Path) -> None:
    """Buckets of Megatron do not name their parameters: an infinite weight is not told from a buffer."""
    path = copy_of("0.14, torch", tmp_path)
    weight = next(place for place in tensors(path) if place.dtype == "bfloat16" and place.name.endswith("weight"))
    put(weight, MASK.bfloat16()[0, 2:].view(torch.uint8).numpy().tobytes())
    assert found_in(path) == (WHOLE, set())


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


@pytest.mark.parametrize(
    ("optimizer", "expected"), [("whole", (UNKNOWN, {"not_read"})), ("distributed", (INCOMPLETE, {"incomplete_save"}))]
)
def test_a_checkpoint_in_torch_format_without_distrib_optim(
    optimizer: str, expected: tuple[str, set[str]], tmp_path: Path
) -> None:
    """Incomplete only if the run's arguments state a distributed optimizer."""
    case = plainer(SMALL["megatron"], [{"run": {"format": "torch", "optimizer": optimizer, "pp": 2}}])
    (tmp_path / "case.json").write_text(json.dumps(case))
    on = tree("megatron-core", newest("megatron-core"))
    run_json("explore_megatron", "train", tmp_path / "case.json", tmp_path / "run", tree=on)
    for file in tmp_path.glob("run/first/*/distrib_optim.pt"):
        file.unlink()
    assert found_in(tmp_path / "run" / "first") == expected
    assert list(saves(tmp_path / "run")) == [tmp_path / "run" / "first"]


# Flattened states without shapes


def compared(path: Path) -> set[str]:
    shards = audit(path, workers=1).checkpoint.shards
    return {shard.parameter for shard in shards if {"master", "weight"} <= shard.streams.keys()}


def test_flattened_states_are_compared_with_the_weights_where_the_index_has_no_shapes(tmp_path: Path) -> None:
    """As in megatron-core up to 0.8."""
    path = copy_of("0.14, torch_dist", tmp_path)
    before = compared(path)
    with changed_index(path) as index:
        assert len(index.mcore_data) > 10
        index.mcore_data = {}
    assert (compared(path), found_in(path)) == (before, (WHOLE, set()))
    place = next(place for place in tensors(path) if place.name.startswith("optimizer.state.fp32_param.module.down"))
    put(place, torch.full((place.numel,), 0.5).numpy().tobytes())
    assert found_in(path) == (DAMAGED, {"unrounded_master"})


# Masks in a universal checkpoint: the conversion keeps a buffer in two places


@pytest.fixture
def with_mask(tmp_path: Path) -> Path:
    folder = copied(trained("0.19.8", "stage1")["stage1"], tmp_path)

    def add(value: Any) -> None:
        value["module"]["mask"] = MASK
        value["buffer_names"] = [*value["buffer_names"], "mask"]

    change(folder / MODEL, add)
    convert(folder, tmp_path / "universal", Options(workers=1))
    assert (tmp_path / "universal/zero/mask/fp32.pt").exists()
    return tmp_path / "universal"


def test_a_mask_that_was_converted_is_judged_as_before(with_mask: Path) -> None:
    assert found_in(with_mask) == (WHOLE, set())
    torch.save({"param": torch.zeros(16)}, with_mask / "zero/mask/fp32.pt")  # one of its copies
    assert found_in(with_mask)[0] == DAMAGED


def test_a_trained_parameter_without_moments_that_is_infinite_is_damage(with_mask: Path) -> None:
    """Infinity in a weight and its main parameter is damage without moments too, as with SGD."""
    weight = with_mask / "zero/w1.weight"
    for file in weight.glob("exp_avg*.pt"):
        file.unlink()
    torch.save({"param": torch.full((9,), float("-inf"))}, weight / "fp32.pt")
    (model,) = with_mask.glob("mp_rank*.pt")
    change(model, lambda value: value["module"]["w1.weight"].fill_(float("-inf")))
    assert "not_finite" in found_in(with_mask)[1]


# Files of experts


@pytest.mark.parametrize("name", ["layer_0_expert_2_mp_rank_00_model_states.pt", MODEL])
def test_a_file_of_weights_is_read_to_its_end(tmp_path: Path, name: str) -> None:
    path = copied(experts(1), tmp_path)

    def poison(value: Any) -> None:
        next(iter(value.get("module", value).values())).view(-1)[0] = float("nan")

    change(path / name, poison)
    assert found_in(path)[0] == DAMAGED
    (path / name).write_bytes((path / name).read_bytes()[:-100])
    assert "bad_file" in found_in(path)[1]
