"""Checkpoints of mixtures of experts: DeepSpeed's AutoEP, and its classic `deepspeed.moe` layers."""

import functools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.formats.zero_experts import local_experts
from test_audit_coverage import experts
from universal import both, changed, check_refused, load, ours, save
from upstream import all_releases, newest, once, run, tree

pytestmark = pytest.mark.slow

NEWEST = newest("deepspeed")
NEIGHBOURS = "neighbours"  # ranks 0 and 1 share experts, instead of 0 and 2
TRAINED_AT: dict[int, tuple[Any, ...]] = {1: (1, NEIGHBOURS), 3: (3,)}
TRAINED = list(TRAINED_AT.values())
if all_releases():
    TRAINED += [(1,), (2,), (2, NEIGHBOURS), (3, NEIGHBOURS)]


@functools.cache
def autoep(stage: int, *options: str) -> Path:
    """A real AutoEP checkpoint of 4 ranks: two layers of four experts, on two expert-parallel ranks."""
    release, name = tree("deepspeed", NEWEST), "-".join(("autoep", str(stage), *options))
    return once(name, lambda out: run("autoep_training", out, str(stage), *options, tree=release)) / "global_step3"


CLASSIC = [1] + ([2] if all_releases() else [])


@pytest.mark.parametrize("stage", CLASSIC)
def test_the_classic_kind_has_a_folder_for_each_expert_by_its_number(stage: int, tmp_path: Path) -> None:
    """Each expert has a folder with the run's main parameters, moments and steps; so has each dense parameter."""
    source = experts(stage)
    done = ours(source, tmp_path / "universal", "--inject_missing_state")
    assert "the fix universal_experts" in done.stderr
    truth = states(source.parent)
    numbers = {int(match[1]) for match in (re.search(r"experts\.(\d+)\.", name) for name in truth) if match}
    assert numbers == {0, 1, 2, 3}
    folders = {name: re.sub(r"(deepspeed_experts\.)", r"\1global_", name) for name in truth}
    found = {path.name for path in (tmp_path / "universal/zero").iterdir() if path.is_dir()}
    assert found == set(folders.values())
    for name, expected in truth.items():
        for key in expected.keys() - {"weight"}:
            value = load(tmp_path / "universal/zero" / folders[name] / f"{key}.pt")
            assert (value["param"] if isinstance(value, dict) else value).equal(expected[key]), (name, key)
    for path in source.glob("layer_*"):
        assert (tmp_path / "universal" / path.name).read_bytes() == path.read_bytes()


def states(folder: Path) -> dict[str, dict[str, Any]]:
    """The true states of each parameter at the save, equal on ranks that share it."""
    found: dict[str, dict[str, Any]] = {}
    for path in folder.glob("state-*.pt"):
        for name, state in load(path).items():
            known = found.setdefault(name, state)
            assert all(known[key].equal(state[key]) for key in state)
    return found


def test_experts_in_several_param_groups_are_counted_in_all() -> None:
    """Experts are counted over all param groups, as large groups are split."""
    layer = "layer.deepspeed_moe.experts.deepspeed_experts."
    found = local_experts(Path("model"), [[f"{layer}0.weight"], [f"{layer}1.weight"]], [2, 2], 4, neighbours=False)
    names = {name: expert.names for name, expert in found.items()}
    numbers = {f"{layer}{local}.weight": (local, local + 2) for local in range(2)}
    assert names == {name: tuple(f"{layer}{number}.weight" for number in held) for name, held in numbers.items()}


def other_number(folder: Path) -> None:
    path = folder / "layer_0_expert_3_mp_rank_00_model_states.pt"
    save({name.replace("experts.3", "experts.4"): tensor for name, tensor in load(path).items()}, path)


def without_files(folder: Path) -> None:
    for path in folder.glob("layer_*"):
        path.unlink()


def without_shapes(folder: Path) -> None:
    """Remove the shapes, as in DeepSpeed before 0.19.3."""
    path = folder / "mp_rank_00_model_states.pt"
    save({key: value for key, value in load(path).items() if key != "param_shapes"}, path)


CLASSIC_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an expert without a file": (
        lambda folder: os.remove(folder / "layer_0_expert_3_mp_rank_00_model_states.pt"),
        "missing_weight: layer_0_expert_3_mp_rank_00_model_states.pt: the file is missing",
    ),
    "an expert of another number": (other_number, "deepspeed_experts.3.0.weight of the shape (6, 6) in a file"),
    "no files of experts": (
        without_files,
        "layer_0_expert_0_mp_rank_00_model_states.pt: the file is missing, and 3 more",
    ),
    "no shapes": (without_shapes, "before 0.19.3 DeepSpeed saved no checkpoint of experts that can be converted"),
    "another number of ranks": (
        lambda folder: os.remove(folder / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"),
        "missing_rank: rank 3 of 4",
    ),
}


def test_of_autoep_every_entry_is_what_upstream_writes(tmp_path: Path) -> None:
    """Output equals upstream's at each stage, if neighboring ranks share experts, and with another placement."""
    sources = [*(autoep(*arguments) for arguments in TRAINED), placed_elsewhere(autoep(3), tmp_path)]
    found = both(tmp_path, *sources, version=NEWEST)
    assert found == {source.parent.name: [] for source in sources}
    assert len(found) == len(sources)


@pytest.mark.parametrize("arguments", [arguments for arguments in TRAINED if arguments[0] < 3], ids=str)
def test_the_masters_of_an_expert_are_those_of_its_number(arguments: tuple[Any, ...], tmp_path: Path) -> None:
    """An expert's main parameters, rounded to bf16, are its weights, which are in files by its number."""
    source = autoep(*arguments)
    ours(source, tmp_path / "universal")
    for path in source.glob("layer_*_expert_*"):
        for key, weight in load(path).items():
            name, _, number = key.rpartition(".")
            master = load(tmp_path / "universal/zero" / name / "fp32.pt")["param"]
            assert master[int(number)].bfloat16().equal(weight)


def test_the_experts_placement_decides_where_they_come(tmp_path: Path) -> None:
    name = "universal/zero/model.layers.0.mlp.experts.w1/exp_avg.pt"
    for kind, source in {"plain": autoep(3), "placed": placed_elsewhere(autoep(3), tmp_path)}.items():
        ours(source, tmp_path / kind / "universal")
    plain, placed = (load(tmp_path / kind / name)["param"] for kind in ("plain", "placed"))
    assert placed.equal(plain[[0, 2, 3, 1]])
    assert not placed.equal(plain)


def placed_elsewhere(source: Path, to: Path) -> Path:
    """A copy with experts 0 and 3 on the first expert-parallel rank, 1 and 2 on the second."""
    folder = shutil.copytree(source, to / "placed" / source.name)
    for path in folder.glob("*_model_states.pt"):
        state = load(path)
        for layer in state["ds_autoep_layers"]:
            del layer["affine_maps"]
            for ranks, held in zip(layer["expert_placement"]["ranks"], ([0, 3], [1, 2]), strict=True):
                ranks["experts"] = held
        save(state, path)
    return folder


def layers(change: Callable[[dict[str, Any]], Any], name: str = "mp_rank_00_model_states.pt") -> Callable[[Path], None]:
    return lambda folder: changed(folder / name, lambda state: [change(own) for own in state["ds_autoep_layers"]])


def with_a_tensor_parallel_rank(folder: Path) -> None:
    for path in folder.glob("*model_states.pt"):
        changed(path, lambda value: value.update(mp_world_size=2) if "mp_world_size" in value else None)
    for path in list(folder.glob("*mp_rank_00*")):
        shutil.copy(path, folder / path.name.replace("mp_rank_00", "mp_rank_01"))


def missing(name: str) -> Callable[[Path], object]:
    return lambda folder: os.remove(folder / name)


SECOND = "zero_pp_rank_1_mp_rank_00_model_states.pt"
DAMAGES: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "an expert without a file": (
        1,
        missing("layer_1_expert_2_mp_rank_00_model_states.pt"),
        "expected one file layer_1_expert_2_mp_rank_*, found none",
    ),
    "no shapes": (1, without_shapes, "before 0.19.3 DeepSpeed saved no checkpoint of experts that can be converted"),
    "an expert that nobody holds": (
        1,
        layers(lambda layer: layer["expert_placement"]["ranks"][1].update(experts=[2, 2])),
        "expected 4 experts on the 2 expert-parallel ranks",
    ),
    "a map of another placement": (
        1,
        layers(lambda layer: layer["expert_placement"]["ranks"][1].update(experts=[3, 2])),
        "the affine map that is recorded of it is not that of its experts' placement",
    ),
    "ranks that do not divide": (1, layers(lambda layer: layer.update(ep_size=3)), "4 data-parallel ranks cannot be 3"),
    "other experts": (
        1,
        layers(lambda layer: layer.update(expert_key_prefix="mlp")),
        "contradict each other about the experts mlp",
    ),
    "a missing rank": (1, missing("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"), "missing_rank: rank 3 of 4"),
    "a rank of other experts": (3, layers(lambda layer: layer.update(ep_rank=0), SECOND), "expected each rank on one"),
    "a rank with another placement": (
        3,
        layers(lambda layer: layer["expert_placement"]["ranks"][1].update(experts=[3, 2]), SECOND),
        "contradict each other about the experts",
    ),
    "tensor-parallel ranks": (3, with_a_tensor_parallel_rank, "it is another rank's"),
    "a rank in another format": (
        3,
        layers(lambda layer: layer.update(checkpoint_format="per_expert_files"), SECOND),
        "expected experts in format zero3_partitioned",
    ),
}


@pytest.mark.parametrize("damage", CLASSIC_DAMAGES)
def test_a_damaged_classic_checkpoint_is_one_clear_line(damage: str, tmp_path: Path) -> None:
    check_damaged(experts(1), *CLASSIC_DAMAGES[damage], tmp_path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_autoep_checkpoint_is_one_clear_line(damage: str, tmp_path: Path) -> None:
    stage, damaging, expected = DAMAGES[damage]
    check_damaged(autoep(*TRAINED_AT[stage]), damaging, expected, tmp_path)


def check_damaged(source: Path, damaging: Callable[[Path], object], expected: str, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "in" / source.name)
    damaging(folder)
    check_refused(folder, tmp_path / "out", expected)
