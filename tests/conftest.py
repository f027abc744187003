"""Shared pytest setup: marks, and a check that the hook is active."""

import atexit
import gc
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from demo import SHOWN, parameters_of, release_of
from registered import EVERYTHING

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), *(str(TESTS / room) for room in ("fixes", "fork", "tools"))]

# A dozen fixes whose proofs are in `make test`.
PROVEN = (*SHOWN, "bf16_stage0_gradients", "dcp_touched_state", "scheduler_steps", "zero3_module_only")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-release", action="store_true", help="on each upstream release, with other drawn cases")
    parser.addoption("--site", metavar="PATH", help="prove the fixes that are active in this site-packages")


def pytest_configure(config: pytest.Config) -> None:
    # The same cases in each run, so that failures are reproducible. No deadline: time depends on the machine's load.
    hypothesis.settings.register_profile(
        "tests",
        derandomize=not config.getoption("--every-release"),
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("tests")
    if site := config.getoption("--site"):
        sys.path.append(site)  # with torch and NumPy, if this Python has none
    import upstream

    upstream.every_release = config.getoption("--every-release")
    upstream.site = Path(site).resolve() if site else None
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs like this, and every program under test would ignore SIGINT as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of pytest-xdist: remove what its processes share when this one, which started them, ends."""
    folder = Path(tempfile.gettempdir(), f"ckpt-patches-{node.workerinput['testrunuid']}")
    if not folder.exists():
        folder.mkdir(mode=0o700)
        atexit.register(shutil.rmtree, folder)


# Test files that `make quick` runs: the engine, the hook, in-place files, file formats, and planning.
QUICK = """
    audit_many checksum convert_plan convert_writer durable hook in_place plan
    processes rooms source stored_zip torch_file unfinished
"""


# Test files that are not in `make test`: they train or draw for a minute and more.
SLOW = """
    api audit_coverage audit_dcp audit_experts audit_fsdp_ranks audit_generated audit_local
    audit_soundness convert distributed fingerprint_torch healthy_and_damaged migrate recipes
"""


@pytest.fixture(autouse=True, scope="session")
def _hook_is_active(pytestconfig: pytest.Config) -> None:
    """Stop the session if the hook is not active: tests with delivery "hook" would test nothing.

    An environment may have its fixes in place, and no hook.
    """
    is_active = any(type(finder).__name__ == "PatchFinder" for finder in sys.meta_path)
    if not is_active and not pytestconfig.getoption("--site"):
        pytest.exit(
            f"expected the import hook in sys.meta_path of {sys.executable}, found none: install the project into "
            "this environment (pip install -e . --no-deps) and leave CKPT_PATCHES unset",
            returncode=2,
        )


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the time that they take, and skip GPU tests without a GPU."""
    if config.getoption("--site"):
        select(config, items, set(proofs_of_site(items)))
    quick, slow = ({f"test_{name}" for name in names.split()} for names in (QUICK, SLOW))
    releases: dict[str, set[tuple[int, ...]]] = {}
    for item in items:
        releases.setdefault(_case(item), set()).add(release_of(item))
    for item in items:
        if item.path.stem in quick:
            item.add_marker(pytest.mark.quick)
        if item.get_closest_marker("gpu") and (reason := _no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))
        if mark := _mark(item, releases[_case(item)]) or ("slow" if item.path.stem in slow else ""):
            item.add_marker(mark)


def select(config: pytest.Config, items: list[pytest.Item], chosen: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def proofs_of_site(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that show that the fixes which are active in `--site` do what they should.

    Raises:
        pytest.UsageError: there is no upstream package, no fix is active, or one has no proof.
    """
    import upstream
    from ckpt_patches.cli.status import ACTIVE, IN_PLACE, collect
    from ckpt_patches.engine.installed import DISTRIBUTIONS
    from ckpt_patches.errors import UserError

    try:
        fixes = collect(str(upstream.site)).fixes
    except UserError as error:
        raise pytest.UsageError(str(error)) from None
    found = [fix for fix in fixes if fix.state in (ACTIVE, IN_PLACE)]
    active = {fix.name: upstream.in_site(DISTRIBUTIONS[fix.package]) for fix in found}
    if not active:
        raise pytest.UsageError(f"no fix is active in {upstream.site}: ckpt-patches status --tree {upstream.site}")

    def proves(item: pytest.Item) -> bool:
        on = {"version": active.get(_fix_of(item)), "delivery": "hook"}
        return item.path.parent.name == "fixes" and on.items() <= parameters_of(item).items()

    chosen = [item for item in items if proves(item)]
    if left := active.keys() - {_fix_of(item) for item in chosen}:
        raise pytest.UsageError(f"no proof was found of {', '.join(sorted(left))}; run all of tests/fixes")
    return chosen


def pytest_collection_finish() -> None:
    """Exclude current objects, which live until the end, from garbage collection: it takes a tenth of the time."""
    gc.collect()
    gc.freeze()


def _mark(item: pytest.Item, releases: set[tuple[int, ...]]) -> str:
    """The mark of a test beside its own, from its parameters: "slow", "exhaustive", or none.

    slow: the oldest release of a case, the contract of the fixes, and all proofs but a dozen. exhaustive: releases
    between, and in-place tests of a release that are not of `make demo`: test_fix_contract.py checks that in-place
    files equal the hook's text on each release that is a fix's newest.
    """
    if item.get_closest_marker("slow") or item.get_closest_marker("exhaustive"):
        return ""
    release, is_shown = release_of(item), _fix_of(item) in SHOWN
    if parameters_of(item).get("delivery") == "in place":
        return "slow" if (is_shown and release == max(releases)) or not release else "exhaustive"
    if release != max(releases):
        return "slow" if release == min(releases) else "exhaustive"
    return "slow" if _is_of_a_fix(item) and _fix_of(item) not in PROVEN else ""


def _is_of_a_fix(item: pytest.Item) -> bool:
    if item.get_closest_marker("quick"):
        return False
    return _fix_of(item) in EVERYTHING or item.path.parent.name in ("fixes", "contract")


def _fix_of(item: pytest.Item) -> str:
    """The name of the fix that a test file is named for."""
    return item.path.stem.removeprefix("test_")


def _case(item: pytest.Item) -> str:
    """The test's ID without the release."""
    return item.nodeid.replace(str(parameters_of(item).get("version", "")), "")


def _no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs a GPU; torch.cuda.is_available() is false here"
