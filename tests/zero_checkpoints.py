"""Checkpoints that the universal converter's tests share, each written once per session, and comparisons of them."""

import functools
import json
from pathlib import Path
from typing import Any

import torch

from upstream import newest, once, run, run_json, shared_folder, tree

# Up to 0.15 DeepSpeed calls torch.load without weights_only and fails on torch 2.6 and later before it reaches the bug.
# To show the bug without any fix, this variable makes torch load as it used to; see torch_load_weights_only.
PERMISSIVE = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}

CRASH = "RuntimeError: narrow(): length must be non-negative."
KEYS = ("fp32", "exp_avg", "exp_avg_sq")


def session_folder() -> Path:
    """The folder that all processes of a session share."""
    return shared_folder()


def trained(version: str, *kinds: str) -> dict[str, Path]:
    """Folders that a real training run on 8 ranks wrote, by kind; `truth.pt` and `losses.json` are beside each."""
    return {kind: _trained(version, kind) / kind / "global_step2" for kind in kinds}


@functools.cache
def _trained(version: str, kind: str) -> Path:
    def train(out: Path) -> None:
        found = run_json("zero_resuming", "train", out, kind, "--ranks", "8", tree=tree("deepspeed", version))
        assert "error" not in found[kind], found

    return once(f"trained-by-{version}-{kind}", train)


def dp768() -> dict[str, Path]:
    """The DP=768 checkpoint of the report: `dp768` (stage 1) and `dp768_stage3`."""
    return {case: crafted(case) for case in ("dp768", "dp768_stage3")}


def of_ranks(count: int) -> Path:
    """A crafted stage-1 checkpoint of `count` ranks: three parameters over all ranks, without padding."""
    return crafted(str(count))


@functools.cache
def crafted(case: str) -> Path:
    """A checkpoint written without training, once per session."""

    def write(out: Path) -> None:
        run("write_parallel_checkpoint", out, case, tree=tree("deepspeed", newest("deepspeed")))

    return once(f"crafted-{case}", write) / case / "global_step7"


def convert(
    output: Path,
    *inputs: Path,
    version: str,
    delivery: str,
    options: tuple[str, ...] = (),
    fixes: tuple[str, ...] = (),
    by_upstream: bool = False,
) -> dict[str, Any]:
    """Convert as a program that calls DeepSpeed's `main`; return the error of every input ("" without one), by kind.

    With fixes, `main` hands over to ours, unless `by_upstream`.
    """
    way = () if by_upstream else ("--handed-over",)
    arguments: tuple[str | Path, ...] = (*inputs, "--output", output, *options, *way)
    env = PERMISSIVE if delivery == "none" else {}
    if delivery == "in place" and not by_upstream:
        env = {"CKPT_PATCHES": "warn"}  # what was written into the file asks for the mode
    root = tree("deepspeed", version)
    outcome = run_json("convert", *arguments, tree=root, delivery=delivery, fixes=fixes, env=env)
    assert isinstance(outcome, dict)
    return outcome


def converted(output: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The states in a universal folder, by parameter."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for folder in sorted((output / "zero").iterdir()):
        if folder.is_dir():
            loaded = {key: torch.load(folder / f"{key}.pt") for key in KEYS}
            states[folder.name] = {key: v["param"] if isinstance(v, dict) else v for key, v in loaded.items()}
    return states


def differences(found: dict[str, dict[str, torch.Tensor]], source: Path, *, in_order: bool = True) -> list[str]:
    """The states that are not bit-equal to those of the training run.

    With `in_order` false, the elements may have another order.
    """
    truth = torch.load(source.parent / "truth.pt")
    assert found.keys() == truth.keys()
    different = []
    for name, states in truth.items():
        for key in KEYS:
            one, other = found[name][key].flatten(), states[key].flatten()
            if not in_order:
                one, other = one.sort().values, other.sort().values
            if not one.equal(other):
                different.append(f"{name}.{key}: {one.numel()} elements, {other.numel()} in training")
    return different


def element_counts(found: dict[str, dict[str, torch.Tensor]]) -> dict[str, int]:
    return {name: states["fp32"].numel() for name, states in found.items()}


def losses(source: Path) -> list[float]:
    """The losses of the uninterrupted run in the steps after the checkpoint."""
    found: list[float] = json.loads((source.parent / "losses.json").read_text())
    return found
