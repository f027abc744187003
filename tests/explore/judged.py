"""Run one case of the explorer: train and save, convert where it loads a universal checkpoint, load, and judge."""

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, REPAIRED, WHOLE, audit
from ckpt_patches.demo.ranks import free_port
from ckpt_patches.engine.registry import FIXES
from ckpt_patches.errors import UserError
from explore.damaging import damage
from explore.spaces import SPACES, space_of
from upstream import run_json, tree

NOT_TRAINED, RIGHT, LOUD, SILENT = "not trained", "right", "loud", "SILENT"
UNIVERSAL = "universal"


@dataclass(frozen=True)
class Outcome:
    kind: str
    detail: str = ""  # the error, or what differs
    signature: str = ""  # of what is SILENT: the load, and of which kinds the things are that differ

    def __str__(self) -> str:
        return f"{self.kind} {self.signature or self.detail}".strip()


@dataclass(frozen=True)
class Stack:
    """What a case runs on."""

    package: str  # a name of SPACES
    version: str
    fixes: bool = True  # the import hook is on
    without: str = ""  # a fix that is switched off

    def __str__(self) -> str:
        fixes = f"without-{self.without}" if self.without else "on" if self.fixes else "off"
        return f"{self.package}-{self.version}-{fixes}"

    def run(self, *arguments: str | Path) -> dict[str, Any]:
        space = SPACES[self.package]
        others = [name for name in FIXES if name != self.without] if self.without else ()
        delivery = "hook" if self.fixes else "none"
        on: dict[str, Any] = {"tree": tree(space.distribution, self.version), "delivery": delivery, "fixes": others}
        found: dict[str, Any] = run_json(space.program, *arguments, **on, env=PERMISSIVE)
        return found


# Of a checkpoint that upstream's older releases cannot load with torch 2.6 and later: `torch_load_weights_only`.
PERMISSIVE = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}


def outcome(case: dict[str, Any], stack: Stack) -> Outcome:
    """What comes of a case. Where fixes are on for the load alone, the checkpoint is one that upstream saved."""
    load = case["load"]
    saving = replace(stack, version=load.get("saved_by") or stack.version)
    if load["old"]:
        saving = replace(saving, fixes=False, without="")
    with tempfile.TemporaryDirectory(prefix="explore-") as folder:
        file, saves = Path(folder, "case.json"), Path(folder, "saves")
        file.write_text(json.dumps(case))
        trained = saving.run("train", file, saves)
        if trained.get("hangs"):
            return Outcome(SILENT, signature="save: hangs")
        if "error" in trained:
            return Outcome(LOUD if "SaveFailed" in trained["error"] else NOT_TRAINED, trained["error"])
        kind, tag = load.get("kind", ""), saves / load["tag"]
        harmed = _harmed(case, saves, killed="killed" in trained)
        verdict = _verdict(tag) if harmed else ""
        whole = verdict in (WHOLE, REPAIRED)  # as a file of another step may be that has the same in it
        if whole and load["damage"] != "other step":
            return Outcome(SILENT, signature=f"audit: {verdict} in spite of {harmed}")
        if kind.endswith(UNIVERSAL) and (error := _converted(kind, tag, stack)):
            return Outcome(LOUD, error)
        found = _loaded(case, stack, file, saves)
        what = f"{space_of(case).loaded(case)}{f', {harmed}' if harmed else ''}"
        if "error" in found:
            return Outcome(LOUD, found["error"])
        if found.get("hangs"):
            return Outcome(SILENT, signature=f"{what}: hangs")
        if found["different"] and load["damage"] == "other step" and harmed and not whole:
            return Outcome(LOUD, f"the audit: {verdict} ({harmed}); no load notices it")
        all_fixes = stack.fixes and not stack.without  # no load mends what was saved without them
        if found["different"] and load["old"] and all_fixes and audit(tag, 1).verdict == DAMAGED:
            return Outcome(LOUD, "the audit: DAMAGED, as it was saved without the fixes")
        if found["different"] and load["some_ranks"]:
            without = replace(stack, fixes=False, without="").run("load", file, saves)
            if "error" in without or {*found["different"]} <= {*without.get("different", [])}:
                return Outcome(NOT_TRAINED, "upstream's own on ranks without the fixes")
        if found["different"]:
            kinds = sorted({_kind(name) for name in found["different"]})
            return Outcome(SILENT, ", ".join(found["different"][:20]), f"{what}: {', '.join(kinds)}")
        # Without optimizer states a checkpoint that lacks them loads right, too.
        partly = load["restore"] != "everything" and (not saving.fixes or bool(saving.without))
        return Outcome(RIGHT) if harmed or partly else _of_tools(tag)


def _harmed(case: dict[str, Any], saves: Path, killed: bool) -> str:
    """What is wrong with the checkpoint that is loaded: a file, which is damaged here, or its save was interrupted."""
    load = case["load"]
    tag, other = (saves / name for name in (("first", "last") if load["tag"] == "first" else ("last", "first")))
    if load["damage"]:
        name = damage(tag, other, load["damage"], load["file"])
        return f"{re.sub('[0-9]+', 'N', name)} {load['damage']}" if name else ""
    return "an interrupted save" if killed and load["tag"] == "last" else ""


def _verdict(tag: Path) -> str:
    """Of the audit, which refuses a folder without an optimizer's file."""
    try:
        return audit(tag, 1).verdict
    except UserError as error:
        return str(error)


def _loaded(case: dict[str, Any], stack: Stack, file: Path, saves: Path) -> dict[str, Any]:
    """What comes of the load: with the fixes on all ranks, or at the same time on rank 0 and without them on others."""
    if not case["load"]["some_ranks"]:
        return stack.run("load", file, saves)
    others, port = replace(stack, fixes=False, without=""), str(free_port())
    ranks = [str(rank) for rank in range(case["load"]["ranks"])]
    with tempfile.TemporaryDirectory() as told, ThreadPoolExecutor(2) as pool:
        more = ("--port", port, "--told", told, "--only")
        first = pool.submit(stack.run, "load", file, saves, *more, *ranks[:1])
        rest = pool.submit(others.run, "load", file, saves, *more, *ranks[1:])
        both = [first.result(), rest.result()]
    return next((one for one in both if "error" in one), next((one for one in both if "hangs" in one), both[0]))


def _converted(kind: str, tag: Path, stack: Stack) -> str:
    """Convert a checkpoint, by our converter or upstream's; the error, or nothing."""
    output = tag.with_name(f"{tag.name}_universal")
    if kind != UNIVERSAL:
        return str(stack.run("convert", tag, output).get("error", ""))
    command = [
        sys.executable,
        "-m",
        "ckpt_patches",
        "to-universal",
        "--input-folder",
        str(tag),
        "--output-folder",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CKPT_PATCHES": "off"})
    return done.stderr.strip()[-1000:] if done.returncode else ""


def _of_tools(tag: Path) -> Outcome:
    """What loads right is not damaged."""
    for folder in (tag, tag.with_name(f"{tag.name}_universal")):
        if folder.exists() and (report := audit(folder, 1)).verdict in (DAMAGED, INCOMPLETE):
            kinds = sorted({finding.kind.name for finding in report.findings})
            of = "universal checkpoint" if folder != tag else "checkpoint"
            return Outcome(SILENT, str(report.findings[:5])[:500], f"audit of a whole {of}: {', '.join(kinds)}")
    return Outcome(RIGHT)


def _kind(name: str) -> str:
    """Of a thing that differs: without the parameter's and the group's name."""
    first = name.split(" ")[0]
    if first in ("buffer", "counter", "next", "step"):
        return name if first in ("counter", "next") else first
    if first in ("group", "setting"):
        return f"{first}.{name.rpartition('.')[2]}"
    return ("later " if first == "later" else "") + name.rpartition(".")[2]
