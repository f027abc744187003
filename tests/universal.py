"""Run our one-pass converter, and compare its output with that of upstream's fixed converter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from upstream import TIMEOUT, newest, run_json, tree
from zero_checkpoints import convert, crafted

MODULE = "deepspeed_patches.ds_to_universal"


def command(source: Path, output: Path, *options: str | Path) -> list[str]:
    folders = ("--input_folder", source, "--output_folder", output)
    return [sys.executable, "-m", MODULE, *map(str, (*folders, *options))]


def environment(version: str = newest("deepspeed"), **more: str) -> dict[str, str]:
    """The environment variables that make a DeepSpeed release importable."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE") and not k.startswith("SLURM_")}
    return {**kept, "PYTHONPATH": str(tree("deepspeed", version)), **more}


def ours(
    source: Path,
    output: Path,
    *options: str | Path,
    version: str = newest("deepspeed"),
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(source, output, *options),
        env={**environment(version), **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def check_refused(folder: Path, out: Path, *expected: str, version: str = "0.19.8") -> None:
    """Check that the converter refuses a folder in one line and writes nothing."""
    done = ours(folder, out / "universal", version=version, check=False)
    assert done.returncode == 2, done.stdout
    assert all(text in done.stderr for text in expected), done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the value in a file of torch.save."""
    state = load(path)
    change(state)
    save(state, path)


def load(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=False)


def value_of(path: Path) -> Any:
    """The tensor in a file of a universal checkpoint."""
    value = load(path)
    return value["param"] if isinstance(value, dict) else value


def save(state: Any, path: Path) -> None:
    import torch

    torch.save(state, path)


def summary(source: Path, output: Path, *options: str | Path, **keywords: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ours(source, output, "--json", *options, **keywords).stdout)
    return found


def differences(pairs: Sequence[tuple[Path, Path]], version: str = newest("deepspeed")) -> dict[str, list[str]]:
    """The differences of (upstream's, our) universal checkpoints, loaded as this DeepSpeed release does."""
    arguments = [f"{upstream}:{own}" for upstream, own in pairs]
    found: dict[str, list[str]] = run_json("same_universal", *arguments, tree=tree("deepspeed", version))
    return found


def both(output: Path, *sources: Path, version: str) -> dict[str, list[str]]:
    """Convert checkpoints with both converters; return the differences by checkpoint name."""
    outcome = convert(output / "upstream", *sources, version=version, delivery="hook", by_upstream=True)
    assert set(outcome.values()) == {""}, outcome
    pairs = []
    for source in sources:
        name = source.parent.name
        ours(source, output / "ours" / name, version=version)
        pairs.append((output / "upstream" / name, output / "ours" / name))
    found = differences(pairs, version)
    return {Path(name).name: different for name, different in found.items()}


def parallel(*cases: str) -> dict[str, Path]:
    """Checkpoints of tensor- and pipeline-parallel models, written once per session."""
    return {case: crafted(case) for case in cases}


def files(folder: Path) -> dict[str, bytes]:
    """The bytes of all files below a folder, by every name that they have."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def distinct(folder: Path) -> int:
    """The number of files below a folder, with hard links counted once, and without hidden files."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return len({path.stat().st_ino for path in found})
