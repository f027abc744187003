"""Resumes of ZeRO-3 runs from universal checkpoints, for the tests of what goes wrong there."""

import functools
import json
from pathlib import Path
from typing import Any

import shared
from upstream import run, run_json, tree
from zero_checkpoints import PERMISSIVE, convert


def saved(version: str, kind: str, ranks: int) -> Path:
    """The folder of a training: its checkpoint, what it held then and at the end, and `universal`, converted."""
    return _saved(version, kind, ranks) / kind


@functools.cache
def _saved(version: str, kind: str, ranks: int) -> Path:
    """By an unpatched release; what its converter does wrong is another fix's concern."""

    def train(out: Path) -> None:
        run("zero_training", "write", out, kind, "--ranks", str(ranks), tree=tree("deepspeed", version))
        converted = convert(out / "converted", out / kind / "global_step2", version=version, delivery="hook")
        assert converted == {kind: ""}
        (out / "converted" / kind).rename(out / kind / "universal")

    return shared.once(f"zero3-of-{version}-{kind}-{ranks}", train)


def resumed(version: str, kind: str, ranks: int, delivery: str, *options: str, **keywords: Any) -> dict[str, Any]:
    """What a run holds after the load, and how it goes on from there."""
    folder = saved(version, kind, ranks)
    arguments: tuple[str | Path, ...] = ("resume", folder, "universal", kind, "--ranks", str(ranks), *options)
    env = PERMISSIVE if delivery == "none" else {}
    found = run_json(
        "zero_training", *arguments, tree=tree("deepspeed", version), delivery=delivery, env=env, **keywords
    )
    assert isinstance(found, dict)
    return found


def uninterrupted(version: str, kind: str, ranks: int) -> dict[str, Any]:
    """What `resumed` is to be: every bit of masters, moments, steps and settings, and the next losses."""
    return kept(saved(version, kind, ranks))


def kept(folder: Path) -> dict[str, Any]:
    """What a resume from a training's folder is to be."""
    losses, settings = (json.loads((folder / f"{name}.json").read_text()) for name in ("losses", "settings"))
    return {"different": [], "losses": losses, "settings": settings, "different_end": []}


@functools.cache
def continued(version: str, kind: str, ranks: int, delivery: str) -> Path:
    """The folder of a run that loads the universal checkpoint, trains on, and saves: as that of `saved`."""
    begin = saved(version, kind, ranks) / "universal"
    options: tuple[str | Path, ...] = ("--ranks", str(ranks), "--universal", begin)

    def train(out: Path) -> None:
        env = PERMISSIVE if delivery == "none" else {}
        run("zero_training", "write", out, kind, *options, tree=tree("deepspeed", version), delivery=delivery, env=env)
        (out / kind / "global_step2").rename(out / kind / "global_step4")  # which is the step that it is at

    return shared.once(f"zero3-on-of-{version}-{kind}-{ranks}-{delivery}", train) / kind
