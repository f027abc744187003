"""Run one case of the explorer: train, save, convert if the case loads a universal checkpoint, load, and judge."""

import json
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.audit.audit import DAMAGED, REPAIRED, WHOLE, audit
from explore import tools
from explore.damaging import ALTERED, LOST, OTHER_STEP, UNSEEN, damage
from explore.megatron_space import FROZEN
from explore.spaces import SPACES, space_of
from registered import FIXES
from trainers.ranks import free_port
from upstream import run_json, tree

NOT_TRAINED, RIGHT, LOUD, SILENT = "not trained", "right", "loud", "SILENT"
VERIFIED, DIFFERS = "resume verified", "resume differs"  # lines of the log begin with these
BUCKETS = ("dp_reshardable", "dp_zero_gather_scatter", "torch")  # Megatron's formats
FIRST = "first"  # the first of two saves
# Pipeline layers: one layer has no parameters, two may be frozen, and two may share their parameters.
UNTRAINED = tuple(f"layer_0{number}-model_states.pt absent" for number in (2, 3, 5))
SHARED = tuple(f"layer_0{number}-model_states.pt absent" for number in (0, 6))
SCALER = {"_scale", "_growth_tracker", "_hysteresis_tracker"}
REPAIRED_PART = "a repaired part"
# A line of the log gives one of these reasons why it is not verified.
NOT_VERIFIED = (
    "it has no state yet",
    "this state dict is not one that",
    "with tensor parallelism DeepSpeed does not record",
)
UNIVERSAL, UPSTREAMS = "universal", "upstream's universal"


@dataclass(frozen=True)
class Outcome:
    kind: str
    detail: str = ""  # the error or the differences
    signature: str = ""  # for SILENT: the load, and the kinds of the differing items

    def __str__(self) -> str:
        return f"{self.kind} {self.signature or self.detail}".strip()


@dataclass(frozen=True)
class Stack:
    """The software that runs a case."""

    package: str  # a name in SPACES
    version: str
    fixes: bool = True  # the import hook is on
    without: str = ""  # a fix that is off, or several with commas
    fingerprint: bool = False  # CKPT_PATCHES_FINGERPRINT is set

    def __str__(self) -> str:
        fixes = f"without-{self.without}" if self.without else "on" if self.fixes else "off"
        return f"{self.package}-{self.version}-{fixes}"

    @property
    def tree(self) -> Path:
        return tree(SPACES[self.package].DISTRIBUTION, self.version)

    def run(self, *arguments: str | Path) -> dict[str, Any]:
        others = [name for name in FIXES if name not in self.without.split(",")] if self.without else ()
        delivery = "hook" if self.fixes else "none"
        recording = {"CKPT_PATCHES_FINGERPRINT": "warn"} if self.fingerprint else {}
        permissive = {} if self.fixes else PERMISSIVE
        on: dict[str, Any] = {"tree": self.tree, "delivery": delivery, "fixes": others}
        found: dict[str, Any] = run_json(
            SPACES[self.package].PROGRAM, *arguments, **on, env={**permissive, **recording}
        )
        return found


# Older upstream releases cannot load the checkpoint with torch 2.6 and later. See `torch_load_weights_only`.
PERMISSIVE = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}


def outcome(case: dict[str, Any], stack: Stack) -> Outcome:
    """Run a case and judge it. The save, or the load, may be that of upstream without the fixes."""
    load = case["load"]
    stack = replace(stack, fingerprint=load["fingerprint"] and stack.fixes)
    saving = replace(stack, version=load.get("saved_by") or stack.version)
    if load["old"]:
        saving = replace(saving, fixes=False, without="", fingerprint=False)
    if load["by_upstream"]:
        stack = replace(stack, fixes=False, without="", fingerprint=False)
    with tempfile.TemporaryDirectory(prefix="explore-") as folder:
        file, saves = Path(folder, "case.json"), Path(folder, "saves")
        file.write_text(json.dumps(case))
        trained = saving.run("train", file, saves)
        if trained.get("hangs"):
            return Outcome(SILENT, signature="save: hangs")
        if "error" in trained:
            return Outcome(LOUD if "SaveFailed" in trained["error"] else NOT_TRAINED, trained["error"])
        tag = saves / load["tag"]
        harm = _harm(case, saves, killed="killed" in trained)
        if harm.is_whole and load["damage"] not in UNSEEN:
            if harm.what in UNTRAINED or (case["run"].get("tied") and harm.what in SHARED):
                return Outcome(NOT_TRAINED, "known limit: no file states which layers without own parameters exist")
            return Outcome(SILENT, signature=f"audit: {harm.verdict} in spite of {harm.what}")
        if load["repaired"] and harm.verdict == DAMAGED and tools.repaired(tag, saves / FIRST):
            harm = Harm(REPAIRED_PART, REPAIRED)
        elif load["repaired"]:  # the load must not expect a repaired file
            file.write_text(json.dumps({**case, "load": {**load, "repaired": False}}))
        if unusable := _converted(case, tag, stack):
            return unusable
        return of_load(Tried(case, stack, saving, tag, harm), _loaded(case, stack, file, saves), file)


class Harm(NamedTuple):
    """The damage to the loaded checkpoint and the audit's verdict. Both are empty for a complete checkpoint."""

    what: str = ""
    verdict: str = ""

    @property
    def is_whole(self) -> bool:
        return self.verdict in (WHOLE, REPAIRED)


class Tried(NamedTuple):
    """A case and the stacks that saved and loaded it."""

    case: dict[str, Any]
    stack: Stack
    saving: Stack
    tag: Path  # the checkpoint
    harm: Harm


def _harm(case: dict[str, Any], saves: Path, killed: bool) -> Harm:
    """Damage a file, or describe a file that changed during the save or an interrupted save."""
    load = case["load"]
    tag, other = (saves / name for name in (("first", "last") if load["tag"] == "first" else ("last", "first")))
    what = "an interrupted save" if killed and load["tag"] == "last" else ""
    if load["damage"] == ALTERED:
        what = "an altered element"
    elif load["damage"] in LOST:
        what = f"{load['damage']} in a part"
    elif load["damage"]:
        name = damage(tag, other, load["damage"], load["file"], without_zero=case["run"].get("stage") == 0)
        what = f"{name} {load['damage']}" if name else ""
        what = what if what in (*UNTRAINED, *SHARED) else re.sub("[0-9]+", "N", what)
    return Harm(what, tools.verdict(tag)) if what else Harm()


def of_load(tried: Tried, found: dict[str, Any], file: Path) -> Outcome:
    load, harm = tried.case["load"], tried.harm
    what = f"{space_of(tried.case).loaded(tried.case)}{f', {harm.what}' if harm.what else ''}"
    if "error" in found:
        return Outcome(LOUD, found["error"])
    if found.get("hangs"):
        if load["some_ranks"]:
            return Outcome(NOT_TRAINED, "known limit: a fix that communicates waits for ranks without the fixes")
        return Outcome(SILENT, signature=f"{what}: hangs")
    lines = [line for begin in (DIFFERS, VERIFIED) for line in found["proof"] if line.startswith(begin)]
    proof = lines[0] if lines else ""  # several lines, such as optimizer and scheduler, may differ; use one
    if different := found["different"]:
        if noticed := _noticed(tried, different, proof, file):
            return noticed
        kinds = sorted({_kind(name) for name in different})
        return Outcome(SILENT, ", ".join(different[:20]), f"{what}: {', '.join(kinds)}")
    if harm.what == REPAIRED_PART:  # the fingerprint reports that the repaired part differs
        return Outcome(RIGHT)
    if proof.startswith(DIFFERS):
        return Outcome(SILENT, "\n".join(found["proof"]), f"{what}: fingerprints differ, and no state does")
    to_prove = tried.saving.fingerprint and tried.stack.fixes and load["restore"] in ("everything", "without scheduler")
    if to_prove and not proof and not any(why in line for line in found["proof"] for why in NOT_VERIFIED):
        return Outcome(SILENT, "\n".join(found["proof"]), f"{what}: a right load is not verified")
    # A load without optimizer states is also right if the checkpoint lacks them.
    partly = load["restore"] != "everything" and (not tried.saving.fixes or bool(tried.saving.without))
    if harm.what or partly:
        return Outcome(RIGHT)
    against, detail = tools.objections(tried.tag)
    if against and load["old"] and outcome({**tried.case, "load": {**load, "old": False}}, tried.stack).kind == RIGHT:
        return Outcome(NOT_TRAINED, "upstream's own, of a save without the fixes: its files are wrong")
    return Outcome(SILENT, detail, against) if against else Outcome(RIGHT)


def _noticed(tried: Tried, different: list[str], proof: str, file: Path) -> Outcome | None:
    """The outcome if a tool noticed the difference after a load, or if the part without fixes caused it."""
    load, harm, stack = tried.case["load"], tried.harm, tried.stack
    if load["damage"] and harm.what and harm.what != REPAIRED_PART:
        if proof.startswith(DIFFERS):
            return Outcome(LOUD, f"the fingerprint: {DIFFERS} ({harm.what})")
        if load["damage"] in UNSEEN and (limit := _limit(tried.case, different)):
            return Outcome(NOT_TRAINED, f"known limit: {limit}")
        return None if harm.is_whole else Outcome(LOUD, f"the audit: {harm.verdict} ({harm.what}); no load notices it")
    all_fixes = stack.fixes and not stack.without  # no load repairs a checkpoint saved without the fixes
    if load["old"] and all_fixes and audit(tried.tag, 1).verdict == DAMAGED:
        return Outcome(LOUD, "the audit: DAMAGED, as it was saved without the fixes")
    if load["some_ranks"] or (load["old"] and all_fixes):
        without = replace(stack, fixes=False, without="").run("load", file, tried.tag.parent)
        # A state that some ranks have and others lack is not the one of either load.
        named = _kind if load["some_ranks"] else str
        if "error" in without or {*map(named, different)} <= {*map(named, without.get("different", []))}:
            return Outcome(NOT_TRAINED, "upstream's own, of a save or of ranks without the fixes")
    if load["by_upstream"]:
        own = _of_upstream(tried)
        wrong = own.get("different", [])
        # A load that is wrong at once is not trained further.
        is_wrong_later = bool(wrong) and all(name.startswith(("later ", "next ")) for name in different)
        if "error" in own or {*different} <= {*wrong} or is_wrong_later:
            return Outcome(NOT_TRAINED, "upstream's own, of a load without the fixes")
    return None


def _of_upstream(tried: Tried) -> dict[str, Any]:
    """The result of a load without the fixes of what upstream saves without them."""
    with tempfile.TemporaryDirectory(prefix="explore-") as folder:
        file, saves = Path(folder, "case.json"), Path(folder, "saves")
        file.write_text(json.dumps(tried.case))
        trained = replace(tried.saving, fixes=False, without="", fingerprint=False).run("train", file, saves)
        if "error" in trained:
            return trained
        if unusable := _converted(tried.case, saves / tried.case["load"]["tag"], tried.stack):
            return {"error": str(unusable)}
        return tried.stack.run("load", file, saves)


def _limit(case: dict[str, Any], different: list[str]) -> str:
    """The reason that neither audit nor fingerprint can notice the damage (reference/limits.md)."""
    kinds = {_kind(name) for name in different}
    if case["package"] == "megatron" and kinds <= SCALER:
        return "the loss scale in the common file of another iteration, which only a folder's name tells"
    if case["load"]["damage"] == OTHER_STEP and case["run"].get("format") in BUCKETS:
        return "a rank's file of another step: no file states where a weight's main parameter is"
    if case["load"]["damage"] == OTHER_STEP and case["run"].get("optimizer") in ("SGD", "momentum"):
        return "a file of another step: SGD's states name none (docs/reference/findings.md)"
    if kinds == {"buffer"}:
        return "a buffer, which no tool compares (docs/reference/findings.md)"
    if kinds != {"weight"}:
        return ""
    if case["run"].get("stage") == 0:
        return "a weight without ZeRO, which no tool compares (docs/reference/formats.md)"
    if case["package"] != "megatron":
        return ""
    if case["run"]["format"] in BUCKETS:
        return "a weight, and no file states where its main parameter is"
    frozen = case["run"]["frozen"] and all(any(part in name for part in FROZEN) for name in different)
    return "a frozen weight, which the optimizer does not have" if frozen else ""


def _loaded(case: dict[str, Any], stack: Stack, file: Path, saves: Path) -> dict[str, Any]:
    """Load and return the result. Either all ranks have the fixes, or only rank 0 has them."""
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


def _converted(case: dict[str, Any], tag: Path, stack: Stack) -> Outcome | None:
    """Convert or migrate a checkpoint. Return None on success. Use both converters if the case requires it."""
    if case["load"].get("migrated"):
        return Outcome(LOUD, error) if (error := tools.migrated(tag)) else None
    if not case["load"].get("kind", "").endswith(UNIVERSAL):
        return None
    convert: dict[str, Callable[[Path, Path], str]] = {
        UNIVERSAL: lambda tag, output: tools.to_universal(tag, output, stack.tree),
        UPSTREAMS: lambda tag, output: str(stack.run("convert", tag, output).get("error", "")),
    }
    first = case["load"]["kind"]
    outputs = {first: tools.universal(tag)}
    if case["load"]["both_converters"]:
        outputs[UPSTREAMS if first == UNIVERSAL else UNIVERSAL] = tools.universal(tag, "other")
    errors = [convert[kind](tag, output) for kind, output in outputs.items()]
    if errors[0]:
        return Outcome(LOUD, errors[0])
    if not any(errors) and len(outputs) == 2 and (different := tools.unlike(*outputs.values())):
        states = sorted({name.rpartition("/")[2] for name in different})
        return Outcome(SILENT, ", ".join(different[:20]), f"the two converters: {', '.join(states)}")
    return None


def _kind(name: str) -> str:
    """The kind of a differing item: its name without the names of the parameter and the group."""
    first = name.split(" ")[0]
    if first in ("buffer", "counter", "next", "step"):
        return name if first in ("counter", "next") else first
    if first in ("group", "setting"):
        return f"{first}.{name.rpartition('.')[2]}"
    return ("later " if first == "later" else "") + name.rpartition(".")[2]
