"""Only exact resumes of DeepSpeed are verified, at every stage, from ordinary and universal checkpoints."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from changed_elements import change_elements
from ckpt_patches.audit.audit import REPAIRED, audit
from ckpt_patches.cli import command_line
from ckpt_patches.fingerprint.deepspeed_state import COUNTERS, live
from ckpt_patches.formats import zero_reader
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ
from deepspeed_patches import ds_to_universal
from upstream import all_releases, newest, newest_by_default, once, releases, run, tree
from zero_checkpoints import convert
from zero_resumes import KINDS, PROGRAM, exact

ON = {"CKPT_PATCHES_FINGERPRINT": "1"}
NEWEST, OTHER = newest("deepspeed"), "0.19.2"
CASES = ["stage0-2", "stage1-2", "stage2-2", "stage3-2", "bf16_optimizer-2"]
ROUND_ROBIN = (
    "stage2_round_robin-2"  # upstream then links parameters to others' state, also in its universal checkpoints
)
CASES.append(ROUND_ROBIN)
if all_releases():
    CASES = [f"{kind}-{groups}" for kind in KINDS for groups in (1, 2)]
PARAMETERS = {"pipeline": 6}  # 7 for other kinds


def output(version: str, *arguments: str | Path, ranks: int, env: dict[str, str] | None = None) -> tuple[Any, str]:
    """The program's results by case, and all of its output."""
    options = ("--ranks", str(ranks), "--node", str(ranks))
    on: dict[str, Any] = {"tree": tree("deepspeed", version), "delivery": "hook"}
    done = run(PROGRAM, *arguments, *options, env={**ON, **(env or {})}, **on)
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stdout + done.stderr


def trained(version: str, ranks: int = 2) -> Path:
    """The folder with the checkpoint of every case, and `universal` beside it if it was converted."""

    def train(folder: Path) -> None:
        output(version, "train", folder, *CASES, ranks=ranks)
        for case in CASES:
            errors = convert(folder / "converted", folder / case / "global_step2", version=version, delivery="hook")
            if not errors[case]:
                (folder / "converted" / case).rename(folder / case / "universal")

    return once(f"recorded-{version}-{ranks}-{len(CASES)}", train)


def to_universal(source: Path, output: Path) -> list[str]:
    return ["to-universal", str(source), "--output", str(output)]


def layouts() -> list[tuple[int, int]]:
    return [(2, 2), (2, 4), (4, 2)] if all_releases() else [(2, 2), (2, 4)]


@pytest.mark.parametrize(("saved", "ranks"), layouts())
@pytest.mark.parametrize("tag", ["", "universal"])
@pytest.mark.parametrize("version", newest_by_default(releases("deepspeed", newest=NEWEST)))
def test_every_exact_resume_is_verified_whole(version: str, tag: str, saved: int, ranks: int) -> None:
    if not tag and saved != ranks:
        pytest.skip("upstream resumes an ordinary checkpoint on as many ranks alone")
    folder = trained(version, saved)
    cases = [case for case in CASES if (folder / case / (tag or "live.pt")).exists()]
    options = ["--tag", tag] if tag else []
    found, log = output(version, "resume", *[folder / case for case in cases], *options, ranks=ranks)
    loaded = [case for case in cases if found[str(folder / case)].get("different") == []]
    assert loaded or not cases
    assert log.count("resume verified: ") == len(loaded)
    assert "not verified" not in log
    for case in loaded:
        number = PARAMETERS.get(case.rpartition("-")[0], 7)
        assert f"resume verified: {3 * number} states, " in log
        assert exact(found[str(folder / case)]) or ranks != saved  # where losses are rounded differently


@pytest.mark.parametrize("case", [*CASES[1:4], ROUND_ROBIN])
def test_the_files_are_what_the_run_has_recorded(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    last = "against the record of the run: verified: 21 states"
    # Upstream's converter writes other parameters' data with round_robin_gradients.
    for name in ("global_step2",) if case == ROUND_ROBIN else ("global_step2", "universal"):
        assert command_line.main(["fingerprint", str(trained(NEWEST) / case / name)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == last
        assert command_line.main(["audit", "--notes", str(trained(NEWEST) / case / name)]) == 0
        assert "verified: 21 states" in capsys.readouterr().out


def test_the_number_goes_through_our_conversion_into_the_run_that_loads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "stage2-2"
    shutil.copytree(trained(NEWEST) / "stage2-2", folder, ignore=shutil.ignore_patterns("universal"))
    assert command_line.main(to_universal(folder / "global_step2", folder / "universal")) == 0
    captured = capfd.readouterr()
    assert "verified: 21 states" in captured.out + captured.err
    found, log = output(NEWEST, "resume", folder, "--tag", "universal", ranks=4)
    assert found[str(folder)]["different"] == []
    assert "resume verified: 21 states, " in log


def test_a_state_that_is_left_out_on_request_may_be_in_the_record(tmp_path: Path) -> None:
    source = trained(NEWEST) / "stage1-2" / "global_step2"
    command = to_universal(source, tmp_path / "universal")
    assert command_line.main([*command, "--drop-state", "exp_avg"]) == 0
    assert command_line.main(["compare", str(source), str(tmp_path / "universal")]) == 1


@pytest.mark.parametrize("tag", ["global_step2", "universal"])
def test_what_was_repaired_may_differ_from_the_record(tag: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(trained(NEWEST) / "stage1-2" / tag, tmp_path / tag))
    found = audit(path).checkpoint
    shard = next(one for one in found.shards if EXP_AVG_SQ in one.streams)
    change_elements(found, shard, EXP_AVG_SQ, 0, lambda bits: np.append(np.uint32(0x7FC00000), bits[1:]))  # NaN
    assert command_line.main(["repair", str(path), "--output", str(tmp_path / "new"), "--reset-moments"]) == 0
    assert audit(tmp_path / "new").verdict == REPAIRED


def test_what_is_not_as_recorded_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One flipped bit of a moment, which only the record detects, stops a conversion."""
    source = tmp_path / "stage1-2"
    shutil.copytree(trained(NEWEST) / "stage1-2" / "global_step2", source)
    found = zero_reader.read(source)
    change_elements(found, found.shards[0], EXP_AVG, 0, lambda bits: bits ^ np.uint32(1))
    assert command_line.main(["fingerprint", str(source)]) == 1
    assert command_line.main(["audit", str(source)]) == 1
    assert "not_as_recorded" in capsys.readouterr().out
    assert command_line.main(to_universal(source, tmp_path / "universal")) == 2
    assert "is not what the run recorded when it saved, and was not converted" in capsys.readouterr().err
    assert not (tmp_path / "universal").exists()
    assert ds_to_universal.main([*to_universal(source, tmp_path / "as_it_is")[1:], "--no_strict"]) == 0


def test_off_nothing_is_recorded_and_nothing_said(tmp_path: Path) -> None:
    _, log = output(NEWEST, "train", tmp_path, "stage1-1", ranks=2, env={"CKPT_PATCHES_FINGERPRINT": "0"})
    (file,) = (tmp_path / "stage1-1" / "global_step2").glob("*model_states.pt")
    assert "ckpt_patches_fingerprint" not in torch.load(file, weights_only=False)
    assert "resume verified" not in log


@pytest.mark.parametrize("off", [{"CKPT_PATCHES": "off"}, {"CKPT_PATCHES_FINGERPRINT": "0"}], ids=str)
def test_a_run_without_it_loads_such_a_checkpoint_as_ever(off: dict[str, str]) -> None:
    folder = trained(NEWEST) / "stage1-2"
    found, log = output(NEWEST, "resume", folder, ranks=2, env={**off, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"})
    assert exact(found[str(folder)])
    assert "resume verified" not in log


def test_a_record_that_a_run_without_it_has_saved_again_proves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record in client state that is loaded and saved again later proves nothing; the newest release refuses that."""
    folder = tmp_path / "stage1-1"
    output(OTHER, "train", tmp_path, folder.name, ranks=2)
    output(OTHER, "resume", folder, "--save", "again/stage1-1", ranks=2, env={"CKPT_PATCHES_FINGERPRINT": "0"})
    shutil.copy(folder / "live.pt", folder / "again" / "stage1-1")
    again = folder / "again" / "stage1-1"
    _, log = output(OTHER, "resume", again, ranks=2)
    said = "the record is of step 2, and the checkpoint of step 4: its run recorded nothing"
    assert "resume not verified" in log
    assert said in log
    assert command_line.main(["fingerprint", str(again / "global_step2")]) == 0
    assert said in capsys.readouterr().out


def test_states_on_a_disk_are_listed() -> None:
    """As of ZeRO-Infinity, whose optimizer has an empty tensor in place of them; they are not frozen."""
    module = torch.nn.Linear(4, 1, bias=False)
    its = {"ds_tensor": torch.ones(4), "ds_shape": (1, 4), "ds_numel": 4, "partition_numel": lambda: 4}
    vars(module.weight).update(its)
    groups = {"fp16_groups": [[module.weight]], "fp32_partitioned_groups_flat": [torch.empty(0)]}
    optimizer = SimpleNamespace(**groups, sub_group_to_group_id={0: 0}, dp_process_group=None)
    engine = SimpleNamespace(module=module, optimizer=optimizer, lr_scheduler=None, **dict.fromkeys(COUNTERS, 1))
    found = live(engine)
    assert (found.left_out, [*found.parts()]) == ({"weight": "its states are on a disk"}, [])
