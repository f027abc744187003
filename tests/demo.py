"""Show bugs on the unpatched upstream packages, and their absence with the patches; `make demo` runs it.

    demo.py [--all] [FIX...]

Nothing is simulated: the demonstrations of the fixes run the real releases on CPU ranks, with the import hook off and
on. The exit status is 0 only if every bug shows without the patches and none with them.
"""

import argparse
import os
import sys
import textwrap
import time
from concurrent.futures import Future, ThreadPoolExecutor

from trainers.run import DemonstrationFailed, Outcome, demonstrations
from upstream import demonstrate, is_available, needed, newest_affected, tree

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
DELIVERIES = ("none", "hook")
WIDTH = 72  # columns of an outcome in the table
AT_ONCE = min(os.cpu_count() or 1, 8)  # parallel programs


def main() -> int:
    known = demonstrations()
    parser = argparse.ArgumentParser(description="Show bugs without and with the patches.")
    parser.add_argument("fixes", nargs="*", metavar="FIX", help=f"by default: {', '.join(SHOWN)}")
    parser.add_argument("--all", action="store_true", help="show the bug of every fix")
    arguments = parser.parse_args()
    if unknown := [fix for fix in arguments.fixes if fix not in known]:
        parser.error(f"expected fixes with a demonstration, found {', '.join(unknown)}")
    shown = list(known) if arguments.all else arguments.fixes or list(SHOWN)
    start = time.monotonic()
    there = [fix for fix in shown if is_available(newest_affected(fix)[0])]
    if left_out := [fix for fix in shown if fix not in there]:
        print(f"left out, on no package index (CONTRIBUTING.md has the variable): {', '.join(left_out)}")
    shown = there
    try:
        install(shown)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    found = show(shown)
    print_table(found)
    good = sum(without.bug and not with_.bug for without, with_ in found.values())
    seconds = time.monotonic() - start
    print(f"\n{good} of {len(found)} bugs show without the patches and not with them ({seconds:.0f} s).")
    return 0 if good == len(found) else 1


def install(fixes: list[str]) -> None:
    """Install the missing upstream releases, four at a time.

    Raises:
        RuntimeError: pip failed to install a release.
    """
    known = demonstrations()
    releases = dict.fromkeys(release for fix in fixes for release in (newest_affected(fix), *known[fix].beside))
    with ThreadPoolExecutor(4) as pool:
        trees = [pool.submit(tree, *release) for release in releases]
        for release, installed in zip(releases, trees, strict=True):
            needed(installed.result())
            print(f"{' '.join(release)}: ready", flush=True)


def show(fixes: list[str]) -> dict[str, tuple[Outcome, Outcome]]:
    """Run the demonstrations without and with the patches, `AT_ONCE` programs in parallel."""
    found = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {
            fix: [pool.submit(demonstrate, fix, delivery, forked=False) for delivery in DELIVERIES] for fix in fixes
        }
        for fix, of_both in running.items():
            print(f"{demonstrations()[fix].title} ... ", end="", flush=True)
            without, with_ = result(of_both[0], unshown=False), result(of_both[1], unshown=True)
            shown = "the bug shows" if without.bug else "NO BUG without the patches"
            print(f"{shown}, {'BUG with them' if with_.bug else 'gone with the patches'}", flush=True)
            found[fix] = without, with_
    return found


def result(running: "Future[Outcome]", *, unshown: bool) -> Outcome:
    """The outcome; if the program could not run, print the error and return `unshown` as its `bug`."""
    try:
        return running.result()
    except DemonstrationFailed as error:
        print(f"\n{error}", file=sys.stderr)
        return Outcome(unshown, "the program failed")


def print_table(found: dict[str, tuple[Outcome, Outcome]]) -> None:
    known = demonstrations()
    rows: list[tuple[str, ...]] = [("fix", "upstream release", "without", "with")]
    for fix, (without, with_) in found.items():
        releases = ", ".join(" ".join(release) for release in (newest_affected(fix), *known[fix].beside))
        words = (textwrap.shorten(one.found, WIDTH, placeholder=" ...") for one in (without, with_))
        rows.append((fix, releases, *words))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
