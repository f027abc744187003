"""For each kind in the audit's complete list of damages: a crafted checkpoint with it, and an undamaged twin.

The real megatron-core and DeepSpeed wrote the twins.
"""

import ast
import functools
import importlib
import inspect
import json
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, UNKNOWN, WHOLE, Report, audit
from ckpt_patches.audit.judging import coverage
from ckpt_patches.audit.judging.record_checksums import update_checksum
from ckpt_patches.audit.rules import written_by
from ckpt_patches.audit.run_folder import saves
from ckpt_patches.cli import main
from ckpt_patches.formats import damages, torch_file
from ckpt_patches.formats.checkpoint import Checkpoint, Extent, Shard
from crafted_files import with_other_name
from megatron_checkpoints import ZARR, Configuration, written
from upstream import newest, run, tree
from zero_checkpoints import convert, dp768, session_folder, trained

TORCH_DIST = Configuration(ranks=2, backend="torch_dist", iterations="0,3")
TORCH = Configuration(ranks=2, backend="torch", iterations="1,3")
WRITER = "0.16.2"
UP, EMBEDDING = "module.up.weight", "module.embedding.weight"


@pytest.fixture
def zarr(tmp_path: Path) -> Path:
    """A copy of a WHOLE checkpoint, at step 3."""
    return copied(written(ZARR).whole[-1], tmp_path)


@pytest.fixture
def zero(tmp_path: Path) -> Path:
    """A copy of a ZeRO-2 checkpoint of 8 ranks."""
    return copied(trained(WRITER, "stage2", "stage3")["stage2"], tmp_path)


@functools.cache
def converted() -> Path:
    """Universal checkpoints of stage 2, which is WHOLE, and of stage 3, which upstream converts wrongly."""
    trainings, out = trained(WRITER, "stage2", "stage3"), Path(tempfile.mkdtemp(dir=session_folder()))
    version = "0.19.2"  # the newest whose converter writes padding of ZeRO 3 as data
    assert not any(convert(out, trainings["stage2"], version=version, delivery="hook").values())
    assert not any(convert(out, trainings["stage3"], version=version, delivery="none").values())
    return out


def copied(path: Path, to: Path) -> Path:
    return Path(shutil.copytree(path, to / path.name))


def names(report: Report, *, notes: bool = False) -> set[str]:
    return {finding.kind.name for finding in report.findings if notes or finding.kind.severity != damages.NOTE}


def check_that_a_nan_is_found(path: Path, shard: Shard, extent: Extent) -> None:
    """Check that the audit finds NaN in the first element of an extent, and restore the file."""
    whole = Path(extent.path).read_bytes()
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset)
        file.write(b"\0\0\xc0\x7f")
    report = audit(path)
    assert report.verdict == DAMAGED
    assert (shard.parameter, shard.label) in {(f.array.rpartition(".")[0], f.shard) for f in report.findings}
    Path(extent.path).write_bytes(whole)


def chunk(checkpoint: Path, array: str, label: str = "0.0") -> np.memmap:  # type: ignore[type-arg,unused-ignore]
    return np.memmap(checkpoint / array / label, np.float32, "r+")


def state(key: str, parameter: str = UP) -> str:
    return f"optimizer.state.{key}.{parameter}"


# Changes of a zarr checkpoint, and their findings


def lose_master(path: Path) -> None:
    chunk(path, state("fp32_param"))[100:200] = 0


def lose_first_moment(path: Path) -> None:
    chunk(path, state("exp_avg"))[:100] = 0


def lose_square(path: Path) -> None:
    chunk(path, state("exp_avg_sq"))[300:] = 0


def lose_both_moments(path: Path) -> None:
    for key in ("exp_avg", "exp_avg_sq"):
        chunk(path, state(key))[100:333] = 0


def lose_all_moments(path: Path) -> None:
    for file in path.glob("optimizer.state.exp_avg*/[0-9]*"):
        file.write_bytes(bytes(file.stat().st_size))


def lose_moments_of_one_parameter(path: Path) -> None:
    for file in path.glob(f"optimizer.state.exp_avg*.{UP}/[0-9]*"):
        file.write_bytes(bytes(file.stat().st_size))


def reload_without_the_masters(path: Path) -> None:
    chunk(path, state("fp32_param"))[:] = np.random.default_rng(0).normal(size=576)


def flip_one_bit_of_a_master(path: Path) -> None:
    chunk(path, state("fp32_param")).view(np.uint32)[77] ^= np.uint32(1 << 20)


def lose_weight(path: Path) -> None:
    chunk(path, UP)[:8] = 0


def put_nan(path: Path) -> None:
    chunk(path, state("exp_avg"))[5] = np.nan


def put_infinity(path: Path) -> None:
    chunk(path, state("exp_avg_sq"))[5] = np.inf


def negate_a_square(path: Path) -> None:
    chunk(path, state("exp_avg_sq"))[5] *= -1


def remove_chunk(path: Path) -> None:
    (path / state("exp_avg") / "0.0").unlink()


def shorten_chunk(path: Path) -> None:
    file = path / state("exp_avg") / "0.0"
    file.write_bytes(file.read_bytes()[:-4])


def lengthen_chunk(path: Path) -> None:
    file = path / state("exp_avg") / "0.0"
    file.write_bytes(file.read_bytes() + bytes(4))


def add_chunk(path: Path) -> None:
    (path / UP / "7.0").write_bytes(b"1234")


def remove_array(path: Path) -> None:
    shutil.rmtree(path / state("exp_avg_sq"))


def remove_weights(path: Path) -> None:
    shutil.rmtree(path / UP)


def remove_moments(path: Path) -> None:
    shutil.rmtree(path / state("exp_avg_sq"))
    shutil.rmtree(path / state("exp_avg"))


def remove_zarray(path: Path) -> None:
    (path / UP / ".zarray").unlink()


def break_zarray(path: Path) -> None:
    (path / UP / ".zarray").write_text("{")


def break_common(path: Path) -> None:
    (path / "common.pt").write_bytes((path / "common.pt").read_bytes()[:-100])


def remove_common(path: Path) -> None:
    (path / "common.pt").unlink()


Change = Callable[[Path], None]
Damage = tuple[Change, set[str], str]  # the change, its findings, and the verdict
IN_ZARR: list[Damage] = [
    (lose_master, {"lost_master"}, DAMAGED),
    (lose_first_moment, {"lost_moment"}, DAMAGED),
    (lose_square, {"lost_moment"}, DAMAGED),
    (lose_both_moments, {"lost_moment"}, DAMAGED),
    (lose_all_moments, {"no_moments"}, DAMAGED),
    (reload_without_the_masters, {"unrounded_master"}, DAMAGED),
    (flip_one_bit_of_a_master, {"unrounded_master"}, DAMAGED),
    (lose_weight, {"lost_weight"}, DAMAGED),
    (put_nan, {"not_finite"}, DAMAGED),
    (put_infinity, {"not_finite"}, DAMAGED),
    (negate_a_square, {"negative_square"}, DAMAGED),
    (remove_chunk, {"missing_chunk"}, DAMAGED),
    (shorten_chunk, {"short_chunk"}, DAMAGED),
    (lengthen_chunk, {"long_chunk"}, DAMAGED),
    (add_chunk, {"stray_file"}, UNKNOWN),
    (remove_array, {"missing_array"}, DAMAGED),
    (remove_weights, {"missing_array"}, DAMAGED),
    (remove_moments, {"missing_moments"}, UNKNOWN),
    (remove_zarray, {"bad_metadata"}, DAMAGED),
    (break_zarray, {"bad_metadata"}, DAMAGED),
    (break_common, {"bad_metadata"}, DAMAGED),
    (remove_common, {"bad_metadata"}, DAMAGED),
]


def test_notes_on_what_is_no_damage(zarr: Path) -> None:
    assert names(audit(zarr), notes=True) == {"no_gradient", "no_optimizer_state", "lock_directory"}


# torch_dist


def test_whole_torch_dist() -> None:
    for path in written(TORCH_DIST).whole:
        report = audit(path)
        assert (report.verdict, report.checkpoint.format) == (WHOLE, "megatron torch_dist")
        assert report.checkpoint.nbytes > 5000


def flip_in_file(file: Path, at: int = -1) -> None:
    """Flip a bit of the byte at an offset."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def tensor_at(path: Path) -> tuple[Path, int]:
    """A file with a main parameter, and the offset of its elements."""
    shard = next(s for s in audit(path).checkpoint.shards if "master" in s.streams and s.numel > 50)
    extent = shard.streams["master"].extents[0]
    return Path(extent.path), extent.offset


def flip_an_element(path: Path) -> None:
    flip_in_file(*tensor_at(path))


def remove_a_file(path: Path) -> None:
    tensor_at(path)[0].unlink()


def truncate_a_file(path: Path) -> None:
    file = tensor_at(path)[0]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def break_index(path: Path) -> None:
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:100])


def put_code_into_the_index(path: Path) -> None:
    class Code:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return Path.touch, (path / "was_run",)  # type: ignore[return-value]

    (path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Code()}))


IN_TORCH_DIST: list[Damage] = [
    (flip_an_element, {"bad_file"}, DAMAGED),
    (remove_a_file, {"bad_file"}, DAMAGED),
    (truncate_a_file, {"bad_file"}, DAMAGED),
    (break_index, {"bad_metadata"}, DAMAGED),
    (put_code_into_the_index, {"bad_metadata"}, DAMAGED),
    (break_common, {"bad_metadata"}, DAMAGED),
]


# ZeRO


@functools.cache
def stage3_groups() -> Path:
    """A checkpoint of two param groups, with and without weight decay, each split by `sub_group_size`."""
    return trained(newest("deepspeed"), "stage3_groups")["stage3_groups"]


def test_every_group_and_sub_group_of_stage_3_is_judged() -> None:
    report = audit(stage3_groups())
    file = torch_file.read(rank_file(stage3_groups()), trust=True).value["optimizer_state_dict"]
    assert len(file["fp32_flat_groups"]) > 2
    assert (report.verdict, names(report, notes=True)) == (WHOLE, set())
    arrays = {stream.array for shard in report.checkpoint.shards for stream in shard.streams.values()}
    parameters = torch.load(stage3_groups().parent / "truth.pt")
    assert {f"{name}.{state}" for name in parameters for state in ("fp32", "exp_avg", "exp_avg_sq")} <= arrays


def test_damage_in_any_group_of_stage_3_is_found(tmp_path: Path) -> None:
    """NaN in any moment of any group is found, on the first rank, which has elements of every parameter."""
    path = copied(stage3_groups(), tmp_path)
    file = torch_file.read(rank_file(path, 0), trust=True).value["optimizer_state_dict"]
    moments = [
        entry[key] for entry in file["optimizer_state_dict"]["state"].values() for key in ("exp_avg", "exp_avg_sq")
    ]
    found = []
    for tensor in moments:
        whole = rank_file(path, 0).read_bytes()
        with open(rank_file(path, 0), "r+b") as changed:
            changed.seek(tensor.offset)
            changed.write(np.full(tensor.numel, np.nan, np.float32).tobytes())
        found.append("not_finite" in names(audit(path)))
        rank_file(path, 0).write_bytes(whole)
    assert len(moments) > 4
    assert found == [True] * len(moments)


def rank_file(path: Path, rank: int = 3) -> Path:
    (file,) = path.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return file


def remove_rank(path: Path) -> None:
    rank_file(path).unlink()


def truncate_rank(path: Path) -> None:
    file = rank_file(path)
    file.write_bytes(file.read_bytes()[:-500])


def flip_in_rank(path: Path) -> None:
    flip_in_rank_file(rank_file(path))


def flip_in_rank_file(path: Path) -> None:
    """Flip a bit of the largest tensor's first element."""
    largest = max(torch_file.read(path, trust=True).storages, key=lambda stored: stored.nbytes)
    flip_in_file(path, largest.offset)


IN_ZERO: list[Damage] = [
    (remove_rank, {"missing_rank", "fragments"}, DAMAGED),
    (truncate_rank, {"bad_file", "fragments"}, DAMAGED),
    (flip_in_rank, {"bad_file"}, DAMAGED),
]


@functools.cache
def damaged_zero() -> Path:
    """A folder with copies whose tensors or files were changed, rather than single bytes."""
    out = Path(tempfile.mkdtemp(dir=session_folder()))
    run("damaged_zero", trained(WRITER, "stage2", "stage3")["stage2"], out, tree=tree("deepspeed", WRITER))
    return out


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("take_rank_of_more", {"mixed_ranks", "contradiction"}),
        ("take_rank_of_earlier_step", {"mixed_steps"}),
        ("overlap_fragments", {"fragments"}),
        ("lose_fragment", {"fragments"}),
        ("lose_partition", {"lost_master"}),
    ],
)
def test_damage_in_zero(damage: str, expected: set[str]) -> None:
    report = audit(damaged_zero() / damage)
    assert (report.verdict, names(report)) == (DAMAGED, expected)


def test_a_lost_partition_names_its_rank() -> None:
    lost = [found for found in audit(damaged_zero() / "lose_partition").findings if found.kind.name == "lost_master"]
    assert {finding.detail for finding in lost} == {"written by rank 0"}


def test_the_padding_of_the_report_is_a_note() -> None:
    report = audit(dp768()["dp768"])
    assert (report.verdict, report.checkpoint.data_parallel) == (WHOLE, 768)
    notes = {finding.detail for finding in report.findings if finding.kind.name == "large_padding"}
    assert notes == {"group 0: padding 1532, partition 2", "group 1: padding 1024, partition 348"}


# Universal


def remove_a_moment(path: Path) -> None:
    (path / "zero" / "w1.weight" / "exp_avg.pt").unlink()


def remove_a_parameter(path: Path) -> None:
    shutil.rmtree(path / "zero" / "w1.weight")


def interrupt_the_conversion(path: Path) -> None:
    (path / "tmp").mkdir()


IN_UNIVERSAL: list[Damage] = [
    (remove_a_moment, {"missing_array"}, DAMAGED),
    (remove_a_parameter, {"interrupted"}, INCOMPLETE),
    (interrupt_the_conversion, {"interrupted"}, INCOMPLETE),
]


def test_a_conversion_with_the_zero3_bug() -> None:
    report = audit(converted() / "stage3")
    # The extra elements are padding, which is not initialized.
    assert (report.verdict, names(report) - {"not_finite"}) == (DAMAGED, {"element_count"})
    details = {f.array: f.detail for f in report.findings if f.kind.name == "element_count"}
    assert details["w1.weight/fp32.pt"] == "14 elements, 9 in the model's shape (3, 3)"


# Megatron's `torch` format


def test_whole_torch_format() -> None:
    for path in written(TORCH).whole:
        report = audit(path)
        assert (report.verdict, names(report), report.checkpoint.format) == (WHOLE, set(), "megatron torch")
        assert {shard.numel for shard in report.checkpoint.shards if "master" in shard.streams}


def flip_in_the_buckets(path: Path) -> None:
    flip_in_rank_file(path / "mp_rank_00" / "distrib_optim.pt")


def remove_the_buckets(path: Path) -> None:
    """Remove the buckets of one of two tensor-parallel ranks."""
    shutil.copytree(path / "mp_rank_00", path / "mp_rank_01")
    (path / "mp_rank_01" / "distrib_optim.pt").unlink()


def lose_a_slice_of_the_bucket(path: Path) -> None:
    change_the_bucket(path, "exp_avg", 4, bytes(4 * 1500))


def change_the_bucket(path: Path, key: str, at: int, data: bytes) -> None:
    shard = next(s for s in audit(path).checkpoint.shards if "master" in s.streams)
    extent = shard.streams[key].extents[0]
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset + at)
        file.write(data)
    update_checksum(next(r for r in audit(path).checkpoint.records if r.offset == extent.offset))


def put_nan_where_padding_may_be(path: Path) -> None:
    change_the_bucket(path, "exp_avg_sq", 400, np.float32(np.nan).tobytes())


IN_TORCH: list[Damage] = [
    (flip_in_the_buckets, {"bad_file"}, DAMAGED),
    (remove_the_buckets, {"bad_file", "unusual"}, DAMAGED),
    (lose_a_slice_of_the_bucket, {"lost_moment"}, DAMAGED),
    (put_nan_where_padding_may_be, {"odd_in_bucket"}, UNKNOWN),
]


def test_a_checkpoint_that_is_written_anew_under_its_path_is_read_anew(zarr: Path) -> None:
    """An audit in the same process finds the damage of a new checkpoint under the same path; no file stays open."""
    assert audit(zarr).verdict == WHOLE
    lose_master(copied(zarr, zarr.parent / "other"))
    shutil.rmtree(zarr)
    (zarr.parent / "other" / zarr.name).rename(zarr)
    assert audit(zarr).verdict == DAMAGED
    descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    open_files = [os.readlink(link) for link in descriptors if os.path.islink(link)]
    assert [path for path in open_files if str(zarr) in path] == []


# Unsupported files are not damage


def save_as_before_1_6(path: Path) -> None:
    """Save in the format before torch 1.6, which DeepSpeed's fast writer uses."""
    value = torch.load(path, weights_only=False)
    torch.save(value, path, _use_new_zipfile_serialization=False)


def keep_the_step_in_the_old_format(path: Path) -> None:
    save_as_before_1_6(path / "common.pt")


def compress_the_chunks(path: Path) -> None:
    metadata = path / UP / ".zarray"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "compressor": {"id": "zlib", "level": 1}}))


def name_a_new_type(path: Path) -> None:
    metadata = path / UP / ".zarray"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "dtype": "float6_e3m2"}))


NOT_READ = [keep_the_step_in_the_old_format, compress_the_chunks, name_a_new_type]
IN_ZARR += [(change, {"not_read"}, UNKNOWN) for change in NOT_READ]


# All formats


WHOLE_ONES: dict[str, Callable[[], Path]] = {
    "zarr": lambda: written(ZARR).whole[-1],
    "torch_dist": lambda: written(TORCH_DIST).whole[-1],
    "torch": lambda: written(TORCH).whole[-1],
    "zero": lambda: trained(WRITER, "stage2", "stage3")["stage2"],
    "universal": lambda: converted() / "stage2",
}
OF_FORMATS = {
    "zarr": IN_ZARR,
    "torch_dist": IN_TORCH_DIST,
    "torch": IN_TORCH,
    "zero": IN_ZERO,
    "universal": IN_UNIVERSAL,
}
DAMAGES = [(name, *damage) for name, all_of_it in OF_FORMATS.items() for damage in all_of_it]


@pytest.mark.parametrize(("kind", "change", "expected", "verdict"), DAMAGES, ids=lambda v: getattr(v, "__name__", None))
def test_damage_is_found_and_the_undamaged_twin_is_whole(
    kind: str, change: Change, expected: set[str], verdict: str, tmp_path: Path
) -> None:
    path = copied(WHOLE_ONES[kind](), tmp_path)
    assert (audit(path).verdict, names(audit(path))) == (WHOLE, set())
    change(path)
    report = audit(path)
    assert (report.verdict, names(report)) == (verdict, expected)
    assert not (path / "was_run").exists()


def with_buffer(path: Path, buffer: torch.Tensor) -> Path:
    """Add a buffer to the model file of a ZeRO checkpoint."""
    file = path / "mp_rank_00_model_states.pt"
    value = torch.load(file, weights_only=False)
    value["module"]["buffer"] = buffer
    torch.save(value, file)
    return file


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e8m0fnu, torch.complex32])
def test_a_buffer_of_any_type_that_torch_can_save_is_no_damage(zero: Path, dtype: torch.dtype) -> None:
    with_buffer(zero, torch.ones(64, dtype=torch.uint8).view(dtype))
    assert (audit(zero).verdict, names(audit(zero))) == (WHOLE, set())


def test_a_buffer_of_a_type_that_came_later_is_not_read(zero: Path) -> None:
    file = with_buffer(zero, torch.ones(64, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    with_other_name(file, b"float8_e8m0fnu", b"float9_e9m0fnu")
    report = audit(zero)
    assert (report.verdict, [f.array for f in report.findings if f.kind is damages.NOT_READ]) == (
        UNKNOWN,
        ["module.buffer"],
    )


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_buffer_of_codes_is_named(zero: Path) -> None:
    with_buffer(zero, torch.quantize_per_tensor(torch.arange(7.0), 0.5, 1, torch.quint4x2))
    report = audit(zero)
    (detail,) = [f.detail for f in report.findings if f.kind is damages.NOT_JUDGED]
    assert (report.verdict, "_rebuild_qtensor" in detail) == (UNKNOWN, True)


# A checkpoint is the unit of failure


def put_a_folder_in_place_of_a_chunk(path: Path) -> None:
    (path / UP / "0.0").unlink()
    (path / UP / "0.0").mkdir()
    (path / UP / "0.0" / "x").write_bytes(bytes(10_000))


def defect(path: Path) -> None:
    raise KeyError("ours")


def test_one_that_cannot_be_read_is_a_finding_and_the_others_are_judged(
    zarr: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Path(shutil.copytree(zarr, zarr.parent / "a_bad_one"))
    put_a_folder_in_place_of_a_chunk(bad)
    assert main(["audit", "--json-lines", str(zarr.parent)]) in (1, 3)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(Path(line["path"]).name, line["verdict"] == WHOLE) for line in lines] == [
        (zarr.name, True),
        ("a_bad_one", False),
    ]


def test_a_defect_of_the_audit_is_a_finding_with_its_place(zarr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_patches.formats.zarr.read_array", defect)
    (finding,) = (f for f in audit(zarr).findings if f.kind is damages.UNREADABLE)
    assert (audit(zarr).verdict, names(audit(zarr))) == (UNKNOWN, {"unreadable"})
    assert finding.detail.startswith("a defect of the audit, please report it: KeyError: 'ours' (test_audit.py, line ")


def test_one_that_vanishes_is_unreadable(zarr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint whose files are removed during the audit is unreadable, and UNKNOWN."""

    others = coverage.others

    def gone(found: Checkpoint) -> list[Shard]:
        shutil.rmtree(zarr)
        return others(found)

    monkeypatch.setattr(coverage, "others", gone)
    report = audit(zarr)
    assert (report.verdict, names(report)) == (UNKNOWN, {"unreadable"})
    assert all(str(zarr) in f.array for f in report.findings if f.kind is damages.UNREADABLE)


# The command


def test_every_kind_is_crafted_somewhere() -> None:
    """For every kind of finding, a test expects it; a name in a comment or a helper does not count."""
    others = (
        "test_audit_repair",
        "test_audit_many",
        "test_fully_reshardable_restore",
        "test_audit_model_files",
        "test_audit_absent",
        "test_audit_dcp",
        "test_audit_dcp_states",
        "test_audit_healthy",
        "test_audit_fp8",
        "test_audit_mixed_rows",
        "test_audit_run_folder",
        "test_fingerprint_recorded",
    )
    modules = [sys.modules[__name__], *map(importlib.import_module, others)]
    tests = [test for module in modules for name, test in vars(module).items() if name.startswith("test_")]
    assert sorted(damages.KINDS.keys() - {name for test in tests for name in expected_by(test)}) == []


def expected_by(test: Callable[..., None]) -> set[object]:
    """The members of the sets in a test's parameters and code, and the constants that it compares with."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    given = [value for mark in marks for values in mark.args[1] if isinstance(values, tuple) for value in values]
    nodes = list(ast.walk(ast.parse(inspect.getsource(test))))
    members = [member for node in nodes if isinstance(node, ast.Set) for member in node.elts]
    compared = [side for node in nodes if isinstance(node, ast.Compare) for side in (node.left, *node.comparators)]
    constants = {node.value for node in (*members, *compared) if isinstance(node, ast.Constant)}
    return constants.union(*(value for value in given if isinstance(value, set)))


def test_exit_status_and_json(zarr: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--json", str(zarr)]) == 0
    lose_master(zarr)
    assert main(["audit", "--json", str(zarr.parent)]) == 1
    (found,) = json.loads(capsys.readouterr().out.split("\n}\n")[1] + "\n}")["checkpoints"]
    damage = next(finding for finding in found["findings"] if finding["severity"] == "damage")
    assert damage == {
        "name": "lost_master",
        "severity": "damage",
        "array": state("fp32_param"),
        "shard": "0.0",
        "range": [100, 200],
        "detail": "",
        "remedy": "repair takes the model's own weights, which are rounded",
    }


def test_iterations_are_found_and_each_told(zarr: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(ZARR).whole[0].parent
    assert len(list(saves(run))) == 13
    assert main(["audit", str(run)]) == 1
    out = capsys.readouterr().out
    assert out.count(": WHOLE (megatron zarr") >= 3
    assert "race_0000: DAMAGED" in out


@pytest.mark.parametrize("path", ["", "nowhere"])
def test_no_checkpoint_is_a_mistake_of_usage(tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path / path)]) == 2
    assert "found no" in capsys.readouterr().err


def test_moments_of_a_parameter_that_may_be_unused_are_a_note(zarr: Path) -> None:
    lose_moments_of_one_parameter(zarr)
    report = audit(zarr)
    assert (report.verdict, names(report, notes=True) & {"parameter_without_moments"}) == (
        WHOLE,
        {"parameter_without_moments"},
    )


def test_a_moment_that_is_zero_in_many_places_is_of_few_bits(zarr: Path) -> None:
    """Zeros in more places than data-parallel ranks lose slices, as in a second moment of 8 bits."""
    squares = chunk(zarr, state("exp_avg_sq"))
    for begin in range(5, 500, 33):
        squares[begin : begin + 6] = 0
    report = audit(zarr)
    assert (report.verdict, names(report, notes=True) & {"sparse_moment"}) == (WHOLE, {"sparse_moment"})


def test_a_suspicion_has_its_exit_status(zarr: Path) -> None:
    keep_the_step_in_the_old_format(zarr)
    assert main(["audit", str(zarr)]) == 3


@pytest.mark.parametrize(
    ("numel", "begin", "end", "expected"),
    [
        (576, 288, 576, "of data-parallel rank 1 of 2"),
        (576, 0, 288, "of data-parallel rank 0 of 2"),
        (576, 0, 576, ""),
        (577, 0, 288, ""),
    ],
)
def test_a_slice_is_named_by_the_number_of_its_rank(numel: int, begin: int, end: int, expected: str) -> None:
    assert written_by(Shard(parameter="x", label="", shape=(numel,), streams={}), begin, end, 2) == expected


def test_slices_of_several_ranks_are_named_by_their_numbers() -> None:
    shard = Shard(parameter="x", label="", shape=(400,), streams={})
    assert written_by(shard, 100, 300, 4) == "of data-parallel ranks 1 to 2 of 4"
