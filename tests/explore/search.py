"""An exploration draws and judges cases until a deadline, shrinks SILENT cases, and keeps its state in a file."""

import json
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_patches.runtime.durable import replace_durably
from explore.corpus import causes, keep, kept, silent_fixes
from explore.judged import LOUD, NOT_TRAINED, RIGHT, SILENT, Outcome, Stack, outcome
from explore.spaces import SPACES, described, plainer, steps_to_plain

SAME = 2  # the number of cases per signature that the search shrinks
AT_ONCE = 2
WITHOUT_FIXES = {"fingerprint", "old", "some_ranks", "by_upstream"}  # of a load


class Exploration:
    """The progress of an exploration on a stack with a seed. A file keeps it after each case."""

    def __init__(self, file: Path, seed: str, stack: Stack) -> None:
        self.file, self.seed, self.stack = file, seed, stack
        kept = json.loads(file.read_text()) if file.exists() else {}
        self.next: int = kept.get("next", 0)
        self.counts: Counter[str] = Counter(kept.get("counts", {}))
        self.errors: Counter[str] = Counter(kept.get("errors", {}))
        self.silent: list[dict[str, Any]] = kept.get("silent", [])
        self.found: list[str] = kept.get("found", [])
        self.off = [] if stack.fixes else silent_fixes(stack)
        self.lock = threading.Lock()

    def run(self, deadline: float) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda _: self._until(deadline), range(AT_ONCE)))

    def _until(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            with self.lock:
                number, self.next = self.next, self.next + 1
            self.take(f"{self.seed}-{number}")

    def now(self) -> Stack:
        """The stack of the next case: a fix that is off is on as soon as its bug is found."""
        left = ",".join(fix for fix in self.off if fix not in self.found)
        return replace(self.stack, fixes=True, without=left) if self.off else self.stack

    def take(self, name: str) -> None:
        case = SPACES[self.stack.package].drawn(name, self.stack.version)
        if self.off:  # what would name the bug, or show it whatever fix is on
            case["load"] |= dict.fromkeys(WITHOUT_FIXES & case["load"].keys(), False)
        found = _outcome(case, self.now())
        with self.lock:
            self.counts[found.kind] += 1
            if found.kind in (LOUD, NOT_TRAINED):
                self.errors[f"{found.kind}: {_without_numbers(found.detail)}"] += 1
            seen = sum(one["signature"] == found.signature for one in self.silent)
            one: dict[str, Any] = {"name": name, "signature": found.signature, "detail": found.detail, "case": case}
            if found.kind == SILENT:
                self.silent.append(one)
        if found.kind == SILENT and seen < SAME:
            self.explain(one, case)
        with self.lock:
            state = {name: getattr(self, name) for name in ("next", "counts", "errors", "silent", "found")}
            replace_durably(self.file, json.dumps(state, indent=1).encode())

    def explain(self, one: dict[str, Any], case: dict[str, Any]) -> None:
        """Find the causes of a SILENT case. Shrink and keep it unless the corpus has a case of them."""
        name, stack = one["name"], self.now()
        fixes = causes(case, stack)
        alone = replace(stack, without=",".join(fixes))
        found = _outcome(case, alone)
        shown, known = f"SILENT {name} {found.signature} | {described(case)}", fixes[0] if fixes else f"open_{name}"
        if found.kind != SILENT:
            print(f"SILENT {name} {one['signature']} | {described(case)} | not SILENT again: {found}", flush=True)
            return
        with self.lock:
            new = [fix for fix in fixes if fix not in self.found]
            self.found += new
        if fixes and not new:
            return  # another thread's case has shown it meanwhile
        if len(fixes) > 1 or known in kept():
            print(f"{shown} | without {' and '.join(fixes)}", flush=True)
        else:
            smaller, found = shrunk(case, found, alone)
            one |= {"signature": found.signature, "case": smaller, "detail": found.detail, "shrunk": True}
            file = keep(known, smaller, found.signature, stack)
            print(f"SILENT {name} {found.signature} | {described(smaller)} | kept as {file}", flush=True)
        if fixes and _outcome(case, self.now()).kind == SILENT:
            self.explain(one, case)

    def summary(self) -> str:
        done = sum(count for kind, count in self.counts.items() if kind != NOT_TRAINED)
        signatures = len({one["signature"] for one in self.silent})
        parts = f"right {self.counts[RIGHT]}, loud {self.counts[LOUD]}"
        bugs = f"; known bugs: {', '.join(sorted(self.found))}" if self.found else ""
        return f"explored {done}: {parts}, silent {self.counts[SILENT]} ({signatures} signatures){bugs}"


def _outcome(case: dict[str, Any], stack: Stack) -> Outcome:
    try:
        return outcome(case, stack)
    except Exception as error:  # a program without output must not discard hours of other cases
        return Outcome(NOT_TRAINED, f"the explorer's own: {type(error).__name__}: {error}")


def _without_numbers(error: str) -> str:
    return re.sub(r"\d+", "N", error)[:200]


def shrunk(case: dict[str, Any], found: Outcome, stack: Stack) -> tuple[dict[str, Any], Outcome]:
    """Find a small case with the same result. No further step to a plainer case keeps the result.

    The search applies half of the steps at once, then a quarter, and so on, because most options are irrelevant.
    """
    size = len(steps_to_plain(case))
    while size:
        steps, changed = steps_to_plain(case), False
        for at in range(0, len(steps), size):
            left = steps_to_plain(case)
            smaller = plainer(case, [step for step in steps[at : at + size] if step in left])
            if smaller != case and (again := _outcome(smaller, stack)).signature == found.signature:
                case, found, changed = smaller, again, True
        size = size // 2 if size > 1 or not changed else 1
    return case, found
