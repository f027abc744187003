"""Missing model states of ZeRO-3 ranks: the audit reports them, and says where all ranks have saved into one file."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, WHOLE, audit
from crafted_files import change, copied, names
from upstream import once, run_json, tree
from zero_checkpoints import PERMISSIVE, convert
from zero_resumes import exact

WRITER, RANKS = "0.16.2", 4
STEP = "global_step4"
FILES = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(RANKS)]


@functools.cache
def saved(version: str, kind: str, ranks: int) -> Path:
    """The folder of a training run: its checkpoint, its state then and at the end, and the converted `universal`.

    Trained by the unpatched release; converted with the fixes, as the converter's bugs are other fixes' subject.
    """

    def train(out: Path) -> None:
        trained(out, version, kind, ranks)
        converted = convert(out / "converted", out / kind / "global_step2", version=version, delivery="hook")
        assert converted == {kind: ""}
        (out / "converted" / kind).rename(out / kind / "universal")

    return once(f"zero3-of-{version}-{kind}-{ranks}", train) / kind


@functools.cache
def continued(version: str, kind: str, ranks: int) -> Path:
    """The folder, like that of `saved`, of a run that loads the universal checkpoint, continues, and saves."""
    begin = saved(version, kind, ranks) / "universal"

    def train(out: Path) -> None:
        trained(out, version, kind, ranks, "--universal", begin)
        (out / kind / "global_step2").rename(out / kind / STEP)  # the run's actual step

    return once(f"zero3-on-of-{version}-{kind}-{ranks}", train) / kind


def trained(out: Path, version: str, kind: str, ranks: int, *options: str | Path) -> None:
    arguments = ("train", out, kind, "--ranks", str(ranks), *options)
    found = run_json("zero_resuming", *arguments, tree=tree("deepspeed", version), env=PERMISSIVE)
    assert "error" not in found[kind], found


def one_file(kind: str = "stage3") -> Path:
    """A checkpoint that the unpatched release saved after resuming from a universal one."""
    return continued(WRITER, kind, RANKS) / STEP


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    return copied(one_file(), tmp_path / "damaged")


def test_model_states_in_one_file_are_found() -> None:
    report = audit(one_file())
    assert (report.verdict, names(report)) == (DAMAGED, {"one_model_file"})
    (finding,) = (found for found in report.findings if found.kind.name == "one_model_file")
    assert (finding.array, finding.detail) == (FILES[0], "3 ranks have none of their own")


@pytest.mark.slow
def test_with_copies_of_the_file_it_resumes_and_converts(tmp_path: Path) -> None:
    """As the page of `zero3_universal_save` says: bit for bit like the original run, on the unpatched release."""
    training = one_file().parent
    output = copied(one_file(), tmp_path / "training")
    for name in FILES[1:]:
        shutil.copy(output / FILES[0], output / name)
    assert audit(output).verdict == WHOLE
    shutil.copy(training / "live.pt", output.parent)
    assert exact(resume(output.parent, STEP))
    assert convert(tmp_path / "converted", output, version=WRITER, delivery="hook") == {"training": ""}
    assert exact(resume(output.parent, tmp_path / "converted" / "training"))


def resume(folder: Path, tag: str | Path) -> Any:
    options = ("--tag", tag, "--case", "stage3", "--ranks", str(RANKS), "--first", "4")
    return run_json("zero_resuming", "resume", folder, *options, tree=tree("deepspeed", WRITER))[str(folder)]


@pytest.mark.slow
def test_frozen_parameters_of_the_other_ranks_are_lost() -> None:
    """No copy helps a checkpoint with frozen parameters: each missing file had its rank's part of them."""
    assert names(audit(one_file("stage3_frozen"))) == {"missing_rank"}


def test_a_whole_one_with_frozen_parameters_is_whole() -> None:
    assert audit(saved(WRITER, "stage3_frozen", RANKS) / "global_step2").verdict == WHOLE


@pytest.mark.parametrize(("rank", "verdict", "found"), [(2, DAMAGED, {"not_finite"}), (3, WHOLE, set())])
def test_padding_of_frozen_parameters_can_be_anything(rank: int, verdict: str, found: set[str], tmp_path: Path) -> None:
    """NaN in a frozen parameter's padding is not damage: the norm has 3 elements, so rank 3 has only padding."""
    folder = copied(saved(WRITER, "stage3_frozen", RANKS) / "global_step2", tmp_path / "global_step2")
    change(folder / FILES[rank], lambda content: [part.fill_(np.nan) for part in fragments(content)])
    report = audit(folder)
    assert (report.verdict, names(report)) == (verdict, found)


def fragments(content: dict[str, Any]) -> list[torch.Tensor]:
    return list(content["frozen_param_fragments"].values())


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
    path = copied(saved(WRITER, "stage3", RANKS) / "global_step2", tmp_path)
    assert audit(path).verdict == WHOLE
    (path / FILES[rank]).unlink()
    report = audit(path)
    assert report.verdict == DAMAGED
    assert f"rank {rank} of 4" in [found.array for found in report.findings if found.kind.name == "missing_rank"]


def test_with_experts_the_first_rank_alone_has_model_states(damaged: Path) -> None:
    torch.save({}, damaged / "layer_0_expert_0_mp_rank_00_model_states.pt")
    assert audit(damaged).verdict == WHOLE


def test_each_tensor_parallel_rank_has_its_own(damaged: Path) -> None:
    for file in list(damaged.glob("*_mp_rank_00_*")):
        shutil.copy(file, damaged / file.name.replace("mp_rank_00", "mp_rank_01"))
    findings = [found for found in audit(damaged).findings if found.kind.name == "one_model_file"]
    assert [found.array for found in findings] == [FILES[0], FILES[0].replace("mp_rank_00", "mp_rank_01")]
