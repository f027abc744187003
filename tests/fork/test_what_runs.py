"""A patched function that another package replaces at run time is reported with its replacer; a wrapper is listed."""

import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.engine.fix import package_of
from registered import FIXES
from small_tree import MODULE, SECOND, make, make_two, python
from upstream import all_releases, in_place, newest, newest_affected, run_json, tree

pytestmark = pytest.mark.slow

DISTRIB_OPTIMIZER = "megatron/core/optimizer/distrib_optimizer.py"
STRICT = {"CKPT_PATCHES": "strict"}
# A function of another package replaces upstream's, as in SkyRL and MindSpeed.
REPLACES = """
def theirs(*args):
    return 1

def replace():
    import MODULE as m
    m.size = theirs
""".replace("MODULE", MODULE)


def releases() -> list[Any]:
    """Each newest release with a fix's bug; a distribution's newest release also with its fixes in place."""
    found = {(package_of(fix), *newest_affected(fix)): None for fix in FIXES}
    return [
        pytest.param(package, distribution, version, applied, id=f"{distribution}-{version}{' in place' * applied}")
        for package, distribution, version in found
        for applied in (False, True)
        if not applied or all_releases() or version == newest(distribution)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("package", "distribution", "version", "applied"), releases())
def test_no_replaced_function_goes_unnoticed(package: str, distribution: str, version: str, applied: bool) -> None:
    """No replacement or wrapper of an edited function goes unnoticed, with edits by the hook or in place."""
    root = tree(distribution, version)
    root = in_place(root) if applied else root
    found = run_json("replaced_functions", package, tree=root, delivery="hook")
    assert found["unnoticed"] == []
    assert found["count"]
    # Up to 0.18.2 this fix edits only a constant.
    assert set(found["active"]) - found["count"].keys() <= {"bf16_wrapper_name"}


def program(root: Path, text: str, **env: str) -> tuple[int, str, str]:
    (root / "skyrl.py").write_text(REPLACES)
    done = python("-c", textwrap.dedent(text), tree=root, env=env, check=False)
    return done.returncode, done.stdout.strip(), done.stderr


@pytest.mark.quick
def test_a_replacement_is_said_at_exit_and_by_verify_and_at_the_next_target(tmp_path: Path) -> None:
    make_two(tmp_path)
    replaced = f"import {MODULE}, skyrl, sys; skyrl.replace()"
    who = f"{MODULE}.size was replaced by skyrl ({tmp_path / 'skyrl.py'}:2)"
    for then in (
        "",
        "from ckpt_patches.startup import verify; verify(); verify()",
        f"import {SECOND}",
    ):
        status, _, stderr = program(tmp_path, f"{replaced}\n{then}")
        assert status == 0
        (warning,) = (line for line in stderr.splitlines() if "NOT active" in line)
        assert "WARNING: the fix numpy2_product is NOT active any more" in warning
        assert who in warning
        assert "NOT active" not in program(tmp_path, f"{replaced}\n{then}", RANK="1")[2]


@pytest.mark.quick
def test_a_replacement_stops_a_program_in_strict_mode_when_it_verifies_and_is_an_error_at_exit(tmp_path: Path) -> None:
    make(tmp_path)
    text = f"import {MODULE}, skyrl; skyrl.replace()"
    status, _, stderr = program(tmp_path, text, **STRICT)
    assert (status, "[ckpt_patches] ERROR: the fix numpy2_product is NOT active any more" in stderr) == (0, True)
    status, _, stderr = program(
        tmp_path, f"{text}\nfrom ckpt_patches.startup import verify; verify()", RANK="1", **STRICT
    )
    assert (status, "StrictModeError: the fix numpy2_product is NOT active any more" in stderr) == (1, True)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ("del m.size", "replaced by nothing: it was deleted"),
        ("m.size = 1", "replaced by builtins (int)"),
        ("import unittest.mock; m.size = unittest.mock.Mock()", "replaced by unittest.mock (Mock)"),
        ("import unittest.mock; m.size = unittest.mock.Mock(wraps=m.size)", ""),
        ("m.size = (lambda *args, old=m.size: old(*args))", ""),
        ("kept = m.size; m.size = lambda *args: 1", "was replaced by __main__"),
        ("import contextlib; decorated = contextlib.contextmanager(print); m.size = decorated", "was replaced by"),
        ("import functools; m.size = functools.cache(m.size)", ""),
        ("m.other = 1", ""),
        ("old = m.size; m.size = print; m.size = old", ""),
    ],
)
def test_what_is_in_its_place(change: str, reported: str, tmp_path: Path) -> None:
    make(tmp_path)
    text = f"import {MODULE} as m; {change}; from ckpt_patches.startup import verify; verify()"
    status, _, stderr = program(tmp_path, text, **STRICT)
    assert (status, reported in stderr) == (1 if reported else 0, True)


# Without a hook


@pytest.mark.quick
@pytest.mark.parametrize(("mode", "status"), [("strict", 1), ("warn", 0), ("off", 0)])
def test_verify_without_a_hook_is_loud(mode: str, status: int, tmp_path: Path) -> None:
    make(tmp_path)
    text = "import sys; sys.path[:0] = {!r}\nfrom ckpt_patches.startup import verify\nverify()\nprint('trains')"
    site = [path for path in sys.path if path]
    done = python("-S", "-c", text.format(site), tree=tmp_path, env={"CKPT_PATCHES": mode}, check=False)
    assert (done.returncode, done.stdout.strip()) == (status, "" if status else "trains")
    assert ("no import hook is installed in this process" in done.stderr) is (mode != "off")


@pytest.mark.quick
def test_verify_after_a_start_that_failed_names_why(tmp_path: Path) -> None:
    make(tmp_path)
    text = """
    import sys, ckpt_patches
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not ckpt_patches.installed]
    ckpt_patches.installed = None
    def broken(environ): raise OSError("a broken disk")
    switches, ckpt_patches.Switches = ckpt_patches.Switches, broken
    ckpt_patches.run()
    ckpt_patches.Switches = switches
    from ckpt_patches.startup import report, verify
    assert "OSError: a broken disk" in report()
    verify()
    """
    status, _, stderr = program(tmp_path, text, **STRICT)
    assert (status, "StrictModeError: no import hook is installed" in stderr) == (1, True)
    assert stderr.count("OSError: a broken disk") == 2


# Equal results of all commands


def moved(root: Path) -> None:
    path = root / DISTRIB_OPTIMIZER
    path.rename(path.with_name("distributed_optimizer.py"))


def renamed(root: Path) -> None:
    path = root / DISTRIB_OPTIMIZER
    path.write_text(path.read_text().replace("class DistributedOptimizer(", "class ShardedOptimizer("))


def packaged(root: Path) -> None:
    for path in (root / DISTRIB_OPTIMIZER, root.joinpath(*MODULE.split(".")).with_suffix(".py")):
        path.with_suffix("").mkdir()
        path.rename(path.with_suffix("") / "__init__.py")


@pytest.mark.parametrize("change", [moved, renamed, packaged, lambda root: None])
def test_status_hook_strict_verify_and_apply_agree(change: Callable[[Path], None], tmp_path: Path) -> None:
    """All commands name the same missing fixes, also on a tree that upstream has changed."""
    make(tmp_path)
    change(tmp_path)
    done = python("-m", "ckpt_patches", "status", "--json", "--tree", str(tmp_path), tree=tmp_path, check=False)
    states = {fix["name"]: fix["state"] for fix in json.loads(done.stdout)["fixes"]}
    missing = sorted(name for name, state in states.items() if state == "NO MATCH")
    assert (len(missing) > 3) is (change in (moved, renamed))
    assert (states["numpy2_product"], done.returncode) == ("active", 1 if missing else 0)
    text = f"import {MODULE} as m; assert 'prod' in m.size.__code__.co_names\n"
    text += "from ckpt_patches.startup import report, verify\nverify()"
    status, _, stderr = program(tmp_path, text)
    assert status == 0
    assert sorted(set(re.findall(r"WARNING: the fix (\w+) is NOT active", stderr))) == missing
    status, output, _ = program(tmp_path, text + "\nprint(report())")
    assert sorted(re.findall(r"(\w+): NOT active", output)) == missing
    for attempt in (
        text,
        f"try: import {MODULE}\nexcept RuntimeError: pass\nfrom ckpt_patches.startup import verify; verify()",
    ):
        status, _, stderr = program(tmp_path, attempt, **STRICT)
        assert (status, "StrictModeError" in stderr) == (1 if missing else 0, bool(missing))
    before = contents(tmp_path)
    done = python("-m", "ckpt_patches", "apply", "--tree", str(tmp_path), tree=tmp_path, check=False)
    assert (done.returncode, sorted(re.findall(r"(\w+): no match", done.stdout + done.stderr, re.I))) == (
        1 if missing else 0,
        missing,
    )
    python("-m", "ckpt_patches", "revert", "--tree", str(tmp_path), tree=tmp_path)
    assert contents(tmp_path) == before


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*.py")}
