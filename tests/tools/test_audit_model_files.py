"""Missing model states of ZeRO-3 ranks: the audit reports them, and says where all ranks have saved into one file."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, WHOLE, audit
from ckpt_patches.convert.convert import Options, convert
from crafted_files import change, copied, names
from zero_checkpoints import trained

WRITER, RANKS = "0.16.2", 8
FILES = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(RANKS)]


def saved(kind: str) -> Path:
    return trained(WRITER, kind)[kind]


def as_universal(path: Path) -> None:
    """What a run leaves that has loaded a universal checkpoint (tests/fixes/test_zero3_universal_save.py)."""
    change(path / FILES[0], lambda content: content["ds_config"].update(checkpoint={"load_universal": True}))
    for name in FILES[1:]:
        (path / name).unlink()


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    path = copied(saved("stage3"), tmp_path / "damaged")
    as_universal(path)
    return path


def test_model_states_in_one_file_are_found_and_copies_mend_them(damaged: Path) -> None:
    """The page of `zero3_universal_save` has the `cp`."""
    report = audit(damaged)
    assert (report.verdict, names(report)) == (DAMAGED, {"one_model_file"})
    (finding,) = (found for found in report.findings if found.kind.name == "one_model_file")
    assert (finding.array, finding.detail) == (FILES[0], "7 ranks have none of their own")
    for name in FILES[1:]:
        shutil.copy(damaged / FILES[0], damaged / name)
    assert audit(damaged).verdict == WHOLE


def test_frozen_parameters_of_the_other_ranks_are_lost(tmp_path: Path) -> None:
    """No copy helps a checkpoint with frozen parameters: each missing file had its rank's part of them."""
    path = copied(saved("stage3_frozen"), tmp_path)
    as_universal(path)
    assert names(audit(path)) == {"missing_rank"}


# Other missing states, and other reasons for a single file


def forget_what_is_frozen(path: Path) -> None:
    change(path / FILES[0], lambda content: content.pop("frozen_param_fragments"))


def load_no_universal(path: Path) -> None:
    change(path / FILES[0], lambda content: content["ds_config"]["checkpoint"].update(load_universal=False))


def truncate(path: Path) -> None:
    file = path / FILES[0]
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (forget_what_is_frozen, {"missing_rank"}),
        (load_no_universal, {"missing_rank"}),
        (truncate, {"bad_file", "missing_rank", "fragments"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_it_may_be_something_else(damaged: Path, damage: Callable[[Path], None], expected: set[str]) -> None:
    damage(damaged)
    report = audit(damaged)
    assert (report.verdict, names(report)) == (DAMAGED, expected)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_whose_model_states_are_missing_cannot_be_resumed(rank: int, tmp_path: Path) -> None:
    path = copied(saved("stage3"), tmp_path)
    (path / FILES[rank]).unlink()
    report = audit(path)
    assert report.verdict == DAMAGED
    assert f"rank {rank} of 8" in [found.array for found in report.findings if found.kind.name == "missing_rank"]


def test_with_experts_the_first_rank_alone_has_model_states(damaged: Path) -> None:
    torch.save({}, damaged / "layer_0_expert_0_mp_rank_00_model_states.pt")
    assert audit(damaged).verdict == WHOLE


def test_each_tensor_parallel_rank_has_its_own(damaged: Path) -> None:
    for file in list(damaged.glob("*_mp_rank_00_*")):
        shutil.copy(file, damaged / file.name.replace("mp_rank_00", "mp_rank_01"))
    findings = [found for found in audit(damaged).findings if found.kind.name == "one_model_file"]
    assert [found.array for found in findings] == [FILES[0], FILES[0].replace("mp_rank_00", "mp_rank_01")]


def test_a_model_can_nest_its_weights(tmp_path: Path) -> None:
    """As Megatron-DeepSpeed's models do, with `--no-pipeline-parallel`."""

    def nest(content: dict[str, Any]) -> None:
        nested: dict[str, Any] = {}
        for name, value in content["module"].items():
            layer, _, own = name.rpartition(".")
            nested.setdefault(layer, {})[own] = value
        content["module"] = {**nested.pop("", {}), **nested}

    path = copied(saved("stage2"), tmp_path / "nested")
    file = path / "mp_rank_00_model_states.pt"
    change(file, nest)
    assert audit(path).verdict == WHOLE
    convert(path, tmp_path / "universal", Options(workers=1))
    assert audit(tmp_path / "universal").verdict == WHOLE
    change(file, lambda content: content["module"]["w1"].pop("bias"))
    assert names(audit(path)) == {"missing_weight"}
