"""`ckpt_patches.api`: the commands as functions."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_patches import api, fingerprint
from ckpt_patches.cli import main
from crafted_files import copied
from megatron_checkpoints import ZARR, written
from old_checkpoints import flattened, settings
from plain_runs import save
from test_audit import lose_first_moment
from zero_checkpoints import trained


@pytest.fixture
def zero() -> Path:
    return trained("0.19.8", "stage1")["stage1"]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A Megatron checkpoint that has lost a part of its first moments."""
    path = copied(written(ZARR).whole[-1], tmp_path)
    lose_first_moment(path)
    return path


@pytest.mark.parametrize("kind", [str, Path])
def test_an_audit_is_that_of_the_command(kind: type, damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--json-lines", str(damaged)]) == 1
    found = api.audit(kind(damaged))
    assert found.to_dict() == json.loads(capsys.readouterr().out)
    assert (found.verdict, found.ok) == ("DAMAGED", False)
    assert "lost_moment" in {finding["name"] for finding in found.findings}


def test_an_audit_of_a_sound_one(zero: Path) -> None:
    found = api.audit(zero)
    assert (found.verdict, found.ok) == ("WHOLE", True)


def test_a_trainers_folder_is_one_checkpoint(zero: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-2" / zero.name).symlink_to(zero)
    assert api.audit(tmp_path / "run" / "checkpoint-2").to_dict()["path"] == str(tmp_path / "run" / "checkpoint-2")
    with pytest.raises(api.UserError, match="expected one checkpoint, found a folder of several"):
        api.audit(tmp_path / "run")
    (tmp_path / "void").mkdir()
    with pytest.raises(api.UserError, match="expected one checkpoint, found none"):
        api.audit(tmp_path / "void")


CALLS: dict[str, Callable[[str, str], object]] = {
    "audit": lambda path, out: api.audit(path),
    "resume_from": lambda path, out: api.resume_from(path),
    "compare": lambda path, out: api.compare(path, path),
    "repair": lambda path, out: api.repair(path, out),
    "to_universal": lambda path, out: api.to_universal(path, out),
    "migrate": lambda path, out: api.migrate(path, out),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_missing_folder_is_not_found(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        CALLS[name](str(tmp_path / "absent"), str(tmp_path / "out"))
    with pytest.raises(FileNotFoundError):  # as of a variable that is not set
        CALLS[name]("", str(tmp_path / "out"))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        CALLS[name](str(tmp_path / "file"), str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_the_checkpoint_to_resume_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert api.resume_from(run) is None
    newest = save(run, 6, damaged=True)
    with pytest.raises(api.NoGoodCheckpointError, match="is verified as good, all are damaged or incomplete"):
        api.resume_from(run)
    older = save(run, 4)
    caplog.clear()
    assert api.resume_from(str(run)) == older
    assert [record.message for record in caplog.records if f"skipped {newest}: DAMAGED: not_finite" in record.message]
    assert api.resume_from(run, quick=True) == newest


def test_a_repair_and_comparisons(damaged: Path, tmp_path: Path) -> None:
    original = written(ZARR).whole[-1]
    with pytest.raises(api.UserError, match="--reset-moments"):
        api.repair(damaged, tmp_path / "none")
    found = api.repair(str(damaged), tmp_path / "copy", reset_moments=True)
    assert (found.ok, found.to_dict()["verdict"]) == (True, "REPAIRED")
    assert api.audit(tmp_path / "copy").ok
    different = api.compare(original, tmp_path / "copy")
    assert not different.ok
    assert {one["state"] for one in different.to_dict()["differences"]} == {"exp_avg", "exp_avg_sq"}
    assert api.compare(str(original), original).ok


def test_a_universal_checkpoint_has_the_same_state(zero: Path, tmp_path: Path) -> None:
    made = api.to_universal(zero, str(tmp_path / "universal"))
    assert made.bytes > 0
    assert api.compare(zero, tmp_path / "universal").ok


def test_a_migration(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"layer.weight": (6, 4)}
    fragments: dict[str, tuple[int, ...]] = {"layer.weight": (1, 2)}
    old = flattened(tmp_path / "iter_0000010", shapes, fragments, ranks=3)[0].write(settings())
    with pytest.raises(api.UserError, match="make it first"):
        api.migrate(old, tmp_path / "new" / "iter_0000010")
    (tmp_path / "new").mkdir()
    made = api.migrate(old, tmp_path / "new" / "iter_0000010")
    assert made.source_type != made.target_type
    assert api.audit(tmp_path / "new" / "iter_0000010").verdict == made.verdict


def test_a_resume_is_verified() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    record = fingerprint.of_training(model, optimizer)
    found = api.verify_resume(model, optimizer, record)
    assert (found.ok, found.differences) == (True, [])
    assert found.verified == 6  # two parameters with two moments each
    assert found.text.startswith("resume verified: ")
    optimizer.state[model.weight]["exp_avg"].zero_()
    found = api.verify_resume(model, optimizer, record)
    assert (found.ok, [(one.parameter, one.state) for one in found.differences]) == (False, [("weight", "exp_avg")])
    assert "all zeros" in found.text
    optimizer.param_groups[0]["weight_decay"] = 0.5
    assert [one.setting for one in api.verify_resume(model, optimizer, record).settings] == ["weight_decay"] * 2
    found = api.verify_resume(model, optimizer, None)
    assert (found.ok, found.verified) == (False, 0)
    assert found.not_verified
    optimizer.param_groups[0]["weight_decay"] = 0.01
    for states in optimizer.state.values():
        states.update({name: its.to_sparse() for name, its in states.items() if name != "step"})
    found = api.verify_resume(model, optimizer, record)
    assert (found.ok, found.verified, found.differences) == (False, 2, [])  # the weights alone


# The process of the caller


def printed(program: str, *arguments: str | Path) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_import_takes_no_slow_modules_along() -> None:
    """Those of the interpreter that take longer than the import itself may, and NumPy and torch."""
    program = "import sys; before = {*sys.modules}; import ckpt_patches.api; print(*{*sys.modules} - before)"
    slow = {"pathlib", "typing", "dataclasses", "inspect", "logging", "json", "numpy", "torch"}
    assert not slow & {*printed(program).split()}


FORKS = """
import os, sys, threading
from ckpt_patches import api

forks, fork = [], os.fork
os.fork = lambda: forks.append(1) or fork()
ready, done = threading.Event(), threading.Event()
if sys.argv[3] == "thread":
    threading.Thread(target=done.wait).start()
if sys.argv[3] == "device":  # a file that is on every machine, in place of a GPU's
    from ckpt_patches.runtime import processes
    processes._DEVICES = ("/dev/zero",)
    held = open("/dev/zero")
if sys.argv[3] == "group":
    import torch.distributed
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
assert api.compare(sys.argv[1], sys.argv[1], workers=2).ok
print(len(forks))
api.to_universal(sys.argv[1], sys.argv[2], workers=2)
print(len(forks))
done.set()
"""


@pytest.mark.slow
def test_a_process_that_must_not_be_forked_does_the_work_itself(zero: Path, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for kind in ("alone", "thread", "group", "device"):
        found[kind] = [*map(int, printed(FORKS, zero, tmp_path / kind, kind).split())]
        assert api.compare(zero, tmp_path / kind).ok
    assert found["alone"][0] >= 2  # otherwise the next line shows nothing
    assert found["alone"][1] > found["alone"][0]
    assert found["thread"] == found["group"] == found["device"] == [0, 0]


@pytest.mark.gpu
def test_a_context_of_cuda_must_not_be_forked() -> None:
    program = """
from ckpt_patches.runtime import processes
import torch
torch.ones(1, device="cuda")
print(processes.may_fork(), processes._has_device())
torch.cuda.is_initialized = lambda: False
print(processes._has_device())
"""
    assert printed(program).split() == ["False", "True", "True"]


@pytest.mark.slow
def test_a_type_checker_knows_the_results(tmp_path: Path) -> None:
    """As a user runs it, in strict mode."""
    pytest.importorskip("mypy", reason="mypy is not installed here")
    program = """
from pathlib import Path
from ckpt_patches import api
found: api.Audit = api.audit("path")
names: list[str] = [finding["name"] for finding in found.findings]
path: Path | None = api.resume_from(Path("run"), quick=True)
equal: bool = api.compare("one", Path("other")).ok
written: int = api.to_universal("path", "new").bytes
verdict: str = api.migrate("path", Path("new")).verdict
wrong: int = found.verdict
"""
    (tmp_path / "script.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Found 1 error in 1 file" in done.stdout, done.stdout
    assert 'script.py:10: error: Incompatible types in assignment (expression has type "str"' in done.stdout
