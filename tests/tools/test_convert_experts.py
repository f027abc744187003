"""Checkpoints of mixtures of experts: DeepSpeed's classic `deepspeed.moe` layers; AutoEP is left to upstream."""

import functools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.formats.zero_experts import local_experts
from every_checkpoint import experts
from universal import check_refused, load, ours, save
from upstream import all_releases, newest, once, run, tree
from zero_checkpoints import convert

pytestmark = pytest.mark.slow

NEWEST = newest("deepspeed")
NEIGHBOURS = "neighbours"  # ranks 0 and 1 share experts, instead of 0 and 2


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


def test_autoep_is_left_to_upstreams_converter(tmp_path: Path) -> None:
    """The command refuses it, and where DeepSpeed's converter is called, that one runs."""
    source = autoep(1, NEIGHBOURS)
    check_refused(source, tmp_path / "out", "has experts of AutoEP; convert it with DeepSpeed's own converter")
    outcome = convert(tmp_path / "handed-over", source, version=NEWEST, delivery="hook")
    assert outcome == {source.parent.name: ""}
    assert list((tmp_path / "handed-over" / source.parent.name / "zero").glob("*.mlp.experts.w1"))


@pytest.mark.parametrize("damage", CLASSIC_DAMAGES)
def test_a_damaged_classic_checkpoint_is_one_clear_line(damage: str, tmp_path: Path) -> None:
    folder = shutil.copytree(experts(1), tmp_path / "in" / experts(1).name)
    damaging, expected = CLASSIC_DAMAGES[damage]
    damaging(folder)
    check_refused(folder, tmp_path / "out", expected)
