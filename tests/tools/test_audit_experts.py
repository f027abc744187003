"""The audit judges each expert-parallel rank's experts, at every ZeRO stage and after a conversion."""

import functools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, UNKNOWN, WHOLE, audit
from ckpt_patches.formats.damages import (
    ELEMENT_COUNT,
    INTERRUPTED,
    MISSING_WEIGHT,
    MIXED_RANKS,
    NOT_JUDGED,
    UNROUNDED_MASTER,
)
from crafted_files import with_other_value
from test_audit import check_that_a_nan_is_found, copied, names
from test_audit_coverage import experts
from test_convert_experts import NEIGHBOURS, autoep
from universal import load, ours, save
from upstream import newest, once
from zero_checkpoints import convert

SHARED = {
    (1, NEIGHBOURS): {"expert-parallel rank 0", "expert-parallel rank 1"},
    (3,): {"experts of ranks 0, 2", "experts of ranks 1, 3"},
}


INJECT = "--inject_missing_state"


@functools.cache
def universal(kind: str) -> Path:
    source = {"AutoEP": lambda: autoep(3), "classic": lambda: experts(1)}[kind]()

    def write(out: Path) -> None:
        if kind == "classic":
            ours(source, out / source.parent.name, INJECT)
        else:  # is left to upstream's converter
            assert set(convert(out, source, version=newest("deepspeed"), delivery="hook").values()) == {""}

    return once(f"universal-experts-{kind}", write) / source.parent.name


@pytest.mark.slow
@pytest.mark.parametrize("arguments", SHARED, ids=str)
def test_autoep_is_judged_by_the_ranks_that_share_experts(arguments: tuple[Any, ...]) -> None:
    report = audit(autoep(*arguments))
    assert (report.verdict, names(report)) == (WHOLE, set())
    by_expert = [shard for shard in report.checkpoint.shards if "expert" in shard.label]
    assert {shard.label for shard in by_expert} == SHARED[arguments]
    assert len(by_expert) == 2 * 2 * 3  # layers, expert-parallel ranks, w1 to w3
    assert all({"master", "exp_avg", "exp_avg_sq"} <= shard.streams.keys() for shard in by_expert)


@pytest.mark.parametrize("arguments", SHARED, ids=str)
def test_damage_in_each_part_of_autoeps_experts_is_found(arguments: tuple[Any, ...], tmp_path: Path) -> None:
    path = copied(autoep(*arguments), tmp_path)
    shards = [shard for shard in audit(path).checkpoint.shards if "expert" in shard.label]
    for shard in (shards[0], shards[-1]):
        for extent in shard.streams["exp_avg_sq"].extents:
            check_that_a_nan_is_found(path, shard, extent)


def test_a_rank_in_a_group_of_others_is_damage(tmp_path: Path) -> None:
    """Swapped files of ranks 0 and 1, which have parts of equal length of different experts, are damage."""
    path = copied(autoep(3), tmp_path)
    one, other = (path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    one.rename(path / "kept")
    other.rename(one)
    (path / "kept").rename(other)
    report = audit(path)
    assert report.verdict == DAMAGED
    assert MIXED_RANKS.name in names(report)


def test_an_expert_without_a_file_is_damage(tmp_path: Path) -> None:
    path = copied(experts(1), tmp_path)
    name = "layer_0_expert_1_mp_rank_00_model_states.pt"
    (path / name).unlink()
    report = audit(path)
    assert (report.verdict, names(report)) == (DAMAGED, {MISSING_WEIGHT.name})
    assert name in str(report.findings)


def test_experts_of_a_release_that_saves_no_shapes_are_not_damaged(tmp_path: Path) -> None:
    """Experts without shapes in any file are not judged, and the verdict is UNKNOWN."""
    path = copied(experts(1), tmp_path)
    file = path / "mp_rank_00_model_states.pt"
    model = torch.load(file, weights_only=False)
    model.pop("param_shapes")
    torch.save(model, file)
    report = audit(path)
    assert (report.verdict, names(report)) == (UNKNOWN, {NOT_JUDGED.name})


@pytest.mark.parametrize("where", ["mp_rank_00_model_states.pt", "*_optim_states.pt"])
def test_a_parameter_whose_name_is_no_string_is_unreadable(where: str, tmp_path: Path) -> None:
    def change(value: Any) -> None:
        for group in value.get("param_shapes") or value["optimizer_state_dict"]["param_slice_mappings"]:
            group[1, "a"] = group.pop(next(iter(group)))

    path = copied(experts(1), tmp_path)
    for file in path.glob(where):
        with_other_value(file, change)
    details = [finding.detail for finding in audit(path).findings]
    assert any("expected" in detail for detail in details)
    assert not any("a defect of the audit" in detail for detail in details)


@pytest.mark.parametrize("kind", ["AutoEP", "classic"])
def test_the_conversion_is_whole(kind: str) -> None:
    report = audit(universal(kind))
    assert (report.verdict, names(report)) == (WHOLE, set())


def without_an_expert(path: Path) -> None:
    (folder,) = path.glob("zero/*experts.global_3.0.weight")
    shutil.rmtree(folder)


def without_experts(path: Path) -> None:
    """Keep only the first expert-parallel rank's experts, as if no conversion had merged them."""
    file = path / "zero/model.layers.1.mlp.experts.w2/exp_avg.pt"
    value = load(file)
    save({**value, "param": value["param"][:2].clone()}, file)


@pytest.mark.parametrize(
    ("kind", "damage", "expected"),
    [("classic", without_an_expert, INTERRUPTED), ("AutoEP", without_experts, ELEMENT_COUNT)],
    ids=["classic", "AutoEP"],
)
def test_a_conversion_that_lacks_experts_is_damaged(
    kind: str, damage: Callable[[Path], None], expected: Any, tmp_path: Path
) -> None:
    path = copied(universal(kind), tmp_path)
    damage(path)
    report = audit(path)
    verdict = INCOMPLETE if expected.severity == "incomplete" else DAMAGED
    assert (report.verdict, names(report)) == (verdict, {expected.name})


def test_a_number_of_experts_that_is_no_number_is_not_counted(tmp_path: Path) -> None:
    path = copied(universal("classic"), tmp_path)
    (file,) = path.glob("mp_rank_*model_states.pt")
    for counts in (["a"], ["a", "a"]):  # of one layer or of two
        with_other_value(file, partial(dict.update, num_experts=counts))
        assert not any("a defect of the audit" in finding.detail for finding in audit(path).findings)


def test_an_element_of_an_experts_weight_is_compared_with_the_main_parameter(tmp_path: Path) -> None:
    for number in range(2):  # experts of a layer
        path = copied(experts(1), tmp_path / str(number))
        (file,) = path.glob(f"layer_0_expert_{number}_mp_rank_00_model_states.pt")
        values = torch.load(file)
        next(iter(values.values())).view(-1)[3] += 1
        torch.save(values, file)
        report = audit(path)
        assert (report.verdict, names(report)) == (DAMAGED, {UNROUNDED_MASTER.name})
