"""Tables of damage: crafted changes of real checkpoints, by format, with the verdict and the findings.

The real megatron-core and DeepSpeed wrote the undamaged twins, which are WHOLE.
"""

import functools
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, UNKNOWN, WHOLE, audit
from ckpt_patches.audit.judging.record_checksums import update_checksum
from ckpt_patches.audit.run_folder import saves
from ckpt_patches.cli import main
from ckpt_patches.formats import damages, torch_file
from ckpt_patches.formats.reading import reader_of
from crafted_files import Change, both, change, copied, found_in, names, with_other_name, with_other_value, without
from every_checkpoint import TORCH, TORCH_DIST, in_torch_file, tensors
from every_checkpoint import put as put_bytes
from megatron_checkpoints import ZARR, written
from upstream import newest
from zero_checkpoints import convert, dp768, session_folder, trained

WRITER = "0.16.2"
UP = "module.up.weight"
MODEL = "mp_rank_00_model_states.pt"
NAN = torch.full((40, 3), float("nan"))


@pytest.fixture
def zarr(tmp_path: Path) -> Path:
    """A copy of a WHOLE checkpoint, at step 3."""
    return copied(written(ZARR).whole[-1], tmp_path)


@pytest.fixture
def zero(tmp_path: Path) -> Path:
    """A copy of a ZeRO-2 checkpoint of 8 ranks."""
    return copied(zero2(), tmp_path)


def zero2() -> Path:
    return trained(WRITER, "stage2", "stage3")["stage2"]


@functools.cache
def converted() -> Path:
    """Universal checkpoints of stage 2, which is WHOLE, and of stage 3, which upstream converts wrongly."""
    trainings, out = trained(WRITER, "stage2", "stage3"), Path(tempfile.mkdtemp(dir=session_folder()))
    version = "0.19.2"  # the newest whose converter writes padding of ZeRO 3 as data
    assert not any(convert(out, trainings["stage2"], version=version, delivery="hook").values())
    assert not any(convert(out, trainings["stage3"], version=version, delivery="none").values())
    return out


# Megatron's zarr


def chunk(checkpoint: Path, array: str, label: str = "0.0") -> np.memmap:  # type: ignore[type-arg,unused-ignore]
    return np.memmap(checkpoint / array / label, np.float32, "r+")


def state(key: str, parameter: str = UP) -> str:
    return f"optimizer.state.{key}.{parameter}"


def put(key: str, begin: int, end: int, value: Any) -> Change:
    """Set elements of one state."""

    def make(path: Path) -> None:
        chunk(path, state(key))[begin:end] = value

    return make


lose_master = put("fp32_param", 100, 200, 0)
lose_first_moment = put("exp_avg", 0, 100, 0)
lose_square = put("exp_avg_sq", 300, 576, 0)
lose_both_moments = both(put("exp_avg", 100, 333, 0), put("exp_avg_sq", 100, 333, 0))
put_nan = put("exp_avg", 5, 6, np.nan)


def zero_files(pattern: str) -> Change:
    return lambda path: [file.write_bytes(bytes(file.stat().st_size)) for file in path.glob(pattern)]


def flip_one_bit_of_a_master(path: Path) -> None:
    chunk(path, state("fp32_param")).view(np.uint32)[77] ^= np.uint32(1 << 20)


def put_many_zeros(path: Path) -> None:
    """Zeros in more places than data-parallel ranks lose slices, as in a second moment of 8 bits."""
    for begin in range(5, 500, 33):
        put("exp_avg_sq", begin, begin + 6, 0)(path)


def rewrite(name: str, make: Callable[[bytes], bytes]) -> Change:
    return lambda path: (path / name).write_bytes(make((path / name).read_bytes()))


def described(array: str, **fields: Any) -> Change:
    """Change the metadata of a zarr array."""
    return rewrite(f"{array}/.zarray", lambda text: json.dumps({**json.loads(text), **fields}).encode())


def of_old_torch(name: str) -> Change:
    """Save in the format before torch 1.6, which DeepSpeed's fast writer uses."""

    def make(path: Path) -> None:
        value = torch.load(path / name, weights_only=False)
        torch.save(value, path / name, _use_new_zipfile_serialization=False)

    return make


def put_a_folder_in_place_of_a_chunk(path: Path) -> None:
    (path / UP / "0.0").unlink()
    (path / UP / "0.0").mkdir()
    (path / UP / "0.0" / "x").write_bytes(bytes(10_000))


def chunk_otherwise(path: Path) -> None:
    """A weight in other chunks than its main parameter."""
    folder = path / "module.norm.bias"
    data = (folder / "0").read_bytes()
    described(folder.name, chunks=[6])(path)
    for number in range(2):
        (folder / str(number)).write_bytes(data[12 * number : 12 * (number + 1)])


HALVES = torch.full((6,), 0.5, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()
FIRST, SQUARE, CONFIG = f"{state('exp_avg')}/0.0", state("exp_avg_sq"), "metadata.json"
Damage = tuple[Change, str, set[str]]  # the change, the verdict, and the findings


def behind_broken_links(path: Path) -> None:
    for folder in path.glob(f"*{UP}"):
        shutil.rmtree(folder)
        folder.symlink_to(path / "not mounted")


IN_ZARR: dict[str, Damage] = {
    "lost main parameters": (lose_master, DAMAGED, {"lost_master"}),
    "lost first moments": (lose_first_moment, DAMAGED, {"lost_moment"}),
    "lost squares": (lose_square, DAMAGED, {"lost_moment"}),
    "lost in both moments": (lose_both_moments, DAMAGED, {"lost_moment"}),
    "all moments": (zero_files("optimizer.state.exp_avg*/[0-9]*"), DAMAGED, {"no_moments"}),
    "moments of a parameter that may be unused": (zero_files(f"optimizer.state.exp_avg*.{UP}/[0-9]*"), WHOLE, set()),
    "squares of few bits": (put_many_zeros, WHOLE, set()),
    "a bias that is zero yet": (
        both(zero_files("module.up.bias/[0-9]*"), zero_files(f"{state('fp32_param', 'module.up.bias')}/[0-9]*")),
        WHOLE,
        set(),
    ),
    "other main parameters": (
        put("fp32_param", 0, 576, np.random.default_rng(0).normal(size=576)),
        DAMAGED,
        {"unrounded_master"},
    ),
    "a bit of a main parameter": (flip_one_bit_of_a_master, DAMAGED, {"unrounded_master"}),
    "a lost weight": (rewrite(f"{UP}/0.0", lambda data: bytes(32) + data[32:]), DAMAGED, {"lost_weight"}),
    "NaN": (put_nan, DAMAGED, {"not_finite"}),
    "infinity": (put("exp_avg_sq", 5, 6, np.inf), DAMAGED, {"not_finite"}),
    "a negative square": (put("exp_avg_sq", 5, 6, -1), DAMAGED, {"negative_square"}),
    "a weight and its states behind broken links": (behind_broken_links, DAMAGED, {"bad_file"}),
    "no chunk": (without(FIRST), DAMAGED, {"missing_chunk"}),
    "a short chunk": (rewrite(FIRST, lambda data: data[:-4]), DAMAGED, {"short_chunk"}),
    "a long chunk": (rewrite(FIRST, lambda data: data + bytes(4)), DAMAGED, {"long_chunk"}),
    "a chunk too many": (lambda path: (path / UP / "7.0").write_bytes(b"1234"), UNKNOWN, {"stray_file"}),
    "a folder in place of a chunk": (put_a_folder_in_place_of_a_chunk, DAMAGED, {"long_chunk", "unreadable"}),
    "no squares": (without(SQUARE), DAMAGED, {"missing_array"}),
    "no weight": (without(UP), DAMAGED, {"missing_array"}),
    "no moments": (without(SQUARE, state("exp_avg")), UNKNOWN, {"missing_moments"}),
    "an array without metadata": (without(f"{UP}/.zarray"), DAMAGED, {"bad_metadata"}),
    "an array with other metadata": (rewrite(f"{UP}/.zarray", lambda _: b"{"), DAMAGED, {"bad_metadata"}),
    "an array without end": (described("module.norm.bias", shape=[10**15]), DAMAGED, {"bad_metadata"}),
    "squares of no elements": (
        described(state("exp_avg_sq", "module.norm.bias"), shape=[0]),
        UNKNOWN,
        {"not_judged", "stray_file"},
    ),
    "compressed": (described(UP, compressor={"id": "zlib", "level": 1}), UNKNOWN, {"not_read"}),
    "a new type": (described(UP, dtype="float6_e3m2"), UNKNOWN, {"not_read"}),
    "common.pt cut": (rewrite("common.pt", lambda data: data[:-100]), DAMAGED, {"bad_metadata"}),
    "no common.pt": (without("common.pt"), DAMAGED, {"bad_metadata"}),
    "common.pt of old torch": (of_old_torch("common.pt"), UNKNOWN, {"not_read"}),
    "an empty metadata.json": (rewrite(CONFIG, lambda _: b""), DAMAGED, {"bad_metadata"}),
    "metadata.json without a format": (rewrite(CONFIG, lambda _: b"{}"), DAMAGED, {"bad_metadata"}),
    "a new format": (rewrite(CONFIG, lambda _: b'{"sharded_backend": "new"}'), UNKNOWN, {"not_read"}),
    "a weight in other chunks": (chunk_otherwise, WHOLE, set()),
    "a wrong weight in other chunks": (
        both(chunk_otherwise, lambda path: (path / "module.norm.bias/1").write_bytes(HALVES)),
        DAMAGED,
        {"unrounded_master"},
    ),
}


def test_notes_on_what_is_no_damage(zarr: Path) -> None:
    assert names(audit(zarr), notes=True) == {"no_gradient", "no_optimizer_state", "lock_directory"}
    zero_files(f"optimizer.state.exp_avg*.{UP}/[0-9]*")(zarr)
    put_many_zeros(copied(written(ZARR).whole[-1], zarr.parent / "sparse"))
    assert "parameter_without_moments" in names(audit(zarr), notes=True)
    assert "sparse_moment" in names(audit(zarr.parent / "sparse" / zarr.name), notes=True)


# torch_dist


def flip_in_file(file: Path, at: int = -1) -> None:
    """Flip a bit of the byte at an offset."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def of_master(make: Callable[[Path, int], object]) -> Change:
    """Change the file that has a main parameter, with the offset of its elements."""

    def apply(path: Path) -> None:
        shard = next(s for s in audit(path).checkpoint.shards if "master" in s.streams and s.numel > 50)
        extent = shard.streams["master"].extents[0]
        make(Path(extent.path), extent.offset)

    return apply


def put_code_into_the_index(path: Path) -> None:
    class Code:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return Path.touch, (path / "was_run",)  # type: ignore[return-value]

    (path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Code()}))


IN_TORCH_DIST: dict[str, Damage] = {
    "an element flipped": (of_master(flip_in_file), DAMAGED, {"bad_file"}),
    "no file": (of_master(lambda file, _: file.unlink()), DAMAGED, {"bad_file"}),
    "a file cut": (of_master(lambda file, at: os.truncate(file, at)), DAMAGED, {"bad_file"}),
    "an index cut": (rewrite(".metadata", lambda data: data[:100]), DAMAGED, {"bad_metadata"}),
    "an index with code": (put_code_into_the_index, DAMAGED, {"bad_metadata"}),
    **{name: IN_ZARR[name] for name in ("common.pt cut", "an empty metadata.json", "a new format")},
}


# ZeRO


def rank_file(path: Path, rank: int = 3) -> Path:
    (file,) = path.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return file


def flip_in_the_largest(path: Path) -> None:
    """Flip a bit of the largest tensor's first element."""
    flip_in_file(path, max(torch_file.read(path, trust=True).storages, key=lambda stored: stored.nbytes).offset)


def in_model(make: Callable[[Any], object]) -> Change:
    return lambda path: change(path / MODEL, make)


def buffer(value: torch.Tensor) -> Change:
    return in_model(lambda held: held["module"].update(buffer=value))


def of_bits(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(64, dtype=torch.uint8).view(dtype)


def of_steps(value: float) -> Change:
    """Set the step in every rank's file."""

    def make(path: Path) -> None:
        for place in tensors(path):
            if place.name.endswith(".step"):
                put_bytes(place, np.float32(value).tobytes())

    return make


MASK, BASE, INF = torch.full((4, 4), float("-inf")).triu(1), torch.ones(100), float("inf")


def in_rank(make: Callable[[Any], object]) -> Change:
    """Change what the first rank's file says."""
    return lambda path: with_other_value(rank_file(path, 0), lambda value: make(value["optimizer_state_dict"]))


def earlier(value: Any) -> None:
    for entry in value["base_optimizer_state"]["state"].values():
        entry["step"] = 1.0


def overlap(value: Any) -> None:
    for mapping in value["param_slice_mappings"]:
        for address in mapping.values():
            address.fields["numel"] += 1


def lose_a_partition(path: Path) -> None:
    place = next(p for p in in_torch_file(rank_file(path, 0)) if "single_partition_of_fp32_groups" in p.name)
    put_bytes(place, bytes(place.nbytes))


def twice_the_ranks(value: Any) -> None:
    value["partition_count"] = [2 * count for count in value["partition_count"]]


IN_ZERO: dict[str, Damage] = {
    "a rank of more": (in_rank(twice_the_ranks), DAMAGED, {"mixed_ranks", "contradiction"}),
    "a rank of an earlier step": (in_rank(earlier), DAMAGED, {"mixed_steps"}),
    "overlapping fragments": (in_rank(overlap), DAMAGED, {"fragments"}),
    "a lost fragment": (in_rank(lambda value: value["param_slice_mappings"][0].clear()), DAMAGED, {"fragments"}),
    "a lost partition": (lose_a_partition, DAMAGED, {"lost_master"}),
    "no file of a rank": (lambda path: rank_file(path).unlink(), DAMAGED, {"missing_rank", "fragments"}),
    "a rank's file cut": (lambda path: os.truncate(rank_file(path), 5000), DAMAGED, {"bad_file", "fragments"}),
    "a bit of a rank": (lambda path: flip_in_the_largest(rank_file(path)), DAMAGED, {"bad_file"}),
    # Tensors without states
    "a buffer": (buffer(NAN), DAMAGED, {"not_finite"}),
    "a transposed buffer": (buffer(NAN.t()), DAMAGED, {"not_finite"}),
    "NaN in a list": (in_model(lambda value: value["module"].update(a={"b": [1, (NAN,)]})), DAMAGED, {"not_finite"}),
    "NaN in a state": (
        in_model(lambda value: value.update(optimizer={"state": {0: {"momentum": NAN}}})),
        DAMAGED,
        {"not_finite"},
    ),
    "a mask": (buffer(MASK.bfloat16()), WHOLE, set()),
    "positive infinity": (buffer(-MASK), WHOLE, set()),
    "a best loss before the first one": (buffer(torch.tensor(INF)), WHOLE, set()),
    "NaN in a mask": (buffer(torch.where(MASK == 0, torch.nan, MASK)), DAMAGED, {"not_finite"}),
    "a trained weight without elements": (
        in_model(lambda value: value["module"].update({"w1.weight": torch.empty(0)})),
        DAMAGED,
        {"missing_weight"},
    ),
    "infinity in a trained weight": (
        in_model(lambda value: value["module"]["w1.weight"].view(-1)[:1].fill_(INF)),
        DAMAGED,
        {"not_finite"},
    ),
    "a number that fp32 does not have": (buffer(torch.full((64,), 1e300, dtype=torch.float64)), WHOLE, set()),
    **{
        f"elements of {dtype}": (buffer(of_bits(dtype)), WHOLE, set())
        for dtype in (torch.uint16, torch.uint64, torch.float8_e8m0fnu, torch.complex32)
    },
    "a type that came later": (
        both(
            buffer(of_bits(torch.float8_e8m0fnu)),
            lambda path: with_other_name(path / MODEL, b"float8_e8m0fnu", b"float9_e9m0fnu"),
        ),
        UNKNOWN,
        {"not_read"},
    ),
    "views of a storage": (
        in_model(lambda value: value["module"].update(tied=[BASE, BASE[:50], BASE.t()], empty=torch.ones(0, 3))),
        WHOLE,
        set(),
    ),
    "elements that do not lie in order": (
        in_model(lambda value: value["module"].update(part=BASE[:10], strided=BASE[20::2])),
        UNKNOWN,
        {"not_judged"},
    ),
    # Steps
    "steps of NaN": (of_steps(float("nan")), DAMAGED, {"contradiction", "not_finite"}),
    **{f"steps of {value}": (of_steps(value), DAMAGED, {"contradiction"}) for value in (INF, 1e30)},
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_buffer_of_codes_is_named(zero: Path) -> None:
    buffer(torch.quantize_per_tensor(torch.arange(7.0), 0.5, 1, torch.quint4x2))(zero)
    report = audit(zero)
    (detail,) = [f.detail for f in report.findings if f.kind is damages.NOT_JUDGED]
    assert (report.verdict, "_rebuild_qtensor" in detail) == (UNKNOWN, True)


def test_damage_in_any_group_and_sub_group_of_stage_3_is_found(tmp_path: Path) -> None:
    """Two param groups, each split by `sub_group_size`; the first rank has elements of every parameter."""
    source = trained(newest("deepspeed"), "stage3_groups")["stage3_groups"]
    path = copied(source, tmp_path)
    assert (audit(path).verdict, names(audit(path), notes=True)) == (WHOLE, set())
    arrays = {stream.array for shard in audit(path).checkpoint.shards for stream in shard.streams.values()}
    parameters = torch.load(source.parent / "truth.pt")
    assert {f"{name}.{state}" for name in parameters for state in ("fp32", "exp_avg", "exp_avg_sq")} <= arrays
    file = torch_file.read(rank_file(path, 0), trust=True).value["optimizer_state_dict"]
    assert len(file["fp32_flat_groups"]) > 2
    held = file["optimizer_state_dict"]["state"].values()
    for tensor in (moments := [entry[key] for entry in held for key in ("exp_avg", "exp_avg_sq")]):
        whole = rank_file(path, 0).read_bytes()
        with open(rank_file(path, 0), "r+b") as changed:
            changed.seek(tensor.offset)
            changed.write(np.full(tensor.numel, np.nan, np.float32).tobytes())
        assert "not_finite" in names(audit(path))
        rank_file(path, 0).write_bytes(whole)
    assert len(moments) > 4


def test_the_padding_of_the_report_is_a_note() -> None:
    report = audit(dp768()["dp768"])
    assert (report.verdict, report.checkpoint.data_parallel) == (WHOLE, 768)
    notes = {finding.detail for finding in report.findings if finding.kind.name == "large_padding"}
    assert notes == {"group 0: padding 1532, partition 2", "group 1: padding 1024, partition 348"}


# Universal


def of_a_buffer_of_integers(path: Path) -> None:
    """The converter writes its fp32 file too."""
    (path / "zero" / "positions").mkdir()
    torch.save({"param": torch.arange(64).float()}, path / "zero/positions/fp32.pt")
    in_model(lambda value: value["module"].update(positions=torch.arange(64)))(path)


def save(name: str, value: Any) -> Change:
    return lambda path: torch.save(value, path / "zero" / name)


W1, STEP_OF_NAN = "w1.weight", {"optimizer_state_dict": {"state": {0: {"step": torch.tensor(float("nan"))}}}}
IN_UNIVERSAL: dict[str, Damage] = {
    "no moment": (without(f"zero/{W1}/exp_avg.pt"), DAMAGED, {"missing_array"}),
    "no parameter": (without(f"zero/{W1}"), INCOMPLETE, {"interrupted"}),
    "a conversion that did not end": (lambda path: (path / "tmp").mkdir(), INCOMPLETE, {"interrupted"}),
    "an element too many": (
        lambda path: change(path / f"zero/{W1}/exp_avg.pt", lambda value: value.update(param=torch.ones(10))),
        DAMAGED,
        {"element_count"},
    ),
    "a file without a tensor": (save(f"{W1}/fp32.pt", {"other": 1}), UNKNOWN, {"not_judged"}),
    "NaN in another file": (save("other.pt", STEP_OF_NAN), DAMAGED, {"not_finite"}),
    "a buffer of integers": (of_a_buffer_of_integers, WHOLE, set()),
}


def test_a_conversion_with_the_zero3_bug() -> None:
    report = audit(converted() / "stage3")
    # The extra elements are padding, which is not initialized.
    assert (report.verdict, names(report) - {"not_finite"}) == (DAMAGED, {"element_count"})
    details = {f.array: f.detail for f in report.findings if f.kind.name == "element_count"}
    assert details["w1.weight/fp32.pt"] == "14 elements, 9 in the model's shape (3, 3)"


# Megatron's `torch` format


def without_buckets_of_a_rank(path: Path) -> None:
    """Remove the buckets of one of two tensor-parallel ranks."""
    shutil.copytree(path / "mp_rank_00", path / "mp_rank_01")
    (path / "mp_rank_01" / "distrib_optim.pt").unlink()


def in_bucket(key: str, at: int, data: bytes) -> Change:
    def make(path: Path) -> None:
        shard = next(s for s in audit(path).checkpoint.shards if "master" in s.streams)
        extent = shard.streams[key].extents[0]
        with open(extent.path, "r+b") as file:
            file.seek(extent.offset + at)
            file.write(data)
        update_checksum(next(r for r in audit(path).checkpoint.records if r.offset == extent.offset))

    return make


IN_TORCH: dict[str, Damage] = {
    "a bit": (lambda path: flip_in_the_largest(path / "mp_rank_00" / "distrib_optim.pt"), DAMAGED, {"bad_file"}),
    "no buckets of a rank": (without_buckets_of_a_rank, DAMAGED, {"bad_file", "unusual"}),
    "a slice of a bucket": (in_bucket("exp_avg", 4, bytes(6000)), DAMAGED, {"lost_moment"}),
    "NaN that may be padding": (
        in_bucket("exp_avg_sq", 400, np.float32(np.nan).tobytes()),
        UNKNOWN,
        {"odd_in_bucket"},
    ),
}


# All formats


WHOLE_ONES: dict[str, tuple[Callable[[], Path], str, dict[str, Damage]]] = {
    "zarr": (lambda: written(ZARR).whole[-1], "megatron zarr", IN_ZARR),
    "torch_dist": (lambda: written(TORCH_DIST).whole[-1], "megatron torch_dist", IN_TORCH_DIST),
    "torch": (lambda: written(TORCH).whole[-1], "megatron torch", IN_TORCH),
    "zero": (zero2, "deepspeed zero", IN_ZERO),
    "universal": (lambda: converted() / "stage2", "deepspeed universal", IN_UNIVERSAL),
}
DAMAGES = [(name, damage) for name, (_, _, table) in WHOLE_ONES.items() for damage in table]


@pytest.mark.parametrize(("kind", "damage"), DAMAGES)
def test_damage_is_found(kind: str, damage: str, tmp_path: Path) -> None:
    source, _, table = WHOLE_ONES[kind]
    make, verdict, expected = table[damage]
    path = copied(source(), tmp_path)
    make(path)
    assert found_in(path) == (verdict, expected)
    assert list(saves(tmp_path)) == [path]
    assert not (path / "was_run").exists()
    lost = {found.detail for found in audit(path).findings if found.kind is damages.LOST_MASTER}
    assert lost <= ({"written by rank 0"} if kind == "zero" else {""})


@pytest.mark.parametrize("kind", WHOLE_ONES)
def test_the_undamaged_twin_is_whole(kind: str) -> None:
    source, name, _ = WHOLE_ONES[kind]
    report = audit(source())
    assert (report.verdict, names(report), report.checkpoint.format) == (WHOLE, set(), name)
    assert report.checkpoint.nbytes > 300


def test_every_kind_of_finding_is_expected_by_a_test() -> None:
    rooms = (Path(__file__).parent, Path(__file__).parents[1] / "fixes")
    text = "".join(file.read_text() for room in rooms for file in room.glob("test_*.py"))
    assert [name for name in damages.KINDS if f'"{name}"' not in text] == []


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


# The command


def test_one_that_cannot_be_read_is_a_finding_and_the_others_are_judged(
    zarr: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_a_folder_in_place_of_a_chunk(Path(shutil.copytree(zarr, zarr.parent / "a_bad_one")))
    assert main(["audit", "--json-lines", str(zarr.parent)]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {Path(line["path"]).name: line["verdict"] for line in lines}
    assert found == {zarr.name: WHOLE, "a_bad_one": DAMAGED}


def test_a_defect_of_the_audit_is_a_finding_with_its_place(zarr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("ckpt_patches.audit.audit.reader_of", lambda path: defect)
    report = audit(zarr)
    (finding,) = report.findings
    assert (report.verdict, names(report)) == (UNKNOWN, {"unreadable"})
    assert finding.detail.startswith("a defect of the audit, please report it: KeyError: 'ours' (test_audit.py, line ")


def test_one_that_vanishes_is_unreadable(zarr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = reader_of(zarr)
    assert read is not None

    def gone(path: Path) -> Any:
        found = read(path)
        shutil.rmtree(zarr)
        return found

    monkeypatch.setattr("ckpt_patches.audit.audit.reader_of", lambda path: gone)
    report = audit(zarr)
    assert (report.verdict, names(report)) == (UNKNOWN, {"unreadable"})
    assert all(str(zarr) in f.array for f in report.findings if f.kind is damages.UNREADABLE)


def test_exit_status_and_json(zarr: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--json", str(zarr)]) == 0
    lose_master(zarr)
    capsys.readouterr()
    assert main(["audit", "--json", str(zarr.parent)]) == 1
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
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


@pytest.mark.parametrize("path", ["", "nowhere"])
def test_no_checkpoint_is_a_mistake_of_usage(tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path / path)]) == 2
    assert "found no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("begin", "end", "detail"),
    [(288, 576, "of data-parallel rank 1 of 2"), (0, 288, "of data-parallel rank 0 of 2"), (0, 280, "")],
)
def test_a_slice_is_named_by_the_number_of_its_rank(begin: int, end: int, detail: str, zarr: Path) -> None:
    put("exp_avg", begin, end, 0)(zarr)
    (found,) = (finding for finding in audit(zarr).findings if finding.kind is damages.LOST_MOMENT)
    assert (found.begin, found.end, found.detail) == (begin, end, detail)
