"""Make the environment of each stack that people run, check it, and print a table with the result of each row.

    make stacks [ROW="verl_0.8 verl_0.9"] [FIX="one other"] [KEEP=1]

Without ROW all rows; KEEP=1 leaves the environments in .stacks/. FIX names fixes: they alone are checked. The row
`hugging_face` runs the tests of Transformers and Accelerate beside this file.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from registered import EVERYTHING
from stacks import environments
from stacks.checks import WORKS, is_expected
from stacks.environments import Environment, NotInstalled
from stacks.rows import BY_NAME, ROWS, Row
from upstream import RELEASES, tree_name

TESTS = Path(__file__).resolve().parents[1]
HUGGING_FACE = "hugging_face"
TIMEOUT = 3600.0  # seconds for the checks of a row
NOT_RUN = "not run"
Found = dict[str, Any]


def main() -> int:
    asked, fixes = (os.environ.get(name, "").split() for name in ("ROW", "FIX"))
    if asked == [HUGGING_FACE]:
        return subprocess.run([sys.executable, "-m", "pytest", str(TESTS / "stacks")]).returncode
    if unknown := [name for name in asked if name not in BY_NAME]:
        print(f"expected ROW to be of {', '.join([*BY_NAME, HUGGING_FACE])}, found {unknown[0]}", file=sys.stderr)
        return 2
    if unknown := [name for name in fixes if name not in EVERYTHING]:
        print(f"expected names of fixes in FIX, found {unknown[0]}", file=sys.stderr)
        return 2
    rows = [BY_NAME[name] for name in asked] or list(ROWS)
    found = [_take(row, fixes) for row in rows]
    if not os.environ.get("KEEP"):
        environments.remove_bases(rows)
    for row, of_row in zip(rows, found, strict=True):
        print(f"{row.title:30} {'; '.join(failures(of_row)) or 'works'} ({installed(row, of_row)})")
    return 0 if not any(map(failures, found)) else 1


def failures(found: Found) -> list[str]:
    """What does not work in a row: fixes, tools, silent cases of the explorer; or why the row did not run."""
    if NOT_RUN in found:
        return [f"{NOT_RUN}: {found[NOT_RUN]}"]
    fixes = [f"{name}: {word}" for name, word in found["fixes"].items() if not is_expected(word)]
    tools = [f"{name}: {word}" for name, word in found.get("tools", {}).items() if word != WORKS]
    drawn = [case for of_package in found.get("explorer", {}).values() for case in of_package.get("silent cases", ())]
    return [*fixes, *tools, *(f"explorer, silent: {case}" for case in drawn)]


def installed(row: Row, found: Found) -> str:
    """The releases in a row's environment, or the row's pins if it did not run."""
    there = ", ".join(f"{name} {version}" for name, version in found.get("on", {}).items())
    return there or row.contents


def _take(row: Row, fixes: list[str]) -> Found:
    """Run a row, or only these fixes of it, and return its findings."""
    print(f"{row.name}: {row.contents}", flush=True)
    with environments.locked(row):
        try:
            environment = environments.make(row)
        except NotInstalled as error:
            return {NOT_RUN: str(error)}
        try:
            return _checked(row, environment, fixes)
        except subprocess.SubprocessError as error:
            return {NOT_RUN: str(error)}
        finally:
            if not os.environ.get("KEEP"):
                environments.remove(environment)


def _checked(row: Row, environment: Environment, fixes: list[str]) -> Found:
    """Run the checks, or those of some fixes, in a row's environment and return their findings.

    Raises:
        subprocess.CalledProcessError: The checks could not run.
    """
    trees = _trees(row, environment)
    path = [str(environment.checkout)] if row.is_commit else []
    variables = {
        **environment.variables(),
        "CKPT_PATCHES_TREES": str(trees),
        "CKPT_PATCHES_TEST_PATIENCE": "3",  # the first read of packages from disk is slow
        "PYTHONPATH": os.pathsep.join([*path, str(TESTS)]),
        "STACK_PATH": os.pathsep.join(path),
    }
    command = [str(environment.python), "-m", "stacks.checks", row.name, str(environment.folder), *fixes]
    subprocess.run(command, env=variables, check=True, timeout=TIMEOUT, cwd=environment.folder)
    found: Found = json.loads((environment.folder / "found.json").read_text())
    return found


def _trees(row: Row, environment: Environment) -> Path:
    """A folder where tests/upstream.py finds the row's packages by release, and their dependencies."""
    folder = environment.folder / "trees"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    core = environment.checkout if row.is_commit else environment.site_packages
    of_row = {"megatron-core": row.megatron_release, "deepspeed": row.deepspeed, "nvidia-resiliency-ext": row.nvrx}
    for distribution, version in of_row.items():
        if version:
            root = core if distribution == "megatron-core" else environment.site_packages
            (folder / f"{distribution}-{version}").symlink_to(root)
    for release in RELEASES:
        if release.distribution == "triton":  # torch installs it
            name = tree_name(release.distribution, release.version, row.python)
            (folder / name).symlink_to(environment.site_packages)
    return folder


if __name__ == "__main__":
    sys.exit(main())
