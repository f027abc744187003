"""`ckpt-patches fingerprint`: real checkpoints have the fingerprints of the run's state, in any layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_patches.cli import command_line
from ckpt_patches.convert.zero_fingerprints import read
from ckpt_patches.fingerprint import contents
from ckpt_patches.fingerprint.comparison import INCOMPLETE, MISSING, NOT_SAVED, of_two
from ckpt_patches.fingerprint.element_hash import MODULUS
from ckpt_patches.fingerprint.files import opened
from ckpt_patches.fingerprint.states import Fingerprint, of_blocks, state_named
from crafted_files import change, copied
from every_checkpoint import put, tensors
from test_fingerprint_mix import mix
from universal import ours, parallel
from upstream import newest
from zero_checkpoints import KEYS, convert, converted, trained

RELEASE = newest("deepspeed")
KINDS = ["stage1", "stage2", "stage3"]


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    """A checkpoint of eight ranks; most have parts of a parameter, and padding."""
    return trained(RELEASE, request.param)[request.param]


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy" / checkpoint.name))


def by_formula(tensor: torch.Tensor) -> int:
    """The fingerprint, element by element."""
    bits = tensor.detach().float().flatten().numpy().view(np.uint32).tolist()
    return sum(mix(index, value) for index, value in enumerate(bits)) % MODULUS


def test_a_zero_checkpoint_has_those_of_the_live_state(checkpoint: Path) -> None:
    """Fingerprints equal those of the live state, which DeepSpeed's own functions gathered at the save."""
    truth = torch.load(checkpoint.parent / "truth.pt")
    expected = {(name, state_named(key)): by_formula(states[key]) for name, states in truth.items() for key in KEYS}
    found = read(checkpoint)[0]
    assert {(one.parameter, one.state): one.value for one in found} == expected
    assert sum(one.numel for one in found) == 3 * 23


def test_a_universal_checkpoint_has_those_of_its_zero_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """Upstream's converter and ours keep fingerprints."""
    done = convert(tmp_path / "upstream", checkpoint, version=RELEASE, delivery="hook", by_upstream=True)
    assert done == {checkpoint.parent.name: ""}
    ours(checkpoint, tmp_path / "ours")
    expected = sorted(read(checkpoint)[0])
    for folder in (tmp_path / "upstream" / checkpoint.parent.name, tmp_path / "ours"):
        assert sorted(contents.of(opened(folder)).fingerprints) == expected


@pytest.mark.parametrize("case", ["megatron", "fused_uneven", "zero3_uneven"])
def test_of_tensor_parallel_ranks_they_are_those_of_the_whole_parameter(case: str, tmp_path: Path) -> None:
    source = parallel(case)[case]
    assert convert(tmp_path, source, version=RELEASE, delivery="hook", by_upstream=True) == {case: ""}
    found = sorted(read(source)[0])
    assert sorted(contents.of(opened(tmp_path / case)).fingerprints) == found
    if case == "megatron":  # the others contain classes that torch does not load by itself
        states = converted(tmp_path / case)
        expected = {(name, state_named(key)): by_formula(of[key]) for name, of in states.items() for key in KEYS}
        assert {(one.parameter, one.state): one.value for one in found} == expected


def test_rules_that_stage_3_does_not_need_may_name_any_parameter(tmp_path: Path) -> None:
    """With one tensor-parallel rank nothing is merged by them: upstream converts such a checkpoint, too."""
    source = copied(trained(RELEASE, "stage3")["stage3"], tmp_path)
    rules = {"universal_checkpoint_version": 0.2, "tp_replicated_parameter_patterns": [".*norm.*"]}
    for file in source.glob("*model_states.pt"):
        change(file, lambda model: model.update(universal_checkpoint_info=rules))
    ours(source, tmp_path / "universal")
    assert command_line.main(["compare", str(source), str(tmp_path / "universal")]) == 0


def test_frozen_parameters_of_stage_3_are_compared_in_their_parts(tmp_path: Path) -> None:
    """In the model's files, of which a universal checkpoint has copies; the padding of parts is not."""
    source = copied(trained(RELEASE, "stage3_frozen")["stage3_frozen"], tmp_path)
    ours(source, tmp_path / "universal")
    expected = sorted(read(source)[0])
    frozen = {one.parameter for one in expected if one.state == "frozen"}
    assert frozen == {"ln.weight", "ln.bias"}
    assert sorted(contents.of(opened(tmp_path / "universal")).fingerprints) == expected
    for folder in (source, tmp_path / "universal"):
        change(folder / "zero_pp_rank_1_mp_rank_00_model_states.pt", negate_frozen)
    assert sorted(read(source)[0]) == sorted(contents.of(opened(tmp_path / "universal")).fingerprints) != expected
    assert command_line.main(["compare", str(source), str(trained(RELEASE, "stage3_frozen")["stage3_frozen"])]) == 1


def negate_frozen(model: Any) -> None:
    model["frozen_param_fragments"]["ln.weight"].neg_()


def test_of_frozen_parameters_of_tensor_parallel_ranks_only_the_first_part_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = parallel("megatron_fp16")["megatron_fp16"]
    other = copied(source, tmp_path)
    change(other / "mp_rank_01_model_states.pt", lambda model: model["module"]["frozen.weight"].zero_())
    assert "frozen.weight master" in read(source)[1]
    assert command_line.main(["compare", str(source), str(other)]) == 0
    assert "frozen.weight master  not verified: only the first" in capsys.readouterr().out
    assert "the first tensor-parallel rank's part was written" in ours(source, tmp_path / "universal").stderr


def test_one_changed_bit_is_told_with_its_state(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = copy.parent / "other"
    shutil.copytree(copy, other)
    place = max(tensors(other), key=lambda place: (place.name.endswith("exp_avg"), place.numel))
    with open(place.path, "rb") as file:
        file.seek(place.offset)
        first = file.read(1)
    put(place, bytes([first[0] ^ 1]))
    assert command_line.main(["compare", str(copy), str(copy)]) == 0
    states = len(read(copy)[0])
    assert capsys.readouterr().out == f"{copy} and {copy}: verified: {states} states\n"
    assert command_line.main(["compare", str(copy), str(copy), "--workers", "2"]) == 0
    assert capsys.readouterr().out == f"{copy} and {copy}: verified: {states} states\n"
    assert command_line.main(["fingerprint", str(copy), "--against", str(other)]) == 1
    assert command_line.main(["compare", str(copy), str(other)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"{copy} and {other}: differs: 1 other values; {states - 1} states verified"
    assert said[0].endswith("  exp_avg  differs: other values")


def test_for_programs(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["fingerprint", "--json", str(checkpoint)]) == 0
    rows = json.loads(capsys.readouterr().out)["fingerprints"]
    assert [Fingerprint(**{**row, "value": int(row["value"], 16)}) for row in rows] == read(checkpoint)[0]


def test_what_is_in_one_alone_and_what_has_another_size_is_told() -> None:
    one = [Fingerprint("a", "fp32", 3, 7), Fingerprint("b", "fp32", 3, 7), Fingerprint("c", "fp32", 3, 7)]
    other = [Fingerprint("b", "fp32", 4, 7), Fingerprint("c", "fp32", 3, 7), Fingerprint("d", "exp_avg", 3, 7)]
    found = of_two(one, other, {"e codes": "of 8 bits"}, {})
    assert sorted(found.differences) == [
        ("a", "fp32", MISSING, "the second one has no such parameter"),
        ("b", "fp32", INCOMPLETE, "4 elements here, of 3"),
        ("d", "exp_avg", NOT_SAVED, "the first one does not have it"),
        ("e codes", "", MISSING, "in the first one alone"),
    ]
    assert found.verified == [("c", "fp32")]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("chained_0.layer.weight", "layer.weight"),
        ("moe.deepspeed_experts.3.weight", "moe.deepspeed_experts.global_3.weight"),
    ],
)
def test_releases_have_other_names_for_one_parameter(one: str, other: str) -> None:
    same = [Fingerprint(name, "exp_avg", 3, 7) for name in (one, other)]
    assert of_two(same[:1], same[1:], {}, {}).is_equal
    assert not of_two(same[:1], [same[1]._replace(value=8)], {}, {}).is_equal


def test_what_neither_side_can_read_is_not_verified() -> None:
    one = [Fingerprint("a", "fp32", 3, 7)]
    found = of_two(one, one, {"a exp_avg": "of 8 bits"}, {"a exp_avg": "of 8 bits"})
    assert (found.is_equal, found.not_verified) == (True, {"a exp_avg": "of 8 bits"})
    assert not of_two([], [], {"a exp_avg": "of 8 bits"}, {"a exp_avg": "of 8 bits"}).is_equal
    model = [Fingerprint("b", "model", 3, 7)]
    assert of_two([*one, *model], one, {}, {"b": "not in order"}).is_equal
    assert of_two(one, [*one, Fingerprint("a", "exp_avg", 3, 7)], {"a exp_avg": "of 8 bits"}, {}).is_equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elements_of_sixteen_bits_count_as_the_numbers_that_they_are(dtype: torch.dtype) -> None:
    values = torch.randn(70_000).to(dtype)
    data = memoryview(values.view(torch.uint8).numpy())
    name = str(dtype).removeprefix("torch.")
    whole = of_blocks([data], name)
    assert of_blocks([data[:4096], data[4096:]], name) == whole
    assert of_blocks([memoryview(values.float().view(torch.uint8).numpy())], "float32") == whole
    assert of_blocks([data[:400]], name) == by_formula(values[: 400 // values.element_size()])
