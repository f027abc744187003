"""What a release says about a bug. Statements hold for the releases in `registry.PACKAGES`, on which the tests ran."""

from ckpt_patches.engine.fix import numbers
from ckpt_patches.engine.installed import locate, version_in
from ckpt_patches.engine.registry import CORE, DEEPSPEED, PACKAGES, TORCH
from ckpt_patches.engine.source import Ranges
from ckpt_patches.errors import UserError

_NEXT = (999,)  # as a release that is not there yet


def newest(distribution: str) -> str:
    """The newest of the releases: the end of the range of a bug that upstream has not fixed."""
    return next(package.releases[-1] for package in PACKAGES.values() if package.distribution == distribution)


def have_code(ranges: Ranges, package: str, version: str) -> bool:
    """Whether stated releases say that a tree of this version has the code of an edit.

    A range that ends with the newest release is open: what comes after it has the code, too. A candidate, a
    development version or a build with changes (`0.17.0+26`) can be as the release before it or the one after it:
    both must have the code.
    """
    last_known = PACKAGES[package].releases[-1]
    spans = [(numbers(first), _NEXT if last == last_known else numbers(last)) for first, last in ranges]
    return all(any(first <= here <= last for first, last in spans) for here in _as_releases(package, version))


def _as_releases(package: str, version: str) -> list[tuple[int, ...]]:
    """The numbers of the releases that a version counts as; those of no release yet if it is unknown."""
    version, here = without_build(package, version), numbers(version) or _NEXT
    known = [numbers(release) for release in PACKAGES[package].releases]
    after = version.removeprefix(".".join(map(str, here)))
    if after.startswith("+"):
        return [here, min((release for release in known if release > here), default=_NEXT)]
    if after and not after.startswith(".post") and numbers(version):
        return [max((release for release in known if release < here), default=(0,)), here]
    return [here]


def too_old(package: str, version: str) -> str:
    """The message about a version of megatron-core or DeepSpeed before the oldest supported release; else empty.

    Fixes have no forms for older ones, but those whose `releases` begin earlier.
    """
    name, oldest = PACKAGES[package].distribution, PACKAGES[package].releases[0]
    if package not in (CORE, DEEPSPEED) or not () < numbers(version) < numbers(oldest):
        return ""
    return (
        f"{name} {version} is older than this version of training-checkpoint-patches supports ({oldest} and later): "
        "fixes may be missing; version 0.2 (git revision ee6adc7) supports it"
    )


def without_build(package: str, version: str) -> str:
    """The release of a build of torch, such as 2.13.0+cpu. Of other packages, what follows + may be changed code."""
    return version.partition("+")[0] if package == TORCH else version


def distribution(name: str) -> str:
    """An upstream package's name in pip's spelling.

    Raises:
        UserError: the package is unknown.
    """
    found = name.lower().replace("_", "-")
    known = [one.distribution for one in PACKAGES.values()]
    if found not in known:
        raise UserError(f"expected {' or '.join(known)}, found {name}")
    return found


def recorded_release(requirement: str) -> tuple[str, str]:
    """The upstream package and the release of `PACKAGE==VERSION`, or of `PACKAGE` the one that is installed.

    Raises:
        UserError: the package is unknown or not installed, or the tests never ran on that release.
    """
    name, equals, version = (part.strip() for part in requirement.partition("=="))
    if set(name) & set("<>=!~"):
        raise UserError(
            f"expected PACKAGE==VERSION, such as megatron-core=={newest('megatron-core')}, found {requirement}"
        )
    package = next(one for one in PACKAGES.values() if one.distribution == distribution(name))
    root = None if equals else locate(package.root)
    version = without_build(package.root, version_in(root, package.root) if root else version)
    if not version and not equals:
        raise UserError(f"{requirement}: expected the package to be installed, found none; name a release with ==")
    if old := too_old(package.root, version):
        raise UserError(old)
    if version not in package.releases:
        raise UserError(
            f"expected a tested release of {package.distribution} ({package.releases[0]} to {package.releases[-1]}), "
            f"found {version or 'none'}; for any other release: ckpt-patches list --tree PATH"
        )
    return package.root, version
