"""Show bugs on the unpatched upstream packages, and that they are gone with the patches; `make demo` runs it.

    demo.py [FIX...]

Nothing is simulated: the proofs of the fixes (tests/fixes/) run the real releases on CPU ranks, with the
import hook off and on. The exit status is 0 only if every bug shows without the patches and none with them.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
# The bugs that started this project, and four of the worst silent bugs.
SHOWN = (
    "zarr_create_synchronizer",
    "dp_zero_empty_state",
    "universal_tensor_paddings",
    "hybrid_offload_reload",
    "fully_reshardable_shift",
    "async_save_staging",
    "zero3_universal_groups",
    "hybrid_offload_resume",
)
WITHOUT = {"none": True, "hook": False}
WITHOUT_PLUGINS = (f"-pno:{name}" for name in ("terminal", "cacheprovider", "xdist"))
OPTIONS = (*WITHOUT_PLUGINS, "-o", "addopts=", "-c", str(TESTS.parent / "pyproject.toml"))
BEFORE = """\
Shows {count} bugs on the real packages, without and with the patches: about 2 minutes on two cores.
Installs three upstream releases and triton (1.1 GB, in .trees/) if they are not there; .venv/ has torch (1.4 GB).
"""
AFTER = """\
Next: `pip install .` in your environment, and `ckpt-patches status` there; `ckpt-patches explain NAME` has its page.
`make prove SITE=/path/to/site-packages` shows that the fixes work on the packages of an environment."""


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


def release_of(item: pytest.Item) -> tuple[int, ...]:
    """The release that a test is for, to compare; () if it is for none."""
    version = str(parameters_of(item).get("version", ""))
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


class Shown:
    """Runs of each proof the first test without and with the fix, and prints a line as each ends."""

    def __init__(self) -> None:
        self.failed = 0
        self.passed = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        first: dict[tuple[Path, Any], pytest.Item] = {}
        for item in sorted(items, key=release_of, reverse=True):  # the newest with the bug
            delivery = parameters_of(item).get("delivery")
            if delivery in WITHOUT:
                first.setdefault((item.path, delivery), item)
        items[:] = first.values()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed += 1
            print(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not report.failed:
            return
        file, _, test = report.nodeid.partition("::")
        name, _, parameters = test.partition("[")
        side = "without the fix" if parameters.startswith("none") or "-none" in parameters else "with it"
        self.failed += report.failed
        self.passed += report.passed
        ended = name.removeprefix("test_").replace("_", " ") if report.passed else f"FAILED\n{report.longreprtext}"
        print(f"{Path(file).stem.removeprefix('test_')}, {side}: {ended}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Show bugs without and with the patches.")
    parser.add_argument("fixes", nargs="*", metavar="FIX", default=SHOWN, help=f"by default: {', '.join(SHOWN)}")
    fixes = parser.parse_args().fixes
    files = [TESTS / "fixes" / f"test_{fix}.py" for fix in fixes]
    if unknown := [fix for fix, file in zip(fixes, files, strict=True) if not file.exists()]:
        parser.error(f"expected fixes, found {', '.join(unknown)}")
    print(BEFORE.format(count=len(fixes)), flush=True)
    start, shown = time.monotonic(), Shown()
    pytest.main([*OPTIONS, *map(str, files)], plugins=[shown])
    print(f"\n{shown.passed} of {2 * len(fixes)} as they should be ({time.monotonic() - start:.0f} s).\n{AFTER}")
    return 0 if (shown.passed, shown.failed) == (2 * len(fixes), 0) else 1


if __name__ == "__main__":
    sys.exit(main())
