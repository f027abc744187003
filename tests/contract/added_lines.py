"""The lines that each fix adds to each release, recorded in tests/recorded/added_lines.json for reviews of a change.

    python tests/contract/added_lines.py [FIX ...]

writes the record of these fixes (default: all) from the default releases, or from all with CKPT_PATCHES_TEST_ALL=1.
Releases to which a fix adds the same lines share an entry: one form of upstream's code.
"""

import functools
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import edits
from ckpt_patches.engine import agreement, worker_end
from ckpt_patches.engine.fix import load, package_of, path_of
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.registry import FIXES
from ckpt_patches.engine.releases import RECORDED
from upstream import RELEASES as TABLE
from upstream import all_releases, is_available, newest_affected, tree

RECORD = Path(__file__).parent.parent / "recorded" / "added_lines.json"
COMMAND = "after a look at the difference: python tests/contract/added_lines.py"
RELEASES, LINES = "releases", "lines"

Lines = dict[str, list[str]]  # by the name of an edited file


def lines(fix: str, version: str) -> Lines:
    """The lines that a fix adds to a release; a run of the fix's own lines is cut to its first line and a count."""
    _, made = edits.plan(tree(DISTRIBUTIONS[package_of(fix)], version), fix)
    sources = (path_of(fix), str(agreement.__file__), str(worker_end.__file__))
    own = [line.strip() for path in sources for line in Path(path).read_text().splitlines() if line.strip()]
    added = {name: [line for line in of_file if line] for name, of_file in edits.added_lines(made).items()}
    return {name: list(_shortened(of_file, own)) for name, of_file in added.items()}


def _shortened(added: Sequence[str], own: Sequence[str]) -> Iterator[str]:
    position = 0
    while position < len(added):
        runs = [start for start, line in enumerate(own) if line == added[position]]
        length = max((_common(added[position:], own[start:]) for start in runs), default=0)
        yield added[position] if length < 3 else f"{added[position]} [and the next {length - 1} lines of the fix]"
        position += max(length if length >= 3 else 1, 1)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@functools.cache
def _record() -> dict[str, list[dict[str, object]]]:
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {}


def _versions(entry: dict[str, object]) -> list[str]:
    return str(entry[RELEASES]).split()


def recorded(fix: str, version: str) -> object:
    """The recorded lines of a release; None if it has no record."""
    return next((entry[LINES] for entry in _record().get(fix, []) if version in _versions(entry)), None)


def forms(fix: str) -> list[str]:
    """The newest release of each form of upstream's code; all recorded releases with CKPT_PATCHES_TEST_ALL=1."""
    entries = [_versions(entry) for entry in _record().get(fix, [])]
    found = itertools.chain(*entries) if all_releases() else (versions[-1] for versions in entries)
    return list(found) or [newest_affected(fix)[1]]


def entries(fix: str) -> list[dict[str, object]]:
    """The record of a fix, oldest form first."""
    package = package_of(fix)
    default = {r.version for r in TABLE if r.distribution == DISTRIBUTIONS[package] and r.default}
    affected = [version for version in RECORDED[package] if load(fix).affects(version)]
    found: list[tuple[Lines, list[str]]] = []
    for version in affected if all_releases() else [v for v in affected if v in {*default, newest_affected(fix)[1]}]:
        added = lines(fix, version)
        same = next((versions for one, versions in found if one == added), None)
        if same is None:
            found.append((added, [version]))
        else:
            same.append(version)
    return [{RELEASES: " ".join(versions), LINES: added} for added, versions in found]


def main(names: Sequence[str]) -> None:
    there = [fix for fix in FIXES if is_available(DISTRIBUTIONS[package_of(fix)])]
    record = {**_record(), **{fix: entries(fix) for fix in names or there}}
    RECORD.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
