"""An incomplete or invalid checkpoint is one clear line, before a byte is written."""

import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ckpt_patches.cli import command_line
from ckpt_patches.convert.conversion_plan import Output
from ckpt_patches.convert.convert import Options, convert
from ckpt_patches.convert.write import Writer
from ckpt_patches.errors import UserError
from ckpt_patches.formats import torch_file
from ckpt_patches.formats.torch_file import TensorHeader
from universal import changed, check_refused, ours, parallel

RANK_1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_01_model_states.pt"
INFO = "universal_checkpoint_info"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a checkpoint of 3 data-parallel and 2 tensor-parallel ranks."""
    return shutil.copytree(parallel("fused")["fused"], tmp_path / "in" / "global_step7")


@dataclass
class Fragment:
    """A stub of DeepSpeed's class, to load, change and save its files without DeepSpeed."""

    numel: int
    start: int


@pytest.fixture(autouse=True)
def _classes_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    Fragment.__module__, Fragment.__qualname__ = "deepspeed.utils.tensor_fragment", "fragment_address"
    for name in ("deepspeed", "deepspeed.utils", Fragment.__module__):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[Fragment.__module__], "fragment_address", Fragment, raising=False)


def optimizer(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: changed(folder / RANK_1, lambda state: change(state["optimizer_state_dict"]))


def model(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: changed(folder / MODEL, change)


def moved(state: dict[str, Any]) -> None:
    """Move the start of a partition's second fragment into the first, by one element."""
    fragments = next(m for m in state["param_slice_mappings"] if len(m) > 1)
    second = list(fragments.values())[1]
    second.start, second.numel = second.start - 1, second.numel + 1


def state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the states of one rank's first group."""
    return optimizer(lambda own: change(own["base_optimizer_state"]["state"][0]))


def states(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the states of every rank's groups."""

    def damage(folder: Path) -> None:
        for path in folder.glob("*_optim_states.pt"):
            changed(
                path, lambda own: [*map(change, own["optimizer_state_dict"]["base_optimizer_state"]["state"].values())]
            )

    return damage


def codes(own: dict[str, Any]) -> None:
    """Add codes and scales, as 8-bit optimizers save them."""
    own["state1"], own["absmax1"] = own["exp_avg"].to(torch.uint8), torch.ones(2)


def nested(own: dict[str, Any]) -> None:
    """Move the moments into a dict, as bitsandbytes saves them."""
    own["__bnb_optimizer_quant_state__"] = {"state1": own.pop("exp_avg"), "state2": own.pop("exp_avg_sq")}


def leaving(folder: Path) -> None:
    """Rename a parameter, whose name is that of a folder, to a path out of the output."""

    def change(state: dict[str, Any]) -> None:
        mappings = state.get("optimizer_state_dict", {}).get("param_slice_mappings", [])
        for names in (*mappings, *state.get("param_shapes", []), state.get("module", {})):
            if "norm.weight" in names:
                names["../../home"] = names.pop("norm.weight")

    for path in folder.glob("*_states.pt"):
        changed(path, change)


def without_shapes(folder: Path) -> None:
    for path in folder.glob("mp_rank_*"):
        changed(path, lambda state: state.update(param_shapes=None))


def truncated(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def flipped(folder: Path) -> None:
    data = bytearray((folder / RANK_1).read_bytes())
    data[200] ^= 4  # in the pickle, which has a checksum
    (folder / RANK_1).write_bytes(data)


def copied(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / old, folder / new)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing rank": (
        lambda f: os.remove(f / RANK_1),
        "missing_rank: rank 1 of 3",
    ),
    "a missing model file": (
        lambda f: os.remove(f / MODEL),
        "missing_rank: model-parallel rank 1 of 2: the file of its model states",
    ),
    "a truncated rank": (truncated(RANK_1), f"{RANK_1} is truncated: it has no directory of records at its end"),
    "a corrupt rank": (
        flipped,
        f"{RANK_1} is corrupt: the checksum of its record {RANK_1.removesuffix('.pt')}/data.pkl is wrong",
    ),
    "a file of text": (lambda f: (f / RANK_1).write_text("hello"), "is no file of torch.save"),
    "two degrees": (
        optimizer(lambda s: s.update(partition_count=[5, 5])),
        f"mixed_ranks: {RANK_1}: of 5 ranks, expected 3",
    ),
    "no tensor-parallel rank": (
        lambda f: changed(
            f / MODEL.replace("01", "00"), lambda s: s.update(checkpoint_parallel_dimensions={"tp_degree": False})
        ),
        "expected a number of ranks as tp_degree, found False",
    ),
    "another degree": (model(lambda s: s.update(dp_world_size=5)), "missing_rank: ranks 3 to 4 of 5"),
    "a rank too many": (
        copied(RANK_1, RANK_1.replace("mp_rank_00", "mp_rank_07")),
        "foreign_file: model-parallel rank 7: the model files state 2 of them",
    ),
    "two trainings": (
        copied(RANK_1, RANK_1.removeprefix("bf16_")),
        "has files of two trainings, bf16_zero_pp_rank_ and",
    ),
    "fragments that overlap": (optimizer(moved), "fragments overlap"),
    "a hole": (
        optimizer(lambda s: s["param_slice_mappings"][0].clear()),
        "a fragment is missing",
    ),
    "other steps": (state(lambda s: s.update(step=torch.tensor(8.0))), "step 7, others are at 8"),
    "other iterations": (model(lambda s: s.update(iteration=8)), f"{MODEL}: iteration is 8, and 7 in"),
    "no moments": (state(lambda s: s.pop("exp_avg")), f"missing_state: {RANK_1}: group 0 has no 'exp_avg'"),
    "codes of 8 bits": (states(codes), "the optimizer's state 'state1' of"),
    "a nested state": (
        states(nested),
        "the optimizer's state '__bnb_optimizer_quant_state__' of 'fused.weight' and others",
    ),
    "a single value": (
        states(lambda s: s.update(mu_product=torch.tensor(0.5))),
        "the optimizer's state 'mu_product' of",
    ),
    "a name that leaves the folder": (leaving, "'zero/../../home/step.pt' is no name of a file in the output folder"),
    "a pattern of no parameter": (
        lambda f: changed(f / MODEL.replace("01", "00"), lambda s: s[INFO].update(parameter_to_average_patterns=["x"])),
        "no parameter matches the patterns x",
    ),
    "a shorter moment": (
        state(lambda s: s.update(exp_avg=s["exp_avg"][:-3].clone())),
        f"missing_state: {RANK_1}: group 0: 'exp_avg' has",
    ),
    "another type": (state(lambda s: s.update(exp_avg=s["exp_avg"].bfloat16())), "has bfloat16"),
    "other shapes": (model(lambda s: s["param_shapes"][0].update({"norm.weight": torch.Size([7])})), "norm.weight"),
    "another layout": (
        model(lambda s: s.update(param_shapes=3)),
        "expected the shapes of parameters as param_shapes, found 3",
    ),
    "no shapes": (
        without_shapes,
        "expected the shapes of the parameters (param_shapes) in the file of model states of model-parallel rank 0",
    ),
    "files of experts": (
        copied(MODEL, "layer_0_expert_3_mp_rank_00_model_states.pt"),
        "has experts on 2 tensor- or pipeline-parallel ranks, which no converter takes",
    ),
    "experts without ZeRO": (
        lambda f: [shutil.move(path, f / f"expp_rank_{i}.pt") for i, path in enumerate(f.glob("*_optim_states.pt"))],
        "has files of experts (expp_rank_0.pt) and none of a ZeRO optimizer",
    ),
    "experts of AutoEP": (
        model(lambda s: s.update(ds_autoep_layers=[{}])),
        f"{MODEL} has experts of AutoEP; convert it with DeepSpeed's own converter: CKPT_PATCHES_SKIP=",
    ),
    "affine maps": (
        lambda f: changed(f / MODEL.replace("01", "00"), lambda s: s[INFO].update(affine_map={"version": 1})),
        "the checkpoint has AutoTP's affine maps of its parameters; convert it with DeepSpeed's own converter",
    ),
    "a copied rank": (
        copied(RANK_1, RANK_1.replace("rank_1", "rank_2")),
        f"foreign_file: {RANK_1.replace('rank_1', 'rank_2')}: it was written as {RANK_1}",
    ),
    "no weight": (model(lambda s: s["module"].popitem()), f"missing_weight: {MODEL}: no weight of"),
    "a rate that is none": (
        optimizer(lambda s: s["base_optimizer_state"]["param_groups"][0].update(lr=float("nan"))),
        "contradiction: ",
    ),
    "a foreign class": (
        optimizer(lambda s: s.update(extra=pickle.Pickler)),
        "Pickler, which is not on the list",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_one_clear_line(damage: str, folder: Path, tmp_path: Path) -> None:
    damaging, expected = DAMAGES[damage]
    damaging(folder)
    check_refused(folder, tmp_path / "out", expected)


def test_other_steps_at_stage_3(tmp_path: Path) -> None:
    """A rank at another step is refused at stage 3, though no output file has steps."""
    folder = shutil.copytree(parallel("zero3_uneven")["zero3_uneven"], tmp_path / "in" / "global_step7")
    (name,) = (path.name for path in folder.glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    optimizer_state = "optimizer_state_dict"
    changed(folder / name, lambda s: s[optimizer_state][optimizer_state]["state"][0].update(step=torch.tensor(8.0)))
    check_refused(folder, tmp_path / "out", "step 7, others are at 8")


def test_the_bias_of_sub_parameters_is_refused_where_nothing_states_its_own(tmp_path: Path) -> None:
    """A bias without a stated layout is refused: the converter once concatenated its slices."""
    expected = "fused.bias: the checkpoint does not state how it is cut, though fused.weight has sub-parameters"
    check_refused(parallel("fused_bias")["fused_bias"], tmp_path / "out", expected)


def test_a_stage_with_other_param_groups_is_refused(tmp_path: Path) -> None:
    """A load would give all stages those of the first. The names of parameters differ in any case."""
    folder = shutil.copytree(parallel("megatron")["megatron"], tmp_path / "in" / "global_step7")

    def change(**settings: Any) -> None:
        for path in folder.glob("*_mp_rank_0[23]_optim_states.pt"):
            changed(
                path, lambda s: s["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0].update(settings)
            )

    change(param_names=["of.this.stage"])
    ours(folder, tmp_path / "right" / "universal")
    change(lr=1.0)
    check_refused(folder, tmp_path / "out", "has the param groups of the first pipeline stage alone")


def test_wrong_folders(folder: Path, tmp_path: Path) -> None:
    """An output folder that is empty is taken."""
    taken, file, empty = tmp_path / "taken", tmp_path / "file", tmp_path / "empty"
    taken.mkdir()
    (taken / "mine").touch()
    file.touch()
    empty.mkdir()
    cases = [
        (folder, taken, f"{taken} exists"),
        (folder, file, f"{file} exists"),
        (folder, folder / "universal", f"expected an output folder outside of {folder}"),
        (tmp_path / "nothing", empty, f"{tmp_path / 'nothing'}: expected"),
        (empty, tmp_path / "universal", f"{empty}: expected"),
    ]
    for source, output, expected in cases:
        done = ours(source, output, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert expected in done.stderr
    assert not (folder / "universal").exists()
    ours(folder, empty)


def test_a_trusted_foreign_class_is_carried_over_and_not_run(folder: Path, tmp_path: Path) -> None:
    """The name of a trusted class is written into the common state, as upstream does, and its code is not run."""
    for path in folder.glob("*_optim_states.pt"):
        changed(path, lambda state: state["optimizer_state_dict"].update(extra=Evil(tmp_path / "touched")))
    refused = ours(folder, tmp_path / "universal", check=False)
    assert "holds posix.system" in refused.stderr
    ours(folder, tmp_path / "universal", "--trust_checkpoint")
    assert not (tmp_path / "touched").exists()
    torch.load(tmp_path / "universal" / "zero" / "optimizer_state.pt", weights_only=False)
    assert (tmp_path / "touched").exists()  # run by a load like upstream's


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_replicas_that_differ(tmp_path: Path) -> None:
    """Different replicas, which headers do not show, are an error with the parameter's name, and without output."""
    folder = shutil.copytree(parallel("megatron")["megatron"], tmp_path / "in" / "global_step7")
    path = folder / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    changed(path, lambda s: s["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].data.add_(1))
    done = ours(folder, tmp_path / "universal", check=False)
    assert done.returncode == 2
    assert "_mp_rank_01_optim_states.pt, which both hold this parameter, found others" in done.stderr
    assert not (tmp_path / "universal").exists()


def tensor_in(path: Path, name: str) -> TensorHeader:
    found = torch_file.tensors_in(torch_file.read(path, trust=True).value)
    return next(tensor for where, tensor in found if name in where)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


CHECKED = {
    "a main parameter": (RANK_1, "single_partition_of_fp32_groups", 0),
    "a moment": (RANK_1, "exp_avg_sq", 0),
    "padding": (RANK_1.replace("rank_1", "rank_2"), "single_partition_of_fp32_groups", -1),
    "a file that is copied": (MODEL, "module", 0),
}


@pytest.mark.parametrize("place", CHECKED)
def test_a_wrong_checksum_of_what_is_read_is_refused(place: str, folder: Path, tmp_path: Path) -> None:
    """A flipped bit is refused, also by a second call, which finds all files written."""
    name, key, end = CHECKED[place]
    tensor = tensor_in(folder / name, key)
    flip(folder / name, tensor.offset + (end % tensor.nbytes))
    for _ in range(2):
        done = ours(folder, tmp_path / "universal", check=False)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stdout
        assert f"{folder / name} is damaged: the checksum of its " in done.stderr
        assert not (tmp_path / "universal").exists()
        assert not (tmp_path / "latest_universal").exists()


def test_a_checkpoint_that_changes_while_it_is_converted_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state is overwritten in place after the checksums were right."""
    offset, write = tensor_in(folder / RANK_1, "exp_avg").offset, Writer.__call__

    def change(self: Writer, batch: Sequence[Output]) -> int:
        flip(folder / RANK_1, offset)
        return write(self, batch)

    monkeypatch.setattr(Writer, "__call__", change)
    with pytest.raises(UserError, match=f"{folder} has changed while it was converted: run the same command again"):
        convert(folder, tmp_path / "universal", Options(workers=1))
    assert not (tmp_path / "universal").exists()
    assert not (tmp_path / "latest_universal").exists()


def test_a_state_that_would_be_lost_is_left_out_on_request(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then the two are not the same training state."""
    states(codes)(folder)
    states(lambda of_group: of_group.update(mu_product=torch.tensor(0.5)))(folder)
    dropped = ("--drop-state", "state1", "--drop-state", "absmax1", "--drop-state", "mu_product")
    ours(folder, tmp_path / "universal", *dropped)
    names = {path.stem for path in (tmp_path / "universal/zero/norm.weight").iterdir()}
    assert names == {"fp32", "exp_avg", "exp_avg_sq", "step"}
    assert command_line.main(["compare", str(folder), str(folder)]) == 0
    assert command_line.main(["compare", str(folder), str(tmp_path / "universal")]) == 1
    said = capsys.readouterr().out
    for state in ("state1", "mu_product"):
        assert re.search(rf"norm.weight {state} +differs: in the first one alone", said)


@pytest.mark.parametrize("name", ["nosuch", "step"])
def test_a_state_that_no_parameter_has_cannot_be_dropped(name: str, folder: Path, tmp_path: Path) -> None:
    done = ours(folder, tmp_path / "universal", "--drop-state", name, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"--drop-state {name}: expected one of exp_avg, exp_avg_sq" in done.stderr


def test_a_universal_checkpoint_needs_nothing(folder: Path, tmp_path: Path) -> None:
    ours(folder, tmp_path / "universal")
    done = ours(tmp_path / "universal", tmp_path / "again", "--json", check=False)
    assert (done.returncode, (tmp_path / "again").exists()) == (0, False)
    assert "is a universal checkpoint already" in json.loads(done.stdout)["nothing_to_do"]
