"""What is installed, and what every fix does here. Reads files; imports nothing of torch, megatron or deepspeed."""

import importlib.metadata
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ckpt_patches import __version__, inplace
from ckpt_patches.plan import FixResult, Outcome, fixes_for, module_path, plan_tree
from ckpt_patches.registry import CORE, DEEPSPEED
from ckpt_patches.startup import Switches, installed_finder
from ckpt_patches.upstream import DISTRIBUTIONS, find_spec, locate, version_in

ACTIVE = "active"
APPLIED_IN_PLACE = "applied in place"
FIXED_UPSTREAM = "fixed upstream"
NOT_PRESENT = "not present"
NO_MATCH = "NO MATCH"
SWITCHED_OFF = "switched off"
# The bug is there, and so is not its fix.
MISSING = (NO_MATCH, SWITCHED_OFF)


@dataclass(frozen=True)
class Installed:
    """A package of the stack: its release and the tree it is imported from; None if it is not installed."""

    name: str
    version: str | None
    location: str | None


@dataclass(frozen=True)
class FixStatus:
    """What a fix does in this environment, and why where that needs saying."""

    name: str
    package: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Status:
    """All that `ckpt-patches status` shows."""

    version: str
    mode: str
    installed: tuple[Installed, ...]
    fixes: tuple[FixStatus, ...]
    warnings: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether no fix that is needed here is missing."""
        return not any(fix.state in MISSING for fix in self.fixes)


def collect() -> Status:
    """Look at the environment of this Python."""
    switches = Switches(dict(os.environ))
    roots = {package: locate(package) for package in (CORE, DEEPSPEED)}
    fixes = [fix for package, root in roots.items() for fix in _fixes(package, root, switches)]
    installed = [
        Installed(DISTRIBUTIONS[package], version_in(root, package) if root else None, str(root) if root else None)
        for package, root in roots.items()
    ]
    installed += [_distribution(name) for name in ("torch", "zarr", "apex")]
    warnings = [*switches.errors, *_zarr_warning(roots[CORE], installed), *_apex_warning()]
    return Status(__version__, switches.mode, tuple(installed), tuple(fixes), tuple(warnings))


def _fixes(package: str, root: Path | None, switches: Switches) -> list[FixStatus]:
    if root is None:
        reason = f"{DISTRIBUTIONS[package]} is not installed"
        return [FixStatus(name, package, NOT_PRESENT, reason) for name in fixes_for(package)]
    in_place = inplace.read_state(root, package).fixes
    return [_fix(result, package, in_place, switches) for result in plan_tree(str(root), package).results]


def _fix(result: FixResult, package: str, in_place: tuple[str, ...], switches: Switches) -> FixStatus:
    state, reason = NOT_PRESENT, "this release does not have the code"
    if result.outcome is Outcome.ALREADY_THERE:
        state, reason = (APPLIED_IN_PLACE, "") if result.name in in_place else (FIXED_UPSTREAM, "")
    elif result.outcome is Outcome.NO_MATCH:
        state, reason = NO_MATCH, result.reason
    elif result.outcome is Outcome.APPLIES:
        reason = _why_off(result.name, switches)
        state = SWITCHED_OFF if reason else ACTIVE
    return FixStatus(result.name, package, state, reason)


def _why_off(name: str, switches: Switches) -> str:
    if switches.mode == "off":
        return "CKPT_PATCHES=off"
    if name in switches.skip:
        return f"CKPT_PATCHES_SKIP={name}"
    if installed_finder() is None:
        return "the import hook is not installed: this Python read no .pth file of ours"
    return ""


def _distribution(name: str) -> Installed:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return Installed(name, None, None)
    return Installed(name, found.version, os.path.abspath(str(found.locate_file(""))))


def _zarr_warning(core: Path | None, installed: list[Installed]) -> list[str]:
    """megatron-core's zarr strategy needs zarr 2 and names no bound; zarr 3 ignores the synchronizer."""
    version = next(package.version for package in installed if package.name == "zarr")
    if core is None or version is None or not version.split(".")[0].isdigit() or int(version.split(".")[0]) < 3:
        return []
    if not os.path.exists(module_path(str(core), "megatron.core.dist_checkpointing.strategies.zarr")):
        return []
    release = version_in(core, CORE)
    return [
        f"zarr {version} is installed, and the zarr checkpoints of megatron-core {release} need zarr below 3 (zarr 3 "
        "ignores the locks that keep a save whole): pip install 'zarr<3'"
    ]


def _apex_warning() -> list[str]:
    """`apex` on the package index is not NVIDIA's."""
    spec = find_spec("apex")
    folders = list(spec.submodule_search_locations or []) if spec else []
    if spec is None or any(os.path.isdir(os.path.join(folder, "optimizers")) for folder in folders):
        return []
    where = folders[0] if folders else spec.origin
    return [
        f"the package apex in {where} is not NVIDIA's (no apex.optimizers in it): uninstall it, or install "
        "NVIDIA's from its repository"
    ]


def python() -> str:
    """The interpreter that the status is of."""
    return f"Python {sys.version.split()[0]} ({sys.executable})"
