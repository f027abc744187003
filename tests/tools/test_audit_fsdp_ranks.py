"""Audit checkpoints with a torch.save file for each FSDP rank, as verl writes them."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, REPAIRED, UNKNOWN, WHOLE, Report, audit
from ckpt_patches.cli import main
from ckpt_patches.formats import damages, torch_file
from ckpt_patches.formats.rank_files_reader import FORMAT, WEIGHTS_ALONE
from crafted_files import with_other_value
from dcp_checkpoints import OF_FOUR_RANKS, OF_RANKS, saved_by_ranks
from every_checkpoint import in_torch_file, put

SOUND = [(ranks, name) for ranks, cases in ((2, OF_RANKS), (4, OF_FOUR_RANKS)) for name in cases if "/" not in name]
EACH = pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
MODEL, OPTIMIZER, EXTRA = (f"{kind}_world_size_2_rank_1.pt" for kind in ("model", "optim", "extra_state"))


def names(report: Report) -> set[str]:
    return {finding.kind.name for finding in report.findings if finding.kind.severity != damages.NOTE}


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(saved_by_ranks(2) / name, tmp_path / name))


@pytest.mark.parametrize(("ranks", "name"), SOUND)
def test_a_sound_one_is_whole(ranks: int, name: str) -> None:
    report = audit(saved_by_ranks(ranks) / name)
    assert (report.verdict, names(report)) == (WHOLE, set())
    assert report.checkpoint.step == (None if name.endswith("fresh") else 3)


def test_an_optimizer_that_began_anew_is_unusual() -> None:
    report = audit(saved_by_ranks(2) / "global_step_40" / "actor")
    assert (report.verdict, names(report)) == (UNKNOWN, {"unusual"})


def test_weights_alone_are_called_so(copy: Callable[[str], Path]) -> None:
    path = copy("fsdp2")
    for file in path.glob("optim*"):
        file.unlink()
    report = audit(path)
    assert (report.verdict, report.checkpoint.format) == (WHOLE, WEIGHTS_ALONE)
    assert audit(saved_by_ranks(2) / "fsdp2").checkpoint.format == FORMAT


# Files


@EACH
@pytest.mark.parametrize("file", [MODEL, OPTIMIZER, EXTRA])
def test_a_file_is_missing_cut_or_another_ranks(copy: Callable[[str], Path], name: str, file: str) -> None:
    path = copy(name)
    data = (path / file).read_bytes()
    (path / file).unlink()
    assert names(audit(path)) == {"missing_rank"}
    (path / file).write_bytes(data[:-1000])
    assert names(audit(path)) == {"bad_file"}
    shutil.copy(path / file.replace("rank_1", "rank_0"), path / file)
    assert "foreign_file" in names(audit(path))


def test_a_folder_without_any_ranks_file_is_incomplete(copy: Callable[[str], Path]) -> None:
    path = copy("fsdp2")
    for file in path.glob("*.pt"):
        file.unlink()
    assert audit(path).verdict == INCOMPLETE


def test_the_configuration_states_another_number_of_ranks(copy: Callable[[str], Path]) -> None:
    path = copy("fsdp2")
    (path / "fsdp_config.json").write_text(json.dumps({"world_size": 3}))
    assert names(audit(path)) == {"contradiction"}
    (path / "fsdp_config.json").write_text("{")
    assert names(audit(path)) == {"bad_metadata"}


def test_files_of_an_older_save_are_named(copy: Callable[[str], Path]) -> None:
    path = copy("fsdp2")
    shutil.copy(saved_by_ranks(4) / "fsdp2" / "model_world_size_4_rank_3.pt", path)
    assert names(audit(path)) == {"unusual"}


# Elements


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
    report = audit(path)
    assert (report.verdict, names(report)) == (DAMAGED, {expected})


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


# Keys


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all keys of dicts and items of lists."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(entries):
        yield (*path, key)
        yield from paths(item, (*path, key))


def removed(value: Any, path: tuple[Any, ...]) -> None:
    for key in path[:-1]:
        value = value[key]
    del value[path[-1]]


@pytest.mark.parametrize("name", ["fsdp1", "fsdp1_original", "fsdp2"])
@pytest.mark.parametrize("file", [MODEL, OPTIMIZER, EXTRA])
def test_every_key_of_a_rank_is_missed(copy: Callable[[str], Path], name: str, file: str) -> None:
    path = copy(name)
    data = (path / file).read_bytes()
    every = list(paths(torch_file.read(path / file, trust=True).value))
    unnoticed = []
    for key in every:
        with_other_value(path / file, lambda value, key=key: removed(value, key))  # type: ignore[misc]
        if audit(path, workers=1).verdict == WHOLE:
            unnoticed.append(key)
        (path / file).write_bytes(data)
    assert every
    assert not unnoticed


def test_steps_and_settings_of_ranks_agree(copy: Callable[[str], Path]) -> None:
    path = copy("fsdp2")
    data = (path / OPTIMIZER).read_bytes()
    with_other_value(path / OPTIMIZER, lambda value: value["param_groups"][0].update(lr=0.5))
    assert names(audit(path)) == {"contradiction"}
    (path / OPTIMIZER).write_bytes(data)
    for place in in_torch_file(path / OPTIMIZER):
        if place.name.endswith(".step"):
            put(place, torch.tensor(2.0).numpy().tobytes())
    assert names(audit(path)) == {"mixed_steps"}


def test_parts_at_one_place_do_not_tile(copy: Callable[[str], Path]) -> None:
    """A rank's file with the coordinates of another rank is reported as overlapping fragments."""
    path = copy("fsdp2")
    other = torch_file.read(path / MODEL.replace("rank_1", "rank_0"), trust=True).value
    mesh = other["head.weight"].state[1]["_spec"].fields["mesh"].fields
    with_other_value(path / MODEL, lambda v: v["head.weight"].state[1]["_spec"].fields["mesh"].fields.update(mesh))
    assert names(audit(path)) == {"fragments"}


# A run's folder


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
