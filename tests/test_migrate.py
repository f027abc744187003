"""Old Megatron checkpoints, migrated: later releases of the real megatron-core load them and go on, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest

import shared
from ckpt_patches import cli
from upstream import all_releases, run, tree

MODEL_SPACE = "fully_sharded_model_space"


def exact_resume(version: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    done = run("exact_resume", folder, *options, tree=tree("megatron-core", version))
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def saved_by(version: str, inner: str, optimizer: str, *formats: str) -> Path:
    """A folder for each optimizer's name, in it one for each format, and how the run went on."""
    options = ("--inner", inner, "--optimizers", optimizer, "--formats", ",".join(formats), "--only", "save")
    name = f"to-migrate-{version}-{inner}-{optimizer}-{'-'.join(formats)}"
    return shared.once(name, lambda folder: exact_resume(version, folder, *options))


def migrated(saved: Path, optimizer: str, old: str, new: str, out: Path) -> Path:
    """The same folder, with the checkpoint of a format migrated to another one in place of those that were saved."""
    folder = out / optimizer
    folder.mkdir(parents=True)
    (folder / "reference.pt").symlink_to(saved / optimizer / "reference.pt")
    assert cli.main(["migrate", str(saved / optimizer / old), "--output", str(folder / new)]) == 0
    return out


LOADED_BY = ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2") if all_releases() else ("0.16.1", "0.19.2")


@pytest.mark.parametrize("version", LOADED_BY)
@pytest.mark.parametrize("inner", ["fused", "torch"] if all_releases() else ["fused"])
@pytest.mark.parametrize("old", ["0.13.1", "0.14.0", "0.15.3"] if all_releases() else ["0.14.0"])
def test_flattened_torch_dist_resumes_exactly(old: str, inner: str, version: str, tmp_path: Path) -> None:
    saved = saved_by(old, inner, "plain", MODEL_SPACE)
    out = migrated(saved, "plain", MODEL_SPACE, "fully_reshardable", tmp_path)
    options = ("--formats", "fully_reshardable", "--inner", inner, "--only", "resume")
    rows = exact_resume(version, out, *options)
    assert [(row["ranks"], row["result"]) for row in rows] == [(2, "bit-equal"), (4, "bit-equal")]
