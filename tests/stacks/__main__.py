"""Make the environment of each stack that people run, check it, and record what was found.

    make stacks [ROW="verl_0.8 verl_0.9"] [FIX="one other"] [KEEP=1] [AGAIN=1]

Without ROW all rows that have no record yet, or with AGAIN=1 all; KEEP=1 leaves the environments in .stacks/. FIX names
new fixes: they alone are checked, and added to the records of all rows, or of ROW. The row `hugging_face` runs the
tests of Transformers and Accelerate beside this file.
"""

import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ckpt_patches.engine.registry import EVERYTHING
from stacks import environments, record
from stacks.environments import Environment, NotInstalled
from stacks.rows import BY_NAME, ROWS, Row
from upstream import RELEASES, tree_name

TESTS = Path(__file__).resolve().parents[1]
HUGGING_FACE = "hugging_face"
TIMEOUT = 3600.0  # seconds for the checks of a row


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
    done = {} if asked or fixes or os.environ.get("AGAIN") else record.read()
    rows = [BY_NAME[name] for name in asked] or [row for row in ROWS if row.name not in done]
    ran = [_take(row, fixes) for row in rows]
    if not os.environ.get("KEEP"):
        environments.remove_bases(rows)
    return 0 if all(ran) else 1


def _take(row: Row, fixes: list[str]) -> bool:
    """Run a row, or only these fixes of it, and record it. Return whether the row ran."""
    today = datetime.date.today().isoformat()
    print(f"{row.name}: {row.contents}", flush=True)
    with environments.locked(row):
        try:
            environment = environments.make(row)
        except NotInstalled as error:
            print(f"{row.name}: not run: {error}", flush=True)
            if not fixes:
                record.add(row.name, {"date": today, "not run": str(error)})
            return False
        try:
            found = _checked(row, environment, fixes)
        except subprocess.SubprocessError as error:
            print(f"{row.name}: not run: {error}", flush=True)
            if not fixes:
                record.add(row.name, {"date": today, "not run": f"the checks failed: {type(error).__name__}"})
            return False
        else:
            known = record.with_fixes(row.name, found) if fixes else {"date": today, **found}
            if known is None:
                print(f"{row.name}: not recorded: pip has chosen other releases than in its record", flush=True)
                return False
            record.add(row.name, known)
        finally:
            if not os.environ.get("KEEP"):
                environments.remove(environment)
    print(f"{row.name}: recorded in {record.PATH}", flush=True)
    return True


def _checked(row: Row, environment: Environment, fixes: list[str]) -> record.Found:
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
    found: record.Found = json.loads((environment.folder / "found.json").read_text())
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
