"""The checks that the Python of a row's environment runs: `checks.py ROW FOLDER [FIX ...]` writes FOLDER/found.json.

Each fix must behave as `ckpt-patches status` states: the proof of an active one passes. The tools judge checkpoints
that this stack saves. The explorer draws and runs a sample of cases.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ckpt_patches.cli.status import ACTIVE, NO_MATCH, NOT_NEEDED, FixStatus, collect
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.trees import root_of
from explore import tools
from explore.judged import LOUD, NOT_TRAINED, RIGHT, SILENT, Stack, outcome
from explore.megatron_space import formats
from explore.spaces import SPACES, complete
from stacks.rows import BY_NAME, Row
from upstream import numbers

# The expected results of a fix. Any other text describes a failure.
WORKS, NOT_RUN = "works", "not run"
MIGRATE = "megatron: migrate"
FLATTENED = "0.15.3"  # the last release that saves torch_dist in flattened ranges
TESTS = Path(__file__).resolve().parents[1]
CASES, SECONDS = 8, 180.0  # limits of a package's sample: the number of cases, and the time to start them
LENGTH = 200  # the maximum number of characters of an error
Case = dict[str, Any]


def main(row: Row, folder: Path, *chosen: str) -> None:
    if chosen:
        (folder / "found.json").write_text(json.dumps({"on": versions(), "fixes": fixes(chosen)}))
        return
    packages = {"megatron": row.megatron_release, "deepspeed": row.deepspeed}
    found: dict[str, Any] = {"on": versions()}
    here = {package: version for package, version in packages.items() if version}

    def keep(name: str, what: Any) -> None:
        found[name] = what
        print(f"{row.name}: {name}: {json.dumps(what)}", flush=True)

    keep("fixes", fixes())
    keep("tools", {what: one for package, version in here.items() for what, one in judged(package, version)})
    found["tools"][MIGRATE] = _result(partial(flattened, its_flattened(row)))
    keep("explorer", {package: sample(package, version) for package, version in here.items()})
    (folder / "found.json").write_text(json.dumps(found))


def versions() -> dict[str, str]:
    """The releases that pip has chosen, and the releases that the packages report."""
    found = {"Python": sys.version.split()[0]}
    for name in ("torch", "numpy", "zarr"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {package.name: package.version for package in collect().installed if package.version}


# The fixes


def fixes(chosen: Sequence[str] = ()) -> dict[str, str]:
    """The result of each fix for the installed packages, or of chosen ones: an expected word, or the failure."""
    stated = collect()
    here = {package.name for package in stated.installed if package.version}
    mine = [fix for fix in stated.fixes if DISTRIBUTIONS[fix.package] in here]
    mine = [fix for fix in mine if not chosen or fix.name in chosen]
    sites = {str(root_of(fix.package, None)) for fix in mine}
    results = {name: result for site in sites for name, result in proofs(site).items()}
    return {fix.name: word(fix, results.get(fix.name, "no proof ran")) for fix in mine}


def proofs(site: str) -> dict[str, str]:
    """The result of each proof that runs on the packages of a folder, by fix."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", str(TESTS / "fixes"), "-c", str(TESTS.parent / "pyproject.toml")]
        subprocess.run([*command, "--site", site, "--junitxml", str(report), "-v", "-p", "no:cacheprovider"])
        cases = ElementTree.parse(report).iter("testcase")
    found: dict[str, str] = {}
    for case in cases:
        fix = case.attrib["classname"].rpartition(".")[2].removeprefix("test_")
        wrong = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
        if wrong is None:
            found.setdefault(fix, WORKS)
        elif found.get(fix, WORKS) == WORKS:
            found[fix] = f"{NOT_RUN if wrong.tag == 'skipped' else wrong.tag}: {wrong.attrib.get('message', '')}"
    return found


def is_expected(word: str) -> bool:
    return word in (WORKS, NOT_NEEDED) or word.startswith(f"{NOT_RUN}: ")


def word(fix: FixStatus, result: str) -> str:
    if fix.state == NO_MATCH:
        return f"{fix.state}: {_short(fix.reason)}"
    return _short(result) if fix.state == ACTIVE else fix.state


def cause(error: Exception) -> str:
    """The last line of an error. For a failed program, the line comes from the program's own error."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def _short(text: str) -> str:
    """Remove this machine's paths and the names of temporary folders."""
    folders = (os.environ.get("STACK_PATH", ""), sys.prefix, tempfile.gettempdir(), str(TESTS))
    for folder in filter(None, folders):
        text = text.replace(folder, "...")
    return re.sub(r"-[a-z0-9_]{8}(?=/|$)", "", " ".join(text.split()))[:LENGTH]


# The tools, and the explorer's sample


def judged(package: str, version: str) -> Iterable[tuple[str, str]]:
    """The result of the tools on checkpoints that this stack saves: "works", or the failure."""
    for what, case in cases(package, version).items():
        yield f"{package}: {what}", _result(partial(outcome, complete(case), Stack(package, version)))


def cases(package: str, version: str) -> Mapping[str, Case]:
    if package == "megatron":
        run = {"format": "fully_reshardable" if numbers(version) >= (0, 15) else formats(version)[0]}
        verified = {"ranks": 2, "fingerprint": True}
        return {"audit, repair, fingerprint": {"package": package, "ranks": 2, "run": run, "load": verified}}
    plain = {"package": package, "ranks": 2, "nodes": 1, "load": {"ranks": 2, "nodes": 1, "fingerprint": True}}
    stage = 3 if numbers(version) >= (0, 18) else 2
    load = {"ranks": 3, "nodes": 1, "kind": "universal", "fingerprint": True}
    return {
        "audit, repair, fingerprint": {**plain, "run": {"stage": 3}},
        f"to-universal, ZeRO {stage}": {**plain, "run": {"stage": stage}, "load": load},
    }


def its_flattened(row: Row) -> str:
    """The release that saves torch_dist in flattened ranges here: the row's own, or the last such release."""
    version = row.megatron_release
    return version if version and numbers(version) < (0, 16) else FLATTENED


def flattened(version: str) -> str:
    """Save in a format that later releases reject. Return the objections of the tools that read and migrate it."""
    stack = Stack("megatron", version, fingerprint=True)
    run = {"format": "fully_sharded_model_space"}
    with tempfile.TemporaryDirectory(prefix="stacks-") as folder:
        file, saves = Path(folder, "case.json"), Path(folder, "saves")
        file.write_text(json.dumps(complete({"package": "megatron", "ranks": 2, "run": run, "load": {"ranks": 2}})))
        trained = stack.run("train", file, saves)
        if "error" in trained:
            return f"save: {trained['error']}"
        new = saves / "first"
        checks = (tools.not_whole, tools.unlike_its_record)
        return next(filter(None, (check(new) for check in (*checks, tools.migrated, *checks))), "")


def _result(check: Callable[[], Any]) -> str:
    try:
        found = check()
    except Exception as error:  # the program has failed
        return _short(f"failed: {cause(error)}")
    if isinstance(found, str):
        return _short(found) or WORKS
    return WORKS if found.kind == RIGHT else _short(f"{found.kind}: {found.signature or ''} {found.detail}")


def sample(package: str, version: str) -> dict[str, Any]:
    """The numbers of right, loud and silent cases in the sample, and descriptions of the silent ones.

    The sample skips cases with two releases, because the environment has only one.
    """
    stack, space, deadline = Stack(package, version), SPACES[package], time.monotonic() + SECONDS
    drawn = (space.drawn(f"stacks-{number}", version) for number in range(4 * CASES))
    alone = [case for case in drawn if not case["load"].get("saved_by")][:CASES]

    def judge(case: Case) -> tuple[str, str]:
        if time.monotonic() > deadline:
            return "", ""
        try:
            found = outcome(case, stack)
        except Exception as error:  # the program printed nothing
            return NOT_TRAINED, _short(cause(error))
        return found.kind, _short(f"{found.signature or ''} {found.detail}")

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(judge, alone))
    counts = {kind: sum(one == kind for one, _ in results) for kind in (RIGHT, LOUD, SILENT, NOT_TRAINED)}
    wrong = [why for kind, why in results if kind == SILENT]
    untrained = sorted({why for kind, why in results if kind == NOT_TRAINED})
    return {**counts, **({"silent cases": wrong} if wrong else {}), **({"why not": untrained} if untrained else {})}


if __name__ == "__main__":
    main(BY_NAME[sys.argv[1]], Path(sys.argv[2]), *sys.argv[3:])
