"""CKPT_PATCHES_FINGERPRINT: if off, nothing is computed or recorded; `warn` logs what is wrong and continues."""

from pathlib import Path
from typing import Any

import pytest
from megatron_patches.fingerprint_megatron import layer_wise_optimizer

from ckpt_patches.cli import command_line
from ckpt_patches.engine.source import Source
from upstream import checkpoint_formats, newest, run, tree

pytestmark = pytest.mark.slow

NEWEST = newest("megatron-core")


def resumed(folder: Path, what: str, formats: str, version: str = NEWEST, **env: str) -> tuple[list[str], str]:
    """The rows of a save or a resume of a plain optimizer, and the log."""
    arguments = ("--formats", formats, "--only", what, "--resume-ranks", "2")
    on: dict[str, Any] = {"tree": tree("megatron-core", version), "delivery": "hook"}
    done = run("exact_resume", folder, *arguments, env=env, **on)
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("off", [{}, {"CKPT_PATCHES_FINGERPRINT": "0"}], ids=str)
def test_off_nothing_is_recorded_and_a_load_verifies_nothing(off: dict[str, str], tmp_path: Path) -> None:
    formats = checkpoint_formats(NEWEST)
    _, log = resumed(tmp_path, "save", ",".join(formats), **off)
    assert "ckpt_patches_fingerprint" not in log
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > len(formats)
    assert [file for file in files if b"ckpt_patches_fingerprint" in file.read_bytes()] == []
    rows, log = resumed(tmp_path, "resume", ",".join(formats), CKPT_PATCHES_FINGERPRINT="1")
    assert [row for row in rows if '"bit-equal"' not in row] == []
    assert log.count("resume not verified") == len(formats)
    assert "it has no fingerprint: it was saved without CKPT_PATCHES_FINGERPRINT" in log


def test_a_run_without_it_loads_a_checkpoint_with_a_record(tmp_path: Path) -> None:
    """A run without this package loads it, too: the record is one more key of the common state."""
    formats = checkpoint_formats(NEWEST)
    resumed(tmp_path, "save", ",".join(formats), CKPT_PATCHES_FINGERPRINT="1")
    for off in ({}, {"CKPT_PATCHES": "off"}):
        rows, log = resumed(tmp_path, "resume", ",".join(formats), **off)
        assert len(rows) == len(formats)
        assert [row for row in rows if '"bit-equal"' not in row] == []
        assert "resume verified" not in log


def test_a_layer_wise_optimizer_that_loads_as_any_chain_does_is_recorded() -> None:
    """As in commits on the way to 0.16.0."""
    file = "megatron/core/optimizer/layer_wise_optimizer.py"
    release = Source((tree("megatron-core", "0.16.0") / file).read_bytes(), file)
    release.remove(release.function("LayerWiseDistributedOptimizer.load_state_dict"))
    commit = Source(release.edited(), file)
    layer_wise_optimizer(commit)
    assert commit.edited().count(b"@run_megatron.") == 1


def test_a_resume_goes_on_with_warn(tmp_path: Path) -> None:
    on: dict[str, Any] = {"tree": tree("megatron-core", NEWEST), "delivery": "hook"}
    folder = tmp_path / "out"
    bug = {"CKPT_PATCHES_SKIP": "async_save_staging"}
    run("damaged_saving", folder, "step", env={**bug, "CKPT_PATCHES_FINGERPRINT": "1"}, **on)
    done = run("damaged_saving", folder, "load-step", env={"CKPT_PATCHES_FINGERPRINT": "warn"}, **on)
    assert "WARNING: resume differs: " in done.stderr
    assert command_line.main(["fingerprint", str(folder)]) == 1
