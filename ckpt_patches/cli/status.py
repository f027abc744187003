"""The installed packages and the state of every fix. Reads files; never imports torch, megatron or deepspeed."""

import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ckpt_patches
from ckpt_patches import Switches, __version__
from ckpt_patches.engine.fix import numbers
from ckpt_patches.engine.installed import DISTRIBUTIONS, contains, find_spec, version_in
from ckpt_patches.engine.plan import FixResult, Outcome, fixes_for, module_path, plan_tree
from ckpt_patches.engine.registry import CORE, PACKAGES, TORCH
from ckpt_patches.engine.releases import too_old
from ckpt_patches.engine.trees import root_of
from ckpt_patches.errors import UserError
from ckpt_patches.hook import running
from ckpt_patches.hook.log_lines import unknown_skips
from ckpt_patches.inplace import rewrite
from ckpt_patches.runtime import terminal

ACTIVE = "active"
IN_PLACE = "in place"
NOT_NEEDED = "not needed"
NO_MATCH = "NO MATCH"
OFF = "off"
REPLACED = "replaced"  # in this process: other code than the edited one is loaded
# The bug is present, and its fix is not active.
MISSING = (NO_MATCH, REPLACED, OFF)


@dataclass(frozen=True)
class Installed:
    """A package of the stack: its release and the tree it is imported from; None if it is not installed."""

    name: str
    version: str | None
    location: str | None


@dataclass(frozen=True)
class FixStatus:
    """The state of a fix in this environment, and a reason if needed."""

    name: str
    package: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Status:
    """Everything that `ckpt-patches status` shows."""

    version: str
    mode: str
    hook_active: bool
    hook_reason: str  # why it is not active
    installed: tuple[Installed, ...]
    fixes: tuple[FixStatus, ...]
    warnings: tuple[str, ...]
    errors: tuple[str, ...]  # missing packages, unsupported releases

    @property
    def complete(self) -> bool:
        """Whether every required package is installed, and no needed fix is missing."""
        return not self.errors and not any(fix.state in MISSING for fix in self.fixes)

    def summary(self) -> str:
        """The number of fixes in each state, for the installed packages."""
        here = {package.name for package in self.installed if package.version}
        states = [fix.state for fix in self.fixes if DISTRIBUTIONS[fix.package] in here]
        counts = {state: states.count(state) for state in (ACTIVE, IN_PLACE, NOT_NEEDED, *MISSING)}
        told = [f"{count} {state}" for state, count in counts.items() if count or state in (ACTIVE, NOT_NEEDED)]
        what_to_do = {
            NO_MATCH: "report a release that a fix does not match, or leave the fix out with CKPT_PATCHES_SKIP",
            REPLACED: "import what replaces it later, or let it call what it replaces",
            OFF: "unset what switches a fix off, or write it into the files with ckpt-patches apply",
        }
        todo = [what for state, what in what_to_do.items() if counts[state]]
        return ": ".join([", ".join(told), *(["; ".join(todo)] if todo else [])])


def collect(tree: str | None = None, required: Sequence[str] = ()) -> Status:
    """Inspect the environment of this Python, or `tree` as if it were first on sys.path.

    Args:
        tree: a folder with an upstream package.
        required: distributions whose absence is an error.

    Raises:
        UserError: there is no upstream package in `tree`, or a file of it cannot be read.
    """
    switches = Switches(dict(os.environ))
    reason = _why_inactive(switches)
    found = {package: root_of(package, tree) for package in PACKAGES}
    roots = {package: Path(root) if root else None for package, root in found.items()}
    if tree is not None and not any(roots.values()):
        folders = " or ".join(f"{package.replace('.', '/')}/" for package in PACKAGES)
        raise UserError(f"expected {folders} in {tree}, found none")
    fixes = [fix for package, root in roots.items() for fix in _fixes(package, root, tree, switches)]
    if reason:  # shown once, for all fixes
        fixes = [replace(fix, state=OFF, reason="") if fix.state == ACTIVE else fix for fix in fixes]
    in_place = [fix.name for fix in fixes if fix.state == IN_PLACE and fix.name in switches.skip]
    installed = [
        Installed(DISTRIBUTIONS[package], version_in(root, package), str(root))
        if root
        else Installed(DISTRIBUTIONS[package], None, None)
        for package, root in roots.items()
        if root or package != TORCH
    ]
    others = [_distribution(name) for name in ("torch", "zarr") if name not in {one.name for one in installed}]
    # The Python that runs a tree may have packages that this one lacks.
    installed += [package for package in others if tree is None or package.version]
    skipped = [f"{name} is in CKPT_PATCHES_SKIP, and applied in place: ckpt-patches revert {name}" for name in in_place]
    warnings = [
        *switches.errors,
        *unknown_skips(switches.skip),
        *skipped,
        *_zarr_warning(roots[CORE], installed),
    ]
    if tree is None:
        if [package for package, root in roots.items() if root] == [TORCH]:  # it is in the wrong Python as well
            alone = f"of the packages only torch is installed for {sys.executable}"
            warnings.append(f"{alone}: --require NAME makes that an error")
        warnings += [warning for package, root in roots.items() for warning in _warning_of_another_tree(package, root)]
    return Status(
        __version__,
        switches.mode,
        not reason,
        reason,
        tuple(installed),
        tuple(fixes),
        tuple(warnings),
        tuple(_errors(roots, tree, required)),
    )


def _errors(roots: Mapping[str, Path | None], tree: str | None, required: Sequence[str]) -> list[str]:
    """Errors about packages that this environment lacks, or that are too old."""
    where = f"for {sys.executable}" if tree is None else f"in {tree}"
    absent = [DISTRIBUTIONS[package] for package in PACKAGES if roots[package] is None]
    if not any(roots.values()):
        return [f"nothing to patch: expected {' or '.join(absent)} to be installed {where}, found none"]
    old = [*filter(None, (too_old(package, version_in(root, package)) for package, root in roots.items() if root))]
    if tree is None and find_spec("torch") is None:
        old.append(f"torch is not installed for {sys.executable}: nothing that is shown here can run")
    return [*old, *(f"expected {name} to be installed {where}, found none" for name in absent if name in required)]


def _why_inactive(switches: Switches) -> str:
    if switches.mode == "off":
        return "CKPT_PATCHES=off"
    if ckpt_patches.installed not in sys.meta_path:
        return "this Python read no .pth file of ours: install the package into its site-packages, or use apply"
    return ""


def _warning_of_another_tree(package: str, root: Path | None) -> list[str]:
    """A warning if the current folder holds another tree: scripts in it import that one, a console script does not."""
    here = Path.cwd()
    if here == root or not contains(here, package):
        return []
    return [
        f"{here / package.replace('.', '/')} is {DISTRIBUTIONS[package]} {version_in(here, package)}: a script in this "
        "folder, or python -m, imports that one and not what is shown above: ckpt-patches status --tree ."
    ]


def _fixes(package: str, root: Path | None, tree: str | None, switches: Switches) -> list[FixStatus]:
    """The state of each fix in a tree."""
    if root is None:
        reason = f"{DISTRIBUTIONS[package]} is not {'installed' if tree is None else f'in {tree}'}"
        return [FixStatus(name, package, NOT_NEEDED, reason) for name in fixes_for(package)]
    in_place = rewrite.in_place(root, package).fixes
    whole = plan_tree(str(root), package, fixes_for(package))
    if tree is not None:
        whole.check_readable()
    results = {result.name: result for result in whole.results}
    hook = ckpt_patches.installed if tree is None else None
    trees = running.trees(hook.switches) if hook is not None else ()
    # What runs in this process, if it has imported the package.
    problems = {name: what for one in trees if one.plan.root == str(root) for name, what in one.problems().items()}
    found = [_fix(results[name], package, in_place, switches) for name in fixes_for(package)]
    return [
        replace(fix, state=REPLACED, reason=problems[fix.name])
        if fix.name in problems and fix.state in (ACTIVE, IN_PLACE)
        else fix
        for fix in found
    ]


def _fix(result: FixResult, package: str, in_place: tuple[str, ...], switches: Switches) -> FixStatus:
    states = {Outcome.APPLIES: ACTIVE, Outcome.NOT_NEEDED: NOT_NEEDED, Outcome.NO_MATCH: NO_MATCH}
    state, reason = states[result.outcome], result.reason
    if state == NOT_NEEDED and result.name in in_place:
        state = IN_PLACE
    elif state == ACTIVE and result.name in switches.skip:
        state, reason = OFF, f"CKPT_PATCHES_SKIP={result.name}"
    return FixStatus(result.name, package, state, reason)


def _distribution(name: str) -> Installed:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return Installed(name, None, None)
    return Installed(name, found.version, os.path.abspath(str(found.locate_file(""))))


def _zarr_warning(core: Path | None, installed: list[Installed]) -> list[str]:
    """A warning about zarr 3: megatron-core needs zarr 2 and sets no bound; zarr 3 ignores the synchronizer."""
    version = next((package.version or "" for package in installed if package.name == "zarr"), "")
    strategy = module_path(str(core), f"{CORE}.dist_checkpointing.strategies.zarr")
    if core is None or numbers(version) < (3,) or not os.path.exists(strategy):
        return []
    return [
        f"zarr {version} is installed, and the zarr checkpoints of megatron-core {version_in(core, CORE)} need zarr "
        "below 3 (zarr 3 ignores the locks that keep a save whole): pip install 'zarr<3'"
    ]


def as_text(found: Status) -> str:
    """The report for people, the fixes of each installed package with problems first."""
    python = f"Python {sys.version.split()[0]} ({sys.executable})"
    hook = "active" if found.hook_active else f"NOT ACTIVE: {found.hook_reason}"
    parts = [
        f"training-checkpoint-patches {found.version}, mode {found.mode}, {python}\nimport hook: {hook}",
        "\n".join(terminal.table([(p.name, p.version or "not installed", p.location or "") for p in found.installed])),
        *filter(None, (_fixes_as_text(found, package) for package in found.installed)),
        *(f"warning: {warning}" for warning in found.warnings),
        *(f"error: {error}" for error in found.errors),
        found.summary(),
    ]
    return "\n\n".join(parts)


def _fixes_as_text(found: Status, package: Installed) -> str:
    rank = {state: at for at, state in enumerate((*MISSING, ACTIVE, IN_PLACE, NOT_NEEDED))}
    own = [fix for fix in found.fixes if DISTRIBUTIONS[fix.package] == package.name]
    if not package.version or not own:
        return ""
    rows = [(fix.name, fix.state, fix.reason) for fix in sorted(own, key=lambda fix: (rank[fix.state], fix.name))]
    colors = {**dict.fromkeys(MISSING, "red"), ACTIVE: "green", IN_PLACE: "green"}
    title = terminal.paint(f"{package.name} {package.version}", "bold")
    return "\n".join([title, *terminal.table(rows, terminal.width(), wrapped=(2,), colors=colors)])
