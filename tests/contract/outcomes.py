"""Record in ckpt_patches/engine/outcomes.py what each edit of each fix finds in each tested release.

    CKPT_PATCHES_TEST_ALL=1 python tests/contract/outcomes.py

writes the record from every release. It takes minutes if the releases are installed.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))
from ckpt_patches.engine import absence, outcomes
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.plan import fixes_for, plan_tree
from ckpt_patches.engine.registry import FOLDERS, SWITCHED
from ckpt_patches.engine.releases import RECORDED
from upstream import is_available, tree

COMMAND = "CKPT_PATCHES_TEST_ALL=1 python tests/contract/outcomes.py"
MODULE = Path(outcomes.__file__)


def found(package: str, version: str) -> dict[str, str]:
    """The letters of each fix's edits in a release, by fix or part of a switch; recorded ones without the package."""
    if not is_available(DISTRIBUTIONS[package]):
        return recorded(package, version)
    with mock.patch.object(absence, "OUTCOMES", {}):
        names = fixes_for(package, overlays=SWITCHED)
        made = plan_tree(str(tree(DISTRIBUTIONS[package], version)), package, names)
    return {result.name: "".join(result.found) for result in made.results}


def recorded(package: str, version: str) -> dict[str, str]:
    """The recorded letters of each fix's edits in a release, by fix or part of a switch."""
    names = fixes_for(package, overlays=SWITCHED)
    return {name: "".join(absence.of_release(name, package, version)) for name in names}


def text(record: Mapping[str, Mapping[str, str]]) -> str:
    """The text of the module, from the letters by fix and release."""
    lines = []
    for fix, by_release in sorted(record.items()):
        changes, last = [], ""
        for release, letters in by_release.items():
            if letters != last:
                changes += [release, letters]
            last = letters
        lines.append(f'    "{fix}": "{" ".join(changes)}",\n')
    doc = MODULE.read_text().splitlines()[0]
    return f"{doc}\n\n# fmt: off\nOUTCOMES: dict[str, str] = {{\n{''.join(lines)}}}\n"


def main() -> None:
    record: dict[str, dict[str, str]] = {}
    for package in FOLDERS:
        for version in RECORDED[package]:
            for fix, letters in found(package, version).items():
                record.setdefault(fix, {})[version] = letters
    MODULE.write_text(text(record), encoding="utf-8")


if __name__ == "__main__":
    main()
