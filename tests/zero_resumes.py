"""Train and resume at every ZeRO stage, for tests of the bugs there."""

import json
from pathlib import Path
from typing import Any

from upstream import once, run, tree
from zero_checkpoints import PERMISSIVE

PROGRAM = "zero_resuming"
KINDS = (
    "stage0", "stage0_fp16", "stage1", "bf16_optimizer", "stage1_fp16", "stage2", "stage2_fp16", "stage3",
    "stage3_fp16",
)  # fmt: skip
Found = dict[str, dict[str, Any]]


def trained(version: str, delivery: str, *cases: str, ranks: int = 2, nodes: int = 1) -> Path:
    """The folder with the checkpoints of training runs, by case; created once per session."""
    name = f"zero-{version}-{delivery.replace(' ', '-')}-{ranks}-{nodes}-{'-'.join(cases)}"

    def train(folder: Path) -> None:
        output = _run("train", folder, *cases, version=version, delivery=delivery, ranks=ranks, nodes=nodes)
        found = _json(output)
        (folder / "trained.json").write_text(json.dumps(found))

    return once(name, train)


def optimizers(folder: Path) -> dict[str, str]:
    """The optimizer of each training run, or its error, by case."""
    found = json.loads((folder / "trained.json").read_text())
    return {case: one.get("optimizer") or one["error"] for case, one in found.items()}


def resumed(version: str, delivery: str, *folders: Path, **keywords: Any) -> list[dict[str, Any]]:
    """The result of a resume from each of these checkpoints; `keywords` are those of `output_of_resume`."""
    found = _json(output_of_resume(version, delivery, *folders, **keywords))
    return [found[str(folder)] for folder in folders]


def output_of_resume(
    version: str,
    delivery: str,
    *folders: Path,
    ranks: int = 2,
    nodes: int = 1,
    tag: str = "",
    states: bool = True,
) -> str:
    """The output of such a resume; its last line has the results."""
    options = [*(("--tag", tag) if tag else ()), *([] if states else ["--no-states"])]
    return _run("resume", *folders, *options, version=version, delivery=delivery, ranks=ranks, nodes=nodes)


def exact(found: dict[str, Any]) -> bool:
    """Whether a resume restored every bit of the saved state and continues like the uninterrupted run."""
    if "error" in found:
        return False
    return bool(found["different"] == found["different_end"] == [] and found["losses"] == found["expected"])


def _run(*arguments: str | Path, version: str, delivery: str, ranks: int, nodes: int) -> str:
    """Run the program; without the fixes, torch loads as it used to, so that the bug is reached."""
    env = PERMISSIVE if delivery == "none" else {}
    options = ("--ranks", str(ranks), "--node", str(ranks // nodes))
    on: dict[str, Any] = {"tree": tree("deepspeed", version), "delivery": delivery, "env": env}
    return run(PROGRAM, *arguments, *options, **on).stdout


def _json(output: str) -> Found:
    found: Found = json.loads(output.strip().splitlines()[-1])
    return found
