"""The upstream releases that the tests ran on. Statements about a bug hold for these releases only."""

from ckpt_patches.engine.fix import numbers
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.registry import CORE, DEEPSPEED, PACKAGES, TORCH
from ckpt_patches.engine.source import Ranges
from ckpt_patches.errors import UserError

_NEXT = (999,)  # as a release that is not there yet
RECORDED = {root: package.releases for root, package in PACKAGES.items()}
# The oldest supported releases. Fixes have no forms for older ones, but those whose `releases` begin earlier.
FLOORS = {package: RECORDED[package][0] for package in (CORE, DEEPSPEED)}


def newest(distribution: str) -> str:
    """The newest of the releases: the end of the range of a bug that upstream has not fixed."""
    return next(package.releases[-1] for package in PACKAGES.values() if package.distribution == distribution)


def have_code(ranges: Ranges, package: str, version: str) -> bool:
    """Whether stated releases say that a tree of this version has the code of an edit.

    A range that ends with the newest release is open: what comes after it has the code, too. A candidate, a
    development version or a build with changes (`0.17.0+26`) can be as the release before it or the one after it:
    both must have the code.
    """
    newest_of = RECORDED[package][-1]
    spans = [(numbers(first), _NEXT if last == newest_of else numbers(last)) for first, last in ranges]
    return all(any(first <= here <= last for first, last in spans) for here in _as_releases(package, version))


def _as_releases(package: str, version: str) -> list[tuple[int, ...]]:
    """The numbers of the releases that a version counts as; those of no release yet if it is unknown."""
    version, here = without_build(package, version), numbers(version) or _NEXT
    known = [numbers(release) for release in RECORDED[package]]
    after = version.removeprefix(".".join(map(str, here)))
    if after.startswith("+"):
        return [here, min((release for release in known if release > here), default=_NEXT)]
    if after and not after.startswith(".post") and numbers(version):
        return [max((release for release in known if release < here), default=(0,)), here]
    return [here]


def is_too_old(package: str, version: str) -> bool:
    """Whether a version is older than the oldest supported release; not if it is unknown."""
    here = numbers(version)
    return package in FLOORS and bool(here) and here < numbers(FLOORS[package])


def too_old(package: str, version: str) -> str:
    """The message about such a version."""
    return (
        f"{DISTRIBUTIONS[package]} {version} is older than this version of training-checkpoint-patches supports "
        f"({FLOORS[package]} and later): fixes may be missing; version 0.2 (git revision ee6adc7) supports it"
    )


def without_build(package: str, version: str) -> str:
    """The release of a build of torch, such as 2.13.0+cpu. Of other packages, what follows + may be changed code."""
    return version.partition("+")[0] if package == TORCH else version


def recorded_release(requirement: str) -> tuple[str, str]:
    """The upstream package and the release of `PACKAGE==VERSION`.

    Raises:
        UserError: the package is unknown, or the tests never ran on that release.
    """
    name, equals, version = (part.strip() for part in requirement.partition("=="))
    called = name.lower().replace("_", "-")
    package = next((root for root, one in PACKAGES.items() if one.distribution == called), None)
    if package is None or not equals:
        known = " or ".join(f"{DISTRIBUTIONS[p]}=={versions[-1]}" for p, versions in RECORDED.items())
        raise UserError(f"expected PACKAGE==VERSION, such as {known}, found {requirement}")
    versions = RECORDED[package]
    version = without_build(package, version)
    if is_too_old(package, version):
        raise UserError(too_old(package, version))
    if version not in versions:
        raise UserError(
            f"expected a tested release of {DISTRIBUTIONS[package]} ({versions[0]} to {versions[-1]}), found "
            f"{version or 'none'}; for any other release: ckpt-patches list --tree PATH"
        )
    return package, version
