"""`make prove SITE=…`: the proofs of the fixes that are active in an environment, on its packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from upstream import REPOSITORY, TIMEOUT, needed, newest, tree

pytestmark = pytest.mark.slow

FIX = "fully_reshardable_shift"
# Removes the import hook from the processes that import an environment's packages.
WITHOUT_HOOK = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "PatchFinder"]
"""


def environment(folder: Path, distribution: str = "megatron-core") -> Path:
    """A folder like a site-packages, with the newest release of a distribution, and what that imports."""
    folder.mkdir()
    release = tree(distribution, newest(distribution))
    for path in (path for root in (release, *needed(release)) for path in root.iterdir()):
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    return folder


def prove(site: Path, *options: str, **more: str) -> tuple[int, list[str]]:
    """The exit status and the lines of `make prove` with one fix."""
    command = [sys.executable, "-m", "pytest", "tests/fixes", "-v", "-p", "no:cacheprovider", "--site", str(site)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_PATCHES", "PYTEST"))}
    done = subprocess.run(
        [*command, *options], cwd=REPOSITORY, env={**kept, **more}, capture_output=True, text=True, timeout=TIMEOUT
    )
    return done.returncode, done.stdout.splitlines() + done.stderr.splitlines()


def test_a_fix_that_works_is_proven(tmp_path: Path) -> None:
    returncode, lines = prove(environment(tmp_path / "site"), "-k", FIX)
    assert returncode == 0, lines
    (line,) = [line for line in lines if "PASSED" in line or "FAILED" in line]
    assert f"tests/fixes/test_{FIX}.py::test_a_load_brings_back_every_element" in line


def test_one_that_is_active_by_its_text_and_does_not_work_is_not(tmp_path: Path) -> None:
    site = environment(tmp_path / "site")
    (site / "sitecustomize.py").write_text(WITHOUT_HOOK)
    returncode, lines = prove(site, "-k", FIX)
    assert returncode == 1
    assert [line.split()[1] for line in lines if f"test_{FIX}.py::" in line and "%" in line] == ["FAILED"]
    assert any("AssertionError: assert {" in line for line in lines), lines  # elements, by state


def test_one_that_is_switched_off_is_left_out(tmp_path: Path) -> None:
    returncode, lines = prove(environment(tmp_path / "site"), "-k", FIX, CKPT_PATCHES_SKIP=FIX)
    assert returncode == 5, lines  # no test is left


def test_a_folder_without_an_upstream_package_is_an_error(tmp_path: Path) -> None:
    returncode, lines = prove(tmp_path)
    assert returncode == 4
    assert any("found none" in line for line in lines), lines
