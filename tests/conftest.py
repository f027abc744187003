"""Shared pytest setup: markers, the selection of tests by target, and a check that the hook is active."""

import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from demo import SHOWN
from registered import EVERYTHING

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).with_name("fixes"))]

# The default run draws the same cases every time, so that failures are reproducible. `make test-all` draws others.
# No deadline: a case's time depends on the load of the machine.
hypothesis.settings.register_profile(
    "tests",
    derandomize=os.environ.get("CKPT_PATCHES_TEST_ALL") != "1",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")

MAIN = "main"  # as in upstream.py, which needs this setup


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-forks", action="store_true", help="run each program in an interpreter of its own")
    parser.addoption("--site", metavar="PATH", help="prove the fixes that are active in this site-packages")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-forks"):
        import zygotes

        zygotes.forks = False
    if site := config.getoption("--site"):
        sys.path.append(site)  # with torch and NumPy, if this Python has none
        import upstream

        upstream.site = Path(site).resolve()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs like this, and every program under test would ignore SIGINT as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "gpu: needs a GPU and a torch that can use it")
    config.addinivalue_line("markers", "quick: runs no upstream package; put on all tests of the files in QUICK")
    config.addinivalue_line("markers", "long: not part of `make test`: `make rest` runs it, or `make fixes`")
    config.addinivalue_line("markers", "slow: only `make older` runs it")
    config.addinivalue_line("markers", "exhaustive: only `make test-all` runs it")


def pytest_report_header() -> list[str]:
    is_numpy_2 = _version("numpy").split(".")[0] == "2"
    return ["NumPy 2: megatron-core before 0.16 runs with numpy2_product on both sides"] * is_numpy_2


# Test files that `make quick` runs: the engine, the hook, in-place files, file formats, and planning.
QUICK = """
    audit_blocks checksum convert_new_file convert_plan convert_writer durable hook in_place plan
    processes rooms shared source stored_zip torch_file unfinished
"""

# Files whose tests take longest.
LONGEST = ("test_removals", "test_explore", "test_patches")


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the target's tests, mark quick ones, and skip GPU tests without a GPU."""
    if config.getoption("--site"):
        select(config, items, set(proofs_of_site(items)))
    elif os.environ.get("CKPT_PATCHES_TEST_ALL") != "1":
        asked = (part for part in (OLDER, REST, RUNS) if os.environ.get(f"CKPT_PATCHES_TEST_{part.upper()}") == "1")
        wanted = next(asked, TEST)
        select(config, items, {item for item, part in parts(items).items() if part == wanted})
        items[:] = longest_first(items, _processes(config))
    quick = {f"test_{name}" for name in QUICK.split()}
    for item in items:
        if item.path.stem in quick:
            item.add_marker(pytest.mark.quick)
        if item.get_closest_marker("gpu") and (reason := _no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


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
        return item.path.parent.name == "fixes" and on.items() <= _parameters(item).items()

    chosen = [item for item in items if proves(item)]
    if left := active.keys() - {_fix_of(item) for item in chosen}:
        raise pytest.UsageError(f"no proof was found of {', '.join(sorted(left))}; run all of tests/fixes")
    return chosen


def pytest_collection_finish() -> None:
    """Exclude current objects, which live until the end, from garbage collection: it takes a tenth of the time."""
    gc.collect()
    gc.freeze()


# The targets `make test`, `make fixes`, `make rest` and `make older`. Each test is in one of them, or only in `make
# test-all`.
TEST, RUNS, REST, OLDER = "test", "fixes", "rest", "older"


def parts(items: list[pytest.Item]) -> dict[pytest.Item, str]:
    """The target of each test; "" if only `make test-all` runs it.

    older: the oldest release of a case, and tests marked slow. fixes: the contract of the fixes, and their own tests,
    also those of the switched ones. rest: others marked long. test: all others. Releases between, tests marked
    exhaustive, and in-place tests of a release that are not marked slow, and not of `make demo`, are only in test-all:
    test_fix_contract.py checks that in-place files equal the hook's text on each release that is a fix's newest.
    """
    releases: dict[str, set[tuple[int, ...]]] = {}
    for item in items:
        releases.setdefault(_case(item), set()).add(_release(item))
    return {item: _part(item, releases[_case(item)]) for item in items}


def longest_first(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """The tests with the longest ones at the start of each process's part: at the end, they would leave others idle."""
    longest = [item for item in items if item.path.stem in LONGEST]
    others = [item for item in items if item.path.stem not in LONGEST]
    ends = [len(others) * number // processes for number in range(processes + 1)]
    return [item for n in range(processes) for item in (*longest[n::processes], *others[ends[n] : ends[n + 1]])]


def _processes(config: pytest.Config) -> int:
    """The processes of pytest-xdist, each of which begins with a part of the tests, in order."""
    count: int = getattr(config, "workerinput", {}).get("workercount", 1)
    return count


def _part(item: pytest.Item, releases: set[tuple[int, ...]]) -> str:
    delivery = _parameters(item).get("delivery")
    if item.get_closest_marker("exhaustive"):
        return ""
    if item.get_closest_marker("slow"):
        return OLDER
    if delivery == "in place" and _parameters(item).get("version") != MAIN:
        is_shown = _fix_of(item) in SHOWN and _release(item) == max(releases)
        return OLDER if is_shown or not _release(item) else ""
    if _release(item) != max(releases):
        return OLDER if _release(item) == min(releases) else ""
    if _is_of_a_fix(item):
        return RUNS
    return REST if item.get_closest_marker("long") else TEST


def _is_of_a_fix(item: pytest.Item) -> bool:
    if item.get_closest_marker("quick"):
        return False
    return _fix_of(item) in EVERYTHING or item.path.parent.name == "contract"


def _fix_of(item: pytest.Item) -> str:
    """The name of the fix that a test file is named for."""
    return item.path.stem.removeprefix("test_")


def _case(item: pytest.Item) -> str:
    """The test's ID without the release."""
    return item.nodeid.replace(str(_parameters(item).get("version", "")), "")


def _release(item: pytest.Item) -> tuple[int, ...]:
    version = str(_parameters(item).get("version", ""))
    if version == MAIN:
        return (sys.maxsize,)
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs a GPU; torch.cuda.is_available() is false here"


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the command of its last program to the report of a failed test."""
    report = yield
    if by_hand := sys.modules.get("by_hand"):
        if report.failed and by_hand.ran:
            report.sections.append(("the last program of this test, from the repository root", by_hand.ran[-1]))
        if report.when == "teardown":
            by_hand.ran.clear()
    return report


def _version(distribution: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
