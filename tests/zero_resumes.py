"""Trainings and resumes at every ZeRO stage, for the tests of what goes wrong there."""

import json
from pathlib import Path
from typing import Any

import shared
from upstream import run, tree
from zero_checkpoints import PERMISSIVE

PROGRAM = "zero_resuming"
KINDS = (
    "stage0", "stage0_fp16", "stage1", "bf16_optimizer", "stage1_fp16", "stage2", "stage2_fp16", "stage3",
    "stage3_fp16",
)  # fmt: skip
Found = dict[str, dict[str, Any]]


def trained(version: str, delivery: str, *cases: str, ranks: int = 2, nodes: int = 1) -> Path:
    """The folder with the checkpoints of trainings, by case; made once a session."""
    name = f"zero-{version}-{delivery.replace(' ', '-')}-{ranks}-{nodes}-{'-'.join(cases)}"

    def train(folder: Path) -> None:
        output = _run("train", folder, *cases, version=version, delivery=delivery, ranks=ranks, nodes=nodes)
        found = _json(output)
        (folder / "trained.json").write_text(json.dumps(found))

    return shared.once(name, train)


def optimizers(folder: Path) -> dict[str, str]:
    """By case, the optimizer that a training has had; or the error of which it died."""
    found = json.loads((folder / "trained.json").read_text())
    return {case: one.get("optimizer") or one["error"] for case, one in found.items()}


def resumed(version: str, delivery: str, *folders: Path, **keywords: Any) -> list[dict[str, Any]]:
    """What came of a resume from each of those checkpoints; the keywords are those of `output_of_resume`."""
    found = _json(output_of_resume(version, delivery, *folders, **keywords))
    return [found[str(folder)] for folder in folders]


def output_of_resume(
    version: str,
    delivery: str,
    *folders: Path,
    ranks: int = 2,
    nodes: int = 1,
    tag: str = "",
    spoil: int | None = None,
    states: bool = True,
) -> str:
    """All that such a program prints, the last line of which has the results. `spoil` is a rank to damage."""
    options = [*(("--tag", tag) if tag else ()), *(("--spoil", str(spoil)) if spoil is not None else ())]
    options += [] if states else ["--no-states"]
    return _run("resume", *folders, *options, version=version, delivery=delivery, ranks=ranks, nodes=nodes)


def exact(found: dict[str, Any]) -> bool:
    """Whether a resume gave every bit of what was saved, and goes on as the run that was not interrupted."""
    if "error" in found:
        return False
    return bool(found["different"] == found["different_end"] == [] and found["losses"] == found["expected"])


def _run(*arguments: str | Path, version: str, delivery: str, ranks: int, nodes: int) -> str:
    """Without the fixes torch is told to load as it used to, so that the bug is reached."""
    env = PERMISSIVE if delivery == "none" else {}
    options = ("--ranks", str(ranks), "--node", str(ranks // nodes))
    on: dict[str, Any] = {"tree": tree("deepspeed", version), "delivery": delivery, "env": env}
    return run(PROGRAM, *arguments, *options, **on).stdout


def _json(output: str) -> Found:
    found: Found = json.loads(output.strip().splitlines()[-1])
    return found
