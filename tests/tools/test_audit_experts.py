"""The audit judges each expert-parallel rank's experts, at every ZeRO stage and after a conversion."""

import functools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, UNKNOWN, WHOLE, audit
from ckpt_patches.audit.judging.record_checksums import update_checksum
from ckpt_patches.audit.rules import Part
from ckpt_patches.formats.checkpoint import MOMENTS, Extent, Shard
from crafted_files import Change, change, copied, found_in, names, with_other_value
from every_checkpoint import experts
from test_convert_experts import NEIGHBOURS, autoep
from universal import load, ours, save
from upstream import newest, once
from zero_checkpoints import convert

KINDS: dict[str, tuple[Any, set[str], int]] = {  # the experts' labels, and their number of shards
    "stage 1": (partial(experts, 1), {f"expert-parallel rank {n}" for n in range(2)}, 8),
    "stage 2": (partial(experts, 2), {f"expert-parallel rank {n}" for n in range(2)}, 8),
    "AutoEP": (partial(autoep, 1, NEIGHBOURS), {f"expert-parallel rank {n}" for n in range(2)}, 12),
    "AutoEP, stage 3": (partial(autoep, 3), {"experts of ranks 0, 2", "experts of ranks 1, 3"}, 12),
}
MODEL = "mp_rank_00_model_states.pt"


@functools.cache
def universal(kind: str) -> Path:
    source = autoep(3) if kind == "AutoEP" else experts(1)

    def write(out: Path) -> None:
        if kind == "classic":
            ours(source, out / source.parent.name, "--inject_missing_state")
        else:  # is left to upstream's converter
            assert set(convert(out, source, version=newest("deepspeed"), delivery="hook").values()) == {""}

    return once(f"universal-experts-{kind}", write) / source.parent.name


def finds_nan(path: Path, extent: Extent) -> list[tuple[str, str]]:
    """The parameters and labels that have findings with NaN in the first element of an extent."""
    whole = Path(extent.path).read_bytes()
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset)
        file.write(b"\0\0\xc0\x7f")
    report = audit(path)
    assert report.verdict == DAMAGED
    Path(extent.path).write_bytes(whole)
    return [(found.array.rpartition(".")[0], found.shard) for found in report.findings]


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_judged_by_the_ranks_that_share_them(kind: str, tmp_path: Path) -> None:
    make, labels, count = KINDS[kind]
    path = copied(make(), tmp_path)
    report = audit(path)
    assert (report.verdict, names(report)) == (WHOLE, set())
    by_expert = [shard for shard in report.checkpoint.shards if "expert" in shard.label and "master" in shard.streams]
    assert ({shard.label for shard in by_expert}, len(by_expert)) == (labels, count)
    assert all({"master", "exp_avg", "exp_avg_sq"} <= shard.streams.keys() for shard in by_expert)
    for shard in by_expert if kind == "stage 1" else (by_expert[0], by_expert[-1]):
        for extent in shard.streams["exp_avg_sq"].extents:
            assert (shard.parameter, shard.label) in finds_nan(path, extent)


def of_swapped_ranks(path: Path) -> None:
    """Ranks 0 and 1 have parts of equal length of different experts."""
    one, other = (path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    one.rename(path / "kept")
    other.rename(one)
    (path / "kept").rename(other)


def without_an_expert(path: Path) -> None:
    (folder,) = path.glob("zero/*experts.global_3.0.weight")
    shutil.rmtree(folder)


def without_experts(path: Path) -> None:
    """Keep only the first expert-parallel rank's experts, as if no conversion had merged them."""
    file = path / "zero/model.layers.1.mlp.experts.w2/exp_avg.pt"
    value = load(file)
    save({**value, "param": value["param"][:2].clone()}, file)


def without_shapes(path: Path) -> None:
    """As of a release that saves none."""
    change(path / MODEL, lambda value: value.pop("param_shapes"))


def of_expert(number: int) -> Path:
    return Path(f"layer_0_expert_{number}_mp_rank_00_model_states.pt")


def a_changed_weight(number: int) -> Change:
    def add(value: Any) -> None:
        next(iter(value.values())).view(-1)[3] += 1

    return lambda path: change(path / of_expert(number), add)


def without_moments(path: Path) -> None:
    """No token was routed to the experts of the first expert-parallel rank."""
    found = audit(path).checkpoint
    for shard in (shard for shard in found.shards if shard.label == "expert-parallel rank 0"):
        for extent in (extent for role in MOMENTS if role in shard.streams for extent in shard.streams[role].extents):
            with open(extent.path, "r+b") as file:
                file.seek(extent.offset)
                file.write(bytes(extent.nbytes))
    for record in found.records:
        update_checksum(record)


DAMAGES: dict[str, tuple[Any, Change, str, set[str]]] = {
    "experts that were never used": (partial(experts, 1), without_moments, WHOLE, set()),
    "swapped ranks": (partial(autoep, 3), of_swapped_ranks, DAMAGED, {"mixed_ranks"}),
    "an expert without a file": (
        partial(experts, 1),
        lambda path: (path / of_expert(1)).unlink(),
        DAMAGED,
        {"missing_weight"},
    ),
    "no shapes": (partial(experts, 1), without_shapes, UNKNOWN, {"not_judged"}),
    **{
        f"a weight of expert {n}": (partial(experts, 1), a_changed_weight(n), DAMAGED, {"unrounded_master"})
        for n in (0, 1)
    },
    "converted": (partial(universal, "classic"), lambda path: None, WHOLE, set()),
    "converted, AutoEP": (partial(universal, "AutoEP"), lambda path: None, WHOLE, set()),
    "converted, without an expert": (partial(universal, "classic"), without_an_expert, INCOMPLETE, {"interrupted"}),
    "converted, without experts": (partial(universal, "AutoEP"), without_experts, DAMAGED, {"element_count"}),
}


@pytest.mark.parametrize("model_parallel", ["", "mp_rank_00, "])
def test_ranks_have_experts_of_their_own_under_one_name(model_parallel: str) -> None:
    shards = [Shard("experts.0.weight", f"{model_parallel}expert-parallel rank {n}", (4,), {}) for n in range(2)]
    assert len({Part(shard, "", 0, 4, is_zero=True, is_trained=False).parameter for shard in shards}) == 2


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_of_experts(what: str, tmp_path: Path) -> None:
    source, make, verdict, expected = DAMAGES[what]
    path = copied(source(), tmp_path)
    make(path)
    found = found_in(path)
    assert (found[0], expected <= found[1], bool(found[1])) == (verdict, True, bool(expected)), found


@pytest.mark.parametrize("where", [MODEL, "*_optim_states.pt"])
def test_a_parameter_whose_name_is_no_string_is_unreadable(where: str, tmp_path: Path) -> None:
    def rename(value: Any) -> None:
        for group in value.get("param_shapes") or value["optimizer_state_dict"]["param_slice_mappings"]:
            group[1, "a"] = group.pop(next(iter(group)))

    path = copied(experts(1), tmp_path)
    for file in path.glob(where):
        with_other_value(file, rename)
    assert found_in(path)[0] != WHOLE
    assert any("expected" in finding.detail for finding in audit(path).findings)


def test_a_number_of_experts_that_is_no_number_is_not_counted(tmp_path: Path) -> None:
    path = copied(universal("classic"), tmp_path)
    (file,) = path.glob("mp_rank_*model_states.pt")
    for counts in (["a"], ["a", "a"]):  # of one layer or of two
        with_other_value(file, partial(dict.update, num_experts=counts))
        found_in(path)  # no defect of the audit
