"""Check whether code missing from a tree is also missing from a tested release. Only then may a fix stay off silently.

Otherwise a release that moves a file, or renames a class or function, would silently disable its fixes. This is the
only module that uses version numbers to judge code, and it can only add warnings.
"""

import re
from collections.abc import Iterator, Sequence

from ckpt_patches.engine.fix import numbers
from ckpt_patches.engine.outcomes import OUTCOMES
from ckpt_patches.engine.releases import RECORDED, without_build

# What an edit finds in a tree. A number after the letter counts the functions that the fix looked up but did not find.
MADE = "m"  # the code to edit
THERE = "t"  # the fix's code, or upstream's equivalent
REPAIRED = "r"  # the code, fixed upstream in another way
NO_BUG = "b"  # the code, without the bug
ABSENT = "-"  # not this code in any form, or no such file


def unrecorded(fix: str, package: str, version: str, found: Sequence[str]) -> tuple[int, str] | None:
    """The index of the first edit whose code is absent although a tested release has it, and that release.

    None if one of the compared releases has no such edit, or no record of the fix.

    Args:
        fix: its name.
        package: the upstream package.
        version: the tree's own version; may be unknown.
        found: what each edit of the fix finds, as one of the codes above; empty for an edit that was not tried.
    """
    first: tuple[int, str] | None = None
    for release in compared_with(package, version):
        recorded = of_release(fix, package, release)
        if len(recorded) != len(found):
            return None
        absent = (n for n, (here, there) in enumerate(zip(found, recorded, strict=True)) if not _is_benign(here, there))
        number = next(absent, None)
        if number is None:
            return None
        first = first or (number, release)
    return first


def _is_benign(here: str, there: str) -> bool:
    """Whether an edit finds no less code than the record has."""
    if not here or there[0] == ABSENT:
        return True
    kind_known = here[0] in (MADE, THERE, REPAIRED, there[0]) or (here[0], there[0]) == (NO_BUG, THERE)
    return kind_known and int(here[1:] or 0) <= int(there[1:] or 0)


def compared_with(package: str, version: str) -> tuple[str, ...]:
    """The tested releases to compare a tree with: its own release, or its two neighbors, or the newest one.

    A release candidate or a development commit may resemble the previous release or the next one.
    """
    releases = RECORDED[package]
    version = without_build(package, version)
    if version in releases:
        return (version,)
    here = numbers(version) or (999,)
    before = [release for release in releases if numbers(release) < here]
    after = [release for release in releases if numbers(release) >= here]
    return (*after[:1], *before[-1:])


def of_release(fix: str, package: str, release: str) -> list[str]:
    """What each edit of a fix found in a tested release; empty if that is not recorded."""
    at = RECORDED[package].index(release)
    words = ""
    for first, found in _changes(fix):
        if RECORDED[package].index(first) <= at:
            words = found
    return re.findall(r"\D\d*", words)


def _changes(fix: str) -> Iterator[tuple[str, str]]:
    """Pairs of a release and what a fix's edits find from that release on."""
    words = OUTCOMES.get(fix, "").split()
    return zip(words[::2], words[1::2], strict=True)
