"""Past errors of the audit: damage that it did not find, and healthy states that it called damaged."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, UNKNOWN, WHOLE, audit
from ckpt_patches.audit.run_folder import saves
from every_checkpoint import EVERY, Place, put, tensors
from explore.spaces import plainer
from explore.test_explore import SMALL
from test_audit import names
from test_audit_coverage import MODEL, change
from test_audit_fp8 import found_in, masters, saved
from upstream import newest, run_json, tree

NAN = torch.tensor([float("nan")]).numpy().tobytes()
STEP_3 = "0.16, fully_reshardable"


def copy_of(kind: str, to: Path) -> Path:
    return Path(shutil.copytree(EVERY[kind].path, to / "checkpoint"))


# Buckets in torch_dist


def test_every_chunk_of_a_bucket_is_judged_but_for_what_lies_between_parameters(tmp_path: Path) -> None:
    """All chunks of a bucket are judged, of any size, and NaN is ignored only between parameters."""
    path = copy_of("0.16, dp_reshardable", tmp_path)
    parts = [place for place in tensors(path) if "bucket_idx" in place.name]
    judged = [shard for shard in audit(path, workers=1).checkpoint.shards if not shard.has_rows]
    assert sum(shard.numel * len(shard.streams) for shard in judged) == sum(place.numel for place in parts)
    told = {place.first[0]: verdict_of(path, place) for place in parts}
    assert {begin % 64 == 0: verdict for begin, verdict in told.items()} == {True: UNKNOWN, False: WHOLE}
    assert all((begin % 64 == 0) == (verdict == UNKNOWN) for begin, verdict in told.items())


def verdict_of(path: Path, place: Place) -> str:
    before = place.path.read_bytes()
    put(place, NAN, place.numel // 2)
    found = audit(path, workers=1)
    place.path.write_bytes(before)
    assert names(found) <= {"odd_in_bucket"}
    return found.verdict


@pytest.mark.parametrize("byte", [b"\0", b"\1", b"\xff"], ids=["zeros", "denormal", "NaN"])
def test_what_lies_between_parameters_can_hold_anything(byte: bytes, tmp_path: Path) -> None:
    """Any bytes between parameters are no finding: upstream saves uninitialized memory there."""
    path = copy_of("0.16, dp_reshardable", tmp_path)
    gaps = [place for place in tensors(path) if "bucket_idx" in place.name and place.first[0] % 64]
    assert {place.name.rpartition(".")[2] for place in gaps} == {"param", "exp_avg", "exp_avg_sq"}
    for place in gaps:
        put(place, 4 * place.numel * byte)
    assert found_in(path) == (WHOLE, set())


def test_nan_in_a_small_bucket_is_not_called_whole(tmp_path: Path) -> None:
    """NaN in a rank's part of a bucket is UNKNOWN, even if all of that part could be padding."""
    path = copy_of("0.12, zarr, buckets", tmp_path)
    parts = [place for place in tensors(path) if "bucket_idx" in place.name]
    assert {place.numel for place in parts} == {1088}
    for place in parts:
        assert verdict_of(path, place) == UNKNOWN


# Shards of main parameters and weights


def without_the_shapes(path: Path) -> None:
    """Remove the shapes from the index, as in megatron-core up to 0.8."""
    release = tree("megatron-core", "0.14.0")
    assert run_json("strip_shapes", path / ".metadata", tree=release) > 10


def test_flattened_states_are_held_against_the_weights_where_the_index_has_no_shapes(tmp_path: Path) -> None:
    path = copy_of("0.14, torch_dist", tmp_path)
    before = compared(path)
    without_the_shapes(path)
    assert (compared(path), found_in(path)) == (before, (WHOLE, set()))
    place = next(place for place in tensors(path) if place.name.startswith("optimizer.state.fp32_param.module.down"))
    put(place, torch.full((place.numel,), 0.5).numpy().tobytes())
    assert found_in(path) == (DAMAGED, {"unrounded_master"})


def compared(path: Path) -> set[str]:
    shards = audit(path, workers=1).checkpoint.shards
    return {shard.parameter for shard in shards if {"master", "weight"} <= shard.streams.keys()}


def test_masters_that_are_cut_otherwise_than_their_weights_are_named(tmp_path: Path) -> None:
    assert found_in(saved(tmp_path / "one", masters().bfloat16(), masters().T.contiguous())) == (
        UNKNOWN,
        {"not_judged"},
    )


def test_a_weight_in_other_chunks_than_its_master_is_compared_with_it(tmp_path: Path) -> None:
    path = copy_of("0.14, zarr", tmp_path)
    folder = path / "module.norm.bias"
    metadata, data = json.loads((folder / ".zarray").read_text()), (folder / "0").read_bytes()
    (folder / ".zarray").write_text(json.dumps({**metadata, "chunks": [6]}))
    for number in range(2):
        (folder / str(number)).write_bytes(data[12 * number : 12 * (number + 1)])
    assert "module.norm.bias" in compared(path)
    assert found_in(path) == (WHOLE, set())
    (folder / "1").write_bytes(torch.full((6,), 0.5, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes())
    assert found_in(path)[0] == DAMAGED


# State that is not sharded


def test_what_torch_dist_keeps_beside_its_shards_is_judged(tmp_path: Path) -> None:
    """NaN is damage; values have infinity before they are first computed."""
    path = saved(tmp_path / "checkpoint", masters().bfloat16(), masters())
    change(path / "common.pt", lambda value: value["optimizer"].update(grad_scaler=torch.tensor([float("inf")])))
    assert found_in(path) == (WHOLE, set())
    change(path / "common.pt", lambda value: value["optimizer"].update(grad_scaler=torch.tensor([float("nan")])))
    assert found_in(path) == (DAMAGED, {"not_finite"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_step_that_is_no_number_is_damage_and_no_defect_of_the_audit(value: float, tmp_path: Path) -> None:
    path = copy_of("stage 2", tmp_path)
    for place in tensors(path):
        if place.name.endswith(".step"):
            put(place, torch.tensor(value).numpy().tobytes())
    report = audit(path, workers=1)
    assert "unreadable" not in names(report)
    assert report.verdict == DAMAGED


# Damaged metadata


@pytest.mark.parametrize("kind", ["0.14, zarr", STEP_3])
@pytest.mark.parametrize(
    ("config", "verdict", "expected"),
    [
        ("", DAMAGED, {"bad_metadata"}),
        ("{}", DAMAGED, {"bad_metadata"}),
        ('{"sharded_backend": "new"}', UNKNOWN, {"not_read"}),
    ],
    ids=["empty", "without the format", "another format"],
)
def test_a_checkpoint_is_known_by_its_files_where_its_metadata_do_not_say_it(
    kind: str, config: str, verdict: str, expected: set[str], tmp_path: Path
) -> None:
    """A checkpoint is found in its parent folder even if metadata.json has no known format."""
    path = copy_of(kind, tmp_path)
    (path / "metadata.json").write_text(config)
    assert list(saves(tmp_path)) == [path]
    assert found_in(path) == (verdict, expected)


def test_an_index_of_another_program_is_no_checkpoint_of_megatron(tmp_path: Path) -> None:
    path = saved(tmp_path / "checkpoint", masters().bfloat16(), masters())
    (path / "metadata.json").unlink()
    (path / "common.pt").unlink()
    assert found_in(path) == (UNKNOWN, {"not_read"})


@pytest.mark.parametrize(
    ("optimizer", "expected"), [("whole", (UNKNOWN, {"not_read"})), ("distributed", (INCOMPLETE, {"incomplete_save"}))]
)
def test_a_checkpoint_in_torch_format_without_distrib_optim(
    optimizer: str, expected: tuple[str, set[str]], tmp_path: Path
) -> None:
    """A checkpoint without distrib_optim.pt is incomplete only if the run's arguments state a distributed optimizer."""
    case = plainer(SMALL["megatron"], [{"run": {"format": "torch", "optimizer": optimizer, "pp": 2}}])
    (tmp_path / "case.json").write_text(json.dumps(case))
    on = tree("megatron-core", newest("megatron-core"))
    run_json("explore_megatron", "train", tmp_path / "case.json", tmp_path / "run", tree=on)
    for file in tmp_path.glob("run/first/*/distrib_optim.pt"):
        file.unlink()
    assert found_in(tmp_path / "run" / "first") == expected
    assert list(saves(tmp_path / "run")) == [tmp_path / "run" / "first"]


def test_the_shape_of_an_array_without_end_is_damage(tmp_path: Path) -> None:
    path = copy_of("0.14, zarr", tmp_path)
    metadata = path / "module.norm.bias" / ".zarray"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "shape": [10**15]}))
    assert found_in(path) == (DAMAGED, {"bad_metadata"})


# ZeRO and universal checkpoints of tensor- and pipeline-parallel models


PARALLEL = [
    "pipeline and tensor parallel",
    "sub-parameters, uneven",
    "tensor parallel, frozen weights",
]


@pytest.mark.parametrize("kind", PARALLEL)
def test_a_universal_checkpoint_has_what_all_ranks_have_together(kind: str) -> None:
    assert found_in(EVERY[f"universal of {kind}"].path) == (WHOLE, set())


@pytest.mark.parametrize("kind", PARALLEL)
def test_an_element_too_many_or_a_missing_moment_is_told_there_as_well(kind: str, tmp_path: Path) -> None:
    path = copy_of(f"universal of {kind}", tmp_path)
    file = next(path.glob("zero/*/exp_avg.pt"))
    whole = file.read_bytes()
    change(file, lambda value: value.update(param=torch.ones(value["param"].numel() + 1)))
    assert found_in(path) == (DAMAGED, {"element_count"})
    file.write_bytes(whole)
    file.unlink()
    assert found_in(path) == (DAMAGED, {"missing_array"})


def test_a_buffer_of_integers_is_no_weight_of_a_master(tmp_path: Path) -> None:
    """An integer buffer is not a main parameter's weight, though the converter writes its fp32 file too."""
    path = copy_of("universal of stage 2", tmp_path)
    (path / "zero" / "positions").mkdir()
    torch.save({"param": torch.arange(64).float()}, path / "zero" / "positions" / "fp32.pt")
    change(path / MODEL, lambda value: value["module"].update(positions=torch.arange(64)))
    assert found_in(path) == (WHOLE, set())


def test_what_a_universal_checkpoint_holds_beside_its_parameters_is_judged(tmp_path: Path) -> None:
    """NaN in another file is damage, such as the step of a stage-3 group."""
    path = copy_of("universal of stage 2", tmp_path)
    torch.save(
        {"optimizer_state_dict": {"state": {0: {"step": torch.tensor(float("nan"))}}}}, path / "zero" / "other.pt"
    )
    assert found_in(path) == (DAMAGED, {"not_finite"})


def test_a_universal_file_without_a_tensor_is_named(tmp_path: Path) -> None:
    path = copy_of("universal of stage 2", tmp_path)
    torch.save({"other": 1}, path / "zero" / "w1.weight" / "fp32.pt")
    assert "not_judged" in names(audit(path, workers=1))
