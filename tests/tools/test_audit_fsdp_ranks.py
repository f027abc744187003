"""Audit checkpoints with a torch.save file for each FSDP rank, as verl writes them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, REPAIRED, UNKNOWN, WHOLE, audit
from ckpt_patches.cli import main
from ckpt_patches.formats import torch_file
from ckpt_patches.formats.rank_files_reader import FORMAT, WEIGHTS_ALONE
from crafted_files import Change, copied, found_in, names, with_other_value, without
from dcp_checkpoints import OF_FOUR_RANKS, OF_RANKS, saved_by_ranks
from every_checkpoint import in_torch_file, put

SOUND = [(ranks, name) for ranks, cases in ((2, OF_RANKS), (4, OF_FOUR_RANKS)) for name in cases if "/" not in name]
EACH = pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
MODEL, OPTIMIZER, EXTRA = (f"{kind}_world_size_2_rank_1.pt" for kind in ("model", "optim", "extra_state"))


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: copied(saved_by_ranks(2) / name, tmp_path)


@pytest.mark.parametrize(("ranks", "name"), SOUND)
def test_a_sound_one_is_whole(ranks: int, name: str) -> None:
    report = audit(saved_by_ranks(ranks) / name)
    assert (report.verdict, names(report), report.checkpoint.format) == (WHOLE, set(), FORMAT)
    assert report.checkpoint.step == (None if name.endswith("fresh") else 3)


@EACH
@pytest.mark.parametrize("file", [MODEL, OPTIMIZER, EXTRA])
def test_a_file_is_missing_cut_or_another_ranks(copy: Callable[[str], Path], name: str, file: str) -> None:
    path = copy(name)
    data = (path / file).read_bytes()
    (path / file).unlink()
    assert found_in(path) == (DAMAGED, {"missing_rank"})
    (path / file).write_bytes(data[:-1000])
    assert found_in(path) == (DAMAGED, {"bad_file"})
    shutil.copy(path / file.replace("rank_1", "rank_0"), path / file)
    assert "foreign_file" in found_in(path)[1]


def configured(text: str) -> Change:
    return lambda path: (path / "fsdp_config.json").write_text(text)


def of_an_older_save(path: Path) -> None:
    shutil.copy(saved_by_ranks(4) / "fsdp2" / "model_world_size_4_rank_3.pt", path)


def of_step_2(path: Path) -> None:
    for place in in_torch_file(path / OPTIMIZER):
        if place.name.endswith(".step"):
            put(place, torch.tensor(2.0).numpy().tobytes())


def at_the_place_of_another(path: Path) -> None:
    """A rank's file with the coordinates of another rank."""
    other = torch_file.read(path / MODEL.replace("rank_1", "rank_0"), trust=True).value
    mesh = other["head.weight"].state[1]["_spec"].fields["mesh"].fields
    with_other_value(path / MODEL, lambda v: v["head.weight"].state[1]["_spec"].fields["mesh"].fields.update(mesh))


def with_rate(path: Path) -> None:
    with_other_value(path / OPTIMIZER, lambda value: value["param_groups"][0].update(lr=0.5))


def without_states(path: Path) -> None:
    for file in path.glob("optim*"):
        with_other_value(file, lambda value: value["state"].clear())


OF_FSDP2: dict[str, tuple[Change, str, set[str]]] = {
    "no rank's file": (without("*.pt"), INCOMPLETE, {"incomplete_save"}),
    "another number of ranks": (configured(json.dumps({"world_size": 3})), DAMAGED, {"contradiction"}),
    "another configuration": (configured("{"), DAMAGED, {"bad_metadata"}),
    "a file of an older save": (of_an_older_save, UNKNOWN, {"unusual"}),
    "another rate": (with_rate, DAMAGED, {"contradiction"}),
    "another step": (of_step_2, DAMAGED, {"mixed_steps"}),
    "parts at one place": (at_the_place_of_another, DAMAGED, {"fragments"}),
    "no state in the optimizer": (without_states, UNKNOWN, {"unusual"}),
    "weights alone": (without("optim*"), WHOLE, set()),
}


@pytest.mark.parametrize("what", OF_FSDP2)
def test_files_that_do_not_belong_together(copy: Callable[[str], Path], what: str) -> None:
    make, verdict, expected = OF_FSDP2[what]
    path = copy("fsdp2")
    make(path)
    assert found_in(path) == (verdict, expected)
    assert what != "weights alone" or audit(path).checkpoint.format == WEIGHTS_ALONE


def test_an_optimizer_that_began_anew_is_unusual() -> None:
    assert found_in(saved_by_ranks(2) / "global_step_40" / "actor") == (UNKNOWN, {"unusual"})


@EACH
@pytest.mark.parametrize(
    ("file", "key", "value", "expected"),
    [
        (MODEL, "", "nan", "not_finite"),
        (OPTIMIZER, "exp_avg", "inf", "not_finite"),
        (OPTIMIZER, "exp_avg_sq", "-1", "negative_square"),
    ],
)
def test_odd_elements_are_found(
    copy: Callable[[str], Path], name: str, file: str, key: str, value: str, expected: str
) -> None:
    path = copy(name)
    inner = key if name == "fsdp1" or not key else f"{key}."
    place = next(p for p in in_torch_file(path / file) if inner in p.name and p.numel > 100)
    put(place, torch.tensor(float(value)).numpy().tobytes(), 7)
    assert found_in(path) == (DAMAGED, {expected})


@EACH
def test_a_lost_moment_is_taken_from_an_older_checkpoint(
    copy: Callable[[str], Path], name: str, tmp_path: Path
) -> None:
    path, older = copy(name), saved_by_ranks(2) / name
    place = max((p for p in in_torch_file(path / OPTIMIZER) if "exp_avg" in p.name.split(".")), key=lambda p: p.numel)
    put(place, bytes(place.nbytes // 2))
    assert main(["repair", str(path), "--output", str(tmp_path / "new"), "--from", str(older)]) == 0
    assert audit(tmp_path / "new").verdict == REPAIRED
    assert place._replace(path=tmp_path / "new" / OPTIMIZER).data() == place._replace(path=older / OPTIMIZER).data()


def test_verls_tracker_names_a_folder_of_several_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        for model in ("actor", "critic"):
            shutil.copytree(saved_by_ranks(2) / "fsdp2", tmp_path / f"global_step_{step}" / model)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "global_step_2" / "actor" / OPTIMIZER).unlink()
    assert main(["audit", str(tmp_path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"resume from: {tmp_path / 'global_step_1'} (step 3)" in last
    assert "names global_step_2, which is DAMAGED" in last
