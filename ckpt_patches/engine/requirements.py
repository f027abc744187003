"""Conditions on the versions of other packages, such as `torch>=2.8,<2.10`. Versions are ordered by PEP 440.

https://packaging.python.org/en/latest/specifications/version-specifiers/
"""

import operator
import re
from collections.abc import Sequence

from ckpt_patches.engine.installed import version_of
from ckpt_patches.engine.source import NoMatch

_OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
}
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_VERSION = re.compile(
    r"(?P<release>\d+(\.\d+)*)((?P<kind>a|b|rc)(?P<pre>\d+))?(\.post(?P<post>\d+))?(\.dev(?P<dev>\d+))?(\+[\w.]+)?"
)
_PHASES = {"a": -3, "b": -2, "rc": -1}
FINAL = (0, 0)

Key = tuple[tuple[int, ...], tuple[int, int], int, float]


def parse(requirement: str) -> tuple[str, list[tuple[str, str]]]:
    """The distribution of a requirement and its conditions: operator and version.

    Raises:
        ValueError: the text is not a requirement.
    """
    name, conditions = re.fullmatch(r"\s*([^\s<>=!]*)(.*)", requirement, re.DOTALL).groups()  # type: ignore[union-attr]
    parts = [re.fullmatch(r"\s*(>=|<=|==|!=|<)\s*(\S+)\s*", part) for part in conditions.split(",")]
    found = [(part[1], part[2]) for part in parts if part and _VERSION.fullmatch(part[2]) and ".post" not in part[2]]
    if not _NAME.fullmatch(name) or len(found) != len(parts):
        raise ValueError(f"expected a requirement such as torch>=2.8,<2.10, found {requirement!r}")
    return name, found


def unmet(requirements: Sequence[str], root: str) -> str:
    """The first requirement that is not met with a tree first on the path, and the version found; empty if all are met.

    Raises:
        NoMatch: the version of an installed package is unknown.
    """
    for requirement in requirements:
        name, conditions = parse(requirement)
        version = version_of(name, root)
        if version is None:
            return f"it is for {requirement}, and {name} is not installed"
        if not _VERSION.fullmatch(version):
            raise NoMatch(
                f"it is for {requirement}: expected a version of {name} such as 2.8.0, found {version[:80]!r}"
            )
        if not all(_holds(version, sign, limit) for sign, limit in conditions):
            return f"it is for {requirement}, found {name} {version}"
    return ""


def _holds(version: str, sign: str, limit: str) -> bool:
    here, there = _key(version), _key(limit)
    if sign == "<" and here[0] == there[0] and _is_early(here) and not _is_early(there):
        return False  # 0.13.0rc1 does not count as below 0.13
    return bool(_OPERATORS[sign](here, there))


def _is_early(key: Key) -> bool:
    return key[1] != FINAL or key[3] != float("inf")


def _key(version: str) -> Key:
    """The sort key of a version, without its local part (after the +)."""
    found = _VERSION.fullmatch(version)
    assert found
    release = [*map(int, found["release"].split("."))]
    while release and release[-1] == 0:
        release.pop()
    phase = FINAL
    if found["kind"]:
        phase = (_PHASES[found["kind"]], int(found["pre"]))
    elif found["dev"] and not found["post"]:
        phase = (min(_PHASES.values()) - 1, 0)
    return tuple(release), phase, int(found["post"] or -1), float(found["dev"] or "inf")
