"""Whether what is not in a tree was absent from a tested release as well: only then is a fix off for a good reason.

A release that moves a file, or renames a class or a function, would else turn off the fixes to it without a word. It is
the one place where a version number counts, and all that it can do is to add warnings.
"""

import re
from collections.abc import Iterator, Sequence

from ckpt_patches.engine.outcomes import OUTCOMES
from ckpt_patches.engine.releases import RECORDED

# What an edit finds in a tree. Behind it: how many functions are not there of those that the fix has asked for by name.
MADE = "m"  # the code to edit
THERE = "t"  # what it brings, or what upstream has in its place
REPAIRED = "r"  # the code, repaired in another way
NO_BUG = "b"  # the code, without the bug
ABSENT = "-"  # not the code, or not the file


def unrecorded(fix: str, package: str, version: str, found: Sequence[str]) -> tuple[int, str] | None:
    """The number of the first edit whose code is absent though a tested release has it, and that release.

    None where nothing is, and for a fix without a record.

    Args:
        fix: its name.
        package: the upstream package.
        version: what the tree calls itself; may be unknown.
        found: for each edit of the fix what it finds, in the words above; empty for an edit that was not tried.
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
    """Whether an edit was made, has been made, or has nothing to do by the record as well."""
    if not here or there[0] == ABSENT:
        return True
    kind_known = here[0] in (MADE, THERE, REPAIRED, there[0]) or (here[0], there[0]) == (NO_BUG, THERE)
    return kind_known and int(here[1:] or 0) <= int(there[1:] or 0)


def compared_with(package: str, version: str) -> tuple[str, ...]:
    """The tested releases to which a tree is compared: itself, or those around it, or the newest one.

    A release candidate and a commit on the way to a release may be as the one before or as that release.
    """
    releases = RECORDED[package]
    if version in releases:
        return (version,)
    found = re.match(r"\d+(\.\d+)*", version)
    here = _numbers(found[0]) if found else (999,)
    before = [release for release in releases if _numbers(release) < here]
    after = [release for release in releases if _numbers(release) >= here]
    return (*after[:1], *before[-1:])


def of_release(fix: str, package: str, release: str) -> list[str]:
    """What each edit of a fix found in a tested release; empty where that is not recorded."""
    at = RECORDED[package].index(release)
    words = ""
    for first, found in _changes(fix):
        if RECORDED[package].index(first) <= at:
            words = found
    return re.findall(r"\D\d*", words)


def _changes(fix: str) -> Iterator[tuple[str, str]]:
    """From which release on a fix's edits find what."""
    words = OUTCOMES.get(fix, "").split()
    return zip(words[::2], words[1::2], strict=True)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
