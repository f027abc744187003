"""The table of upstream releases under test, and helpers to run programs on them.

Each release is installed into its own folder (a tree); a program runs in a process with that tree first on its path.
Trees are in `.trees/` or in the folder `CKPT_PATCHES_TREES`, and are installed on first use.
`--every-release` runs every release of the table instead of the default ones.

apex is on no package index. `CKPT_PATCHES_TEST_APEX` names a checkout, which is its only release; without it, the tests
that need apex are skipped.

Of torch, only the installed release runs. Its tree has links to its files, but for those that fixes edit, which are
copies. `make stacks` runs others.
"""

import atexit
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import forks
from ckpt_patches.engine import fix as fix_files
from ckpt_patches.engine.installed import DISTRIBUTIONS, version_in
from ckpt_patches.engine.registry import APEX, CORE, DEEPSPEED, NVRX, PACKAGES, TORCH
from ckpt_patches.engine.trees import root_of
from ckpt_patches.runtime.ranks import RANK_VARIABLES
from registered import FIXES
from trainers import gpu
from trainers.ranks import free_port

REPOSITORY = Path(__file__).resolve().parent.parent
TESTS = REPOSITORY / "tests"
# Programs that tests run: those of several rooms, and those of one.
PROGRAMS = (TESTS / "programs", *sorted(TESTS.glob("*/programs")))
# What a program imports besides upstream: other programs, trainers, and the proofs of fixes.
OWN_FOLDERS = (*PROGRAMS, TESTS, TESTS / "fixes")

# Where proofs find the packages of an environment: `pytest --site` sets it.
site: Path | None = None
every_release = False  # `pytest --every-release` sets it

# What programs have imported before they run, by what they are for; others have an interpreter of their own.
MEGATRON = (
    "trainers.megatron_training",  # first: the GPU stub must exist before Megatron's import
    "megatron.core.dist_checkpointing",
    "megatron.core.optimizer",
    "trainers.stub_fused_adam",
    "torch._dynamo",
)
ZARR_WRITES = ("trainers.zarr_saving", "megatron.core.dist_checkpointing.strategies.zarr")
ZERO = ("deepspeed.checkpoint.ds_to_universal", "trainers.deepspeed_training")
IMPORTED = {CORE: MEGATRON, DEEPSPEED: ZERO, TORCH: ("torch",)}  # by proofs, by the package of the fix
# The programs by these modules.
_PROGRAMS = {
    MEGATRON: """
        exact_resume explore_megatron gpt_resume megatron_fsdp_saving megatron_healthy megatron_saving proof
        param_groups run_proof shifted_saving
    """,
    ("torch",): "dcp_loading dcp_saving",
    ZERO: """
        convert same_universal autoep_training experts explore_deepspeed zero_resuming write_parallel_checkpoint
    """,
}
IMPORTS = {program: modules for modules, programs in _PROGRAMS.items() for program in programs.split()}

_ran = logging.getLogger("programs")
_ran.setLevel(logging.INFO)

# How a fix reaches a program: by the import hook, or written into the files of the tree.
DELIVERIES = ("hook", "in place")
# Time limit of a program in seconds: ten times what the slowest needs on an idle machine.
TIMEOUT = 900
PRODUCT = "numpy2_product"  # the fix without which megatron-core before 0.16 does not run with NumPy 2


@dataclass(frozen=True)
class Release:
    """One upstream release on the package index."""

    distribution: str
    version: str
    default: bool  # in the default run; the others with --every-release only
    note: str = ""  # why it cannot be run here; empty if it can


def _table(distribution: str, versions: Sequence[str], default: str, notes: Mapping[str, str]) -> list[Release]:
    return [Release(distribution, v, v in default.split(), notes.get(v, "")) for v in versions]


_TORCH_VERSION = re.match(r"\d+(\.\d+)*", metadata.version("torch"))
assert _TORCH_VERSION
INSTALLED_TORCH = _TORCH_VERSION[0]  # 2.13.0, of 2.13.0+cpu or 2.13.0a0+git1234


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers, to compare."""
    return tuple(int(part) for part in version.split("."))


HAS_NUMPY_2 = numbers(metadata.version("numpy")) >= (2,)

# The oldest release of the reports that two fixes are for. Other tests begin at the oldest supported release.
OLDEST_REPORTED = "0.9.0"

RELEASES: tuple[Release, ...] = (
    *_table(
        "megatron-core",
        [OLDEST_REPORTED, *PACKAGES[CORE].releases],
        default=f"{OLDEST_REPORTED} 0.12.0 0.14.0 0.19.2",
        notes={OLDEST_REPORTED: "uses np.product, which NumPy 2 does not have"} if HAS_NUMPY_2 else {},
    ),
    *_table("deepspeed", PACKAGES[DEEPSPEED].releases, default="0.15.0 0.16.2 0.19.2 0.19.8", notes={}),
    *_table("nvidia-resiliency-ext", PACKAGES[NVRX].releases, default="0.4.1 0.6.0", notes={}),
    *_table("apex", PACKAGES[APEX].releases, default="0.1", notes={}),  # a checkout: CHECKOUT_VARIABLES
    *_table(
        "torch",
        sorted({*PACKAGES[TORCH].releases, INSTALLED_TORCH}, key=numbers),
        default=INSTALLED_TORCH,
        notes=dict.fromkeys(
            {*PACKAGES[TORCH].releases} - {INSTALLED_TORCH}, "not the installed torch; `make stacks` runs it"
        ),
    ),
    *_table("numpy", ["2.2.6"], default="2.2.6", notes={}),
    *_table("triton", ["3.9.0"], default="3.9.0", notes={}),
)

COMPILED = ("numpy", "triton")  # packages that crash a Python other than the one that installed them

# What megatron-core imports since 0.18, and torch for the CPU does not bring: a tree behind that of a release.
_TRITON = ("triton", "3.9.0")

# Packages on no package index, and the variables that name a checkout in place of their releases.
CHECKOUT_VARIABLES = {"apex": "CKPT_PATCHES_TEST_APEX"}


def checkout(distribution: str) -> Path | None:
    """The checkout in place of a distribution's releases; None if it is on a package index, or no checkout is named.

    Raises:
        ValueError: there is no such folder.
    """
    variable = CHECKOUT_VARIABLES.get(distribution, "")
    name = os.environ.get(variable)
    if name and not Path(name).is_dir():
        raise ValueError(f"{variable}: expected a checkout, found no folder {name}; clone upstream there")
    return Path(name).resolve() if name else None


def all_releases() -> bool:
    """Whether this test run covers every release of the table."""
    return every_release


def releases(distribution: str, *, oldest: str | None = None, newest: str | None = None) -> list[Any]:
    """Pytest parameters, one per version, of a distribution's releases in an inclusive range.

    Only the oldest and the newest default release, unless `--every-release`. A release that cannot run here is
    skipped with its reason.
    """

    def within(version: str) -> bool:
        return (
            version != OLDEST_REPORTED
            and (oldest is None or numbers(oldest) <= numbers(version))
            and (newest is None or numbers(version) <= numbers(newest))
        )

    return _parameters(distribution, within)


def affected(fix: str) -> list[Any]:
    """Pytest parameters, as from `releases`, for the oldest and the newest release with a fix's bug that can run here.

    The fix's `releases` lists them.
    """
    loaded = fix_files.load(fix)
    distribution = DISTRIBUTIONS[loaded.package]
    last = newest_affected(fix)[1]
    with_bug = {version for version in runnable(distribution) if loaded.affects(version)}
    found = _parameters(distribution, loaded.affects if all_releases() else with_bug.__contains__, by_default=False)
    return found or [pytest.param(last, id=last)]


def _parameters(distribution: str, wanted: Callable[[str], bool], *, by_default: bool = True) -> list[Any]:
    """`by_default`: choose from the default releases, unless `--every-release`."""
    if here := in_site(distribution):
        return [pytest.param(here, id=here)] if wanted(here) else []
    chosen = [
        r
        for r in RELEASES
        if r.distribution == distribution and (r.default or all_releases() or not by_default) and wanted(r.version)
    ]
    if not all_releases():
        chosen = [*chosen[:1], *chosen[1:][-1:]]
    return [
        pytest.param(r.version, id=r.version, marks=pytest.mark.skip(reason=r.note) if r.note else ()) for r in chosen
    ]


Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def without_fix(versions: list[Any]) -> Decorator:
    """Decorate a test of `version` and `delivery` that shows a bug."""
    return _deliveries(versions, ["none"])


def with_fix(versions: list[Any]) -> Decorator:
    """Decorate a test of `version` and `delivery` that shows that a bug is gone."""
    return _deliveries(versions, DELIVERIES)


def _deliveries(versions: list[Any], deliveries: Sequence[str]) -> Decorator:
    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        for name, values in (("version", versions), ("delivery", deliveries)):
            test = pytest.mark.parametrize(name, values)(test)
        return test

    return decorate


def runnable(distribution: str) -> list[str]:
    """The versions of a distribution that can run here, newest first."""
    if here := in_site(distribution):
        return [here]
    versions = [release.version for release in RELEASES if release.distribution == distribution and not release.note]
    return sorted(versions, key=numbers, reverse=True)


def newest(distribution: str) -> str:
    """The newest release of a distribution that can run here."""
    return runnable(distribution)[0]


def newest_by_default(parameters: list[Any]) -> list[Any]:
    """Only the last of a list of releases in the default run, for tests that hardly differ between releases."""
    return parameters if all_releases() else parameters[-1:]


def checkpoint_formats(version: str) -> list[str]:
    """The formats in which a megatron-core release saves the distributed optimizer's state."""
    chosen = ["torch", "dp_zero_gather_scatter"]
    if numbers(version) < (0, 15):
        chosen.append("fully_sharded_bucket_space")
    if numbers(version) < (0, 16):
        chosen.append("fully_sharded_model_space")
    if numbers(version) >= (0, 15):
        chosen += ["dp_reshardable", "fully_reshardable"]
    return chosen


def tree(distribution: str, version: str) -> Path:
    """The folder that contains only this release. Installed on demand; read-only for tests.

    Raises:
        ValueError: the release is not in the table.
        RuntimeError: pip could not install it; its last lines are in the message.
        pytest.skip.Exception: it is on no package index, and no checkout is named; `site` has another release.
    """
    if here := in_site(distribution):
        if here != version:
            pytest.skip(f"needs {distribution} {version} as well, and {site} has {here}")
        assert site
        return site
    if not any((r.distribution, r.version) == (distribution, version) for r in RELEASES):
        raise ValueError(f"expected a release of the table in {__file__}, found {distribution} {version}; add it there")
    if variable := CHECKOUT_VARIABLES.get(distribution):
        if named := checkout(distribution):
            return named
        pytest.skip(f"{distribution} is on no package index, and {variable} names no checkout of it")
    if distribution == "torch" and version == INSTALLED_TORCH:
        return _linked_torch() / f"torch-{version}"
    folder = trees() / tree_name(distribution, version)
    if not folder.is_dir():
        with _locked(folder):
            if not folder.is_dir():
                _install(distribution, version, folder)
    return folder


@functools.cache
def in_site(distribution: str) -> str:
    """The release of a distribution in `site`; "" if it has none."""
    if site is None:
        return ""
    roots = {package: root_of(package, str(site)) for package, name in DISTRIBUTIONS.items() if name == distribution}
    found = next((version_in(Path(root), package) for package, root in roots.items() if root), "")
    if not roots:
        found = next((one.version for one in metadata.distributions(name=distribution, path=[str(site)])), "")
    release = re.match(r"\d+(\.\d+)*", found or "")
    return release[0] if release else ""


@functools.cache
def shared_folder() -> Path:
    """A folder that all processes of a test run share; its first process removes it at the end (conftest.py)."""
    run, own = os.environ.get("PYTEST_XDIST_TESTRUNUID"), os.getpid()
    folder = Path(tempfile.gettempdir(), f"ckpt-patches-{run or own}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if run is None:
        atexit.register(_remove, folder, own)
    return folder


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork
        shutil.rmtree(folder)


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The test run's file or folder of that name, which `make` writes on the first use; read-only afterwards."""
    path, done = shared_folder() / name, shared_folder() / f".{name}.done"
    with open(shared_folder() / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(path, ignore_errors=True)  # of one that failed
            make(path)
            done.touch()
    return path


def _linked_torch() -> Path:
    """The folder with a tree of the installed torch; created once per session."""

    def make(folder: Path) -> None:
        spec = find_spec("torch")
        assert spec is not None
        installed = Path(str(spec.origin)).parent
        beside = folder / f"torch-{INSTALLED_TORCH}" / "torch"
        own = Path("distributed", "checkpoint")  # what fixes edit
        for part in (*reversed(own.parents), own):
            (beside / part).mkdir(parents=True)
        for part in own.parents:
            for path in (installed / part).iterdir():
                if path.name != "__pycache__" and not (beside / part / path.name).exists():
                    (beside / part / path.name).symlink_to(path)
        shutil.copytree(installed / own, beside / own, dirs_exist_ok=True)

    return once("torch", make)


def tree_name(distribution: str, version: str) -> str:
    """The name of a release's folder; with this Python's version for compiled packages."""
    name = f"{distribution}-{version}"
    return f"{name}-py{sys.version_info.major}.{sys.version_info.minor}" if distribution in COMPILED else name


def trees() -> Path:
    return Path(os.environ.get("CKPT_PATCHES_TREES") or REPOSITORY / ".trees").resolve()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let only one process of this machine at a time install a tree."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(distribution: str, version: str, folder: Path) -> None:
    """Install into a temporary folder beside `folder`, and rename it when complete."""
    options = ["--no-deps"]
    if distribution == "deepspeed":  # a source distribution whose setup imports torch
        options.append("--no-build-isolation")
    if distribution == "megatron-core" and numbers(version) >= (0, 17):
        # These require Python 3.12. Their compiled code is for data sets; the rest runs on 3.10 and 3.11.
        options += ["--python-version", "3.12", "--only-binary=:all:", "--ignore-requires-python"]
    if distribution == "nvidia-resiliency-ext":
        # Wheels for Python 3.12 and a newer glibc; their compiled code is not for checkpoints.
        systems = (f"manylinux_2_{glibc}_x86_64" for glibc in (31, 39))
        options += ["--python-version", "3.12", "--only-binary=:all:", *(f"--platform={system}" for system in systems)]
    environment = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", "CKPT_PATCHES": "off"}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        target, what = Path(temporary, "tree"), f"{distribution}=={version}"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(target)]
        done = subprocess.run(
            [*command, *options, what], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"{what} could not be installed into {folder} (pip's exit status {done.returncode}); "
                f"install it there by hand, or give its reason in {__file__}. pip said:\n{_tail(done.stdout)}"
            )
        os.chmod(target, 0o755)
        os.rename(target, folder)


def in_place(tree: Path, fixes: Sequence[str] = ()) -> Path:
    """A copy of a tree with these fixes, or all, written into its files; created once per session."""
    return _in_place(Path(tree).resolve(), tuple(fixes))


@functools.cache
def _in_place(tree: Path, fixes: tuple[str, ...]) -> Path:
    def make(folder: Path) -> None:
        copy = folder / tree.name
        # Another process may be writing bytecode, under a temporary name until it is complete.
        shutil.copytree(tree, copy, ignore=shutil.ignore_patterns("*.pyc.*", ".git"), symlinks=True)
        command = [sys.executable, "-m", "ckpt_patches", "apply", *fixes, "--tree", str(copy)]
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, f"{' '.join(command)}: exit status {done.returncode}\n{_tail(done.stdout)}"

    what = hashlib.sha256(" ".join([str(tree), *fixes]).encode()).hexdigest()
    return once(f"in-place-{what[:16]}", make) / tree.name


def program_file(name: str) -> Path:
    """The file of a program in `PROGRAMS`."""
    return next(path for folder in PROGRAMS if (path := folder / f"{name}.py").exists())


def run(
    program: str | Path,
    *args: str | Path,
    tree: Path,
    delivery: str = "none",
    fixes: Sequence[str] = (),
    path: Sequence[str | Path] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    check: bool = True,
    imports: Sequence[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program on a tree: a file in `PROGRAMS` (its name without .py) or any path.

    `delivery` is "none" (upstream as it is), "hook" (in strict mode) or "in place" (an edited copy, no hook), with
    all fixes or those in `fixes`. Modules in `imports`, or the known ones of a program in `PROGRAMS`, are
    imported once for many runs (forks.py); with none it has an interpreter of its own. The command is logged: pytest
    shows it where a test fails.

    Raises:
        AssertionError: the program's exit status is not 0 (unless `check` is false); its last lines are in the message.
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    if delivery not in ("none", *DELIVERIES):
        raise ValueError(f"expected delivery to be one of none, {', '.join(DELIVERIES)}, found {delivery!r}")
    if fixes and lacks_product(tree, path):
        fixes = [*fixes, PRODUCT]
    root = in_place(tree, fixes) if delivery == "in place" else tree
    file = program if isinstance(program, Path) else program_file(program)
    environment = environment_for(root, delivery, path)
    if fixes:
        environment["CKPT_PATCHES_SKIP"] = ",".join(FIXES.keys() - set(fixes))
    environment.update(env or {})
    if imports is None:
        imports = IMPORTS.get(file.stem, ()) if file.parent in PROGRAMS else ()
    argv = [str(file), *map(str, args)]
    changed = [f"{name}={value}" for name, value in environment.items() if os.environ.get(name) != value]
    _ran.info(shlex.join(["env", *changed, sys.executable, *argv]))
    done = forks.run(argv, environment, timeout, imports) if imports else None
    if done is None:
        command = [sys.executable, *argv]
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=timeout)
    if check and done.returncode != 0:
        raise AssertionError(
            f"{' '.join(done.args)} on {root} ({delivery}): exit status {done.returncode}\n"
            f"--- stdout\n{_tail(done.stdout)}\n--- stderr\n{_tail(done.stderr)}"
        )
    return done


def run_json(program: str | Path, *args: str | Path, **keywords: Any) -> Any:
    """`run`, and parse the last line of standard output as JSON."""
    done = run(program, *args, **keywords)
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        raise AssertionError(
            f"expected JSON in the last line of {program}, found:\n{_tail(done.stdout)}\n"
            f"--- stderr\n{_tail(done.stderr)}"
        ) from None


def run_lines(program: str | Path, *args: str | Path, **keywords: Any) -> list[dict[str, Any]]:
    """`run`, and parse the lines of standard output that are JSON objects."""
    done = run(program, *args, **keywords)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def newest_affected(fix: str) -> tuple[str, str]:
    """The distribution and the version of the newest release that has the bug of a fix and can run here.

    The newest of all, if the `releases` of a new fix are still empty.
    """
    loaded = fix_files.load(fix)
    distribution = DISTRIBUTIONS[loaded.package]
    return distribution, next(filter(loaded.affects, runnable(distribution)), newest(distribution))


def called(
    file: str,
    function: str,
    *arguments: Any,
    version: str,
    delivery: str,
    folder: Path | None = None,
    layout: Sequence[int] = (),
    **keywords: Any,
) -> Any:
    """What a function of a fix's proof returns on a release. It gets a folder, by default an empty one, and arguments.

    With a layout (ranks, pipeline stages, tensor-parallel size) it runs on these ranks of megatron-core, and this is
    a list; see `proof.py`. `keywords` are those of `run`.
    """
    package = fix_files.package_of(Path(file).stem.removeprefix("test_"))
    options = ["--folder", str(folder)] if folder else []
    options += ["--arguments", json.dumps(arguments)] if arguments else []
    on = {"imports": IMPORTED.get(package, ()), **keywords}
    root = tree(DISTRIBUTIONS[package], version)
    return run_json("proof", file, function, *map(str, layout), *options, tree=root, delivery=delivery, **on)


def shown(file: str, version: str, delivery: str, function: str = "bug", **keywords: Any) -> str:
    """What a function of a fix's proof finds wrong on a release, in words, or an error of a rank; "" if nothing."""
    return str(called(file, function, version=version, delivery=delivery, **keywords))


def proof(
    file: str, wrong: str | re.Pattern[str], versions: Sequence[Any] = (), **keywords: Any
) -> tuple[Callable[..., None], Callable[..., None]]:
    """The two tests of a proof whose `bug` finds in words what is wrong: these words without the fix, none with it.

    On the oldest and the newest affected release, or on these. `keywords` are those of `run`.
    """
    versions = [*versions] or affected(Path(file).stem.removeprefix("test_"))
    said = re.compile(re.escape(wrong)) if isinstance(wrong, str) else wrong

    @without_fix(versions)
    def bug_shows(version: str, delivery: str) -> None:
        found = shown(file, version, delivery, **keywords)
        assert said.search(found), f"expected {said.pattern!r}, found {found!r}"

    @with_fix(versions)
    def bug_is_gone(version: str, delivery: str) -> None:
        found = shown(file, version, delivery, **keywords)
        assert found == "", found

    return bug_shows, bug_is_gone


def outcomes(
    file: str, function: str, without: object, fixed: object, *, rank: int | None = None, **keywords: Any
) -> tuple[Callable[..., None], Callable[..., None]]:
    """The two tests of a proof of which a function returns one thing without the fix and another with it.

    With a rank, what that one returns. `keywords` are those of `called`.
    """
    versions = affected(Path(file).stem.removeprefix("test_"))

    def found(version: str, delivery: str) -> Any:
        of_all = called(file, function, version=version, delivery=delivery, **keywords)
        return of_all if rank is None else of_all[rank]

    @without_fix(versions)
    def bug_shows(version: str, delivery: str) -> None:
        assert found(version, delivery) == without

    @with_fix(versions)
    def bug_is_gone(version: str, delivery: str) -> None:
        assert found(version, delivery) == fixed

    return bug_shows, bug_is_gone


# Options of pytest without this repository's settings.
PLAIN = ("-q", "-p", "no:cacheprovider", "-c", os.devnull)


def run_pytest(*files: Path, rootdir: Path, options: Sequence[str] = (), **keywords: Any) -> str:
    """`run` pytest on test files, whether they pass or not; return its output."""
    program = Path(pytest.__file__).parent / "__main__.py"
    return run(program, *files, *PLAIN, "--rootdir", rootdir, *options, check=False, **keywords).stdout


def environment_for(root: Path, delivery: str, path: Sequence[str | Path] = ()) -> dict[str, str]:
    """The environment of a program under test; a copy, free to change."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    apex = checkout("apex")
    stubs = [TESTS / "fork" / "programs" / "stub_apex_kernels"] if apex and root.name == apex.name else []
    folders = [root, *path, *stubs, *needed(root), *OWN_FOLDERS]
    product_alone = delivery == "none" and lacks_product(root, path)
    return {
        **{name: os.environ[name] for name in ["CKPT_PATCHES_TEST_PATIENCE"] if name in os.environ},
        **variables(inherited, patched=delivery == "hook" or product_alone),
        **({"CKPT_PATCHES_SKIP": ",".join(FIXES.keys() - {PRODUCT})} if product_alone else {}),
        **({"CKPT_PATCHES": "warn"} if delivery == "hook" and root.name.endswith(f"core-{OLDEST_REPORTED}") else {}),
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **(_switches_of_site() if delivery == "hook" and root == site else {}),
    }


def _switches_of_site() -> dict[str, str]:
    """The fixes that the environment has, and no GPU.

    In strict mode a fix that does not match would stop the programs of all others.
    """
    mode = "off" if os.environ.get("CKPT_PATCHES") == "off" else "warn"
    skip = {name: os.environ[name] for name in ["CKPT_PATCHES_SKIP"] if name in os.environ}
    return {"CKPT_PATCHES": mode, **skip, "CUDA_VISIBLE_DEVICES": ""}


NOT_INHERITED = (*RANK_VARIABLES, "LOCAL_RANK", "WORLD_SIZE")  # set by a launcher


def variables(environ: Mapping[str, str], *, patched: bool) -> dict[str, str]:
    """A program's variables: `environ` without a launcher's, and the import hook on or off for all fixes."""
    kept = {k: v for k, v in environ.items() if k not in NOT_INHERITED and not k.startswith("CKPT_PATCHES")}
    accelerator = "cuda" if environ.get(gpu.SWITCH) == "1" else "cpu"
    kept["CKPT_PATCHES"] = "strict" if patched else "off"
    # On import, megatron-core 0.15 compiles for a GPU if torch supports one; torch then queries the GPU for this.
    architecture = {"TORCH_CUDA_ARCH_LIST": "9.0"} if accelerator == "cpu" else {}
    return {**architecture, **kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": accelerator}


def lacks_product(root: Path, path: Sequence[str | Path] = ()) -> bool:
    """Whether a release uses functions that the installed NumPy 2 removed; then both sides have the fix for that.

    False if a test adds its own NumPy to show that bug.
    """
    distribution, _, version = root.name.rpartition("-")
    is_old = distribution == "megatron-core" and numbers(version) < (0, 16)
    return is_old and HAS_NUMPY_2 and not any(Path(folder).name.startswith("numpy-") for folder in path)


def needed(root: Path) -> list[Path]:
    """The trees that must follow this one on the path, by its folder's name, which edited copies keep."""
    distribution, _, version = root.name.rpartition("-")
    return [tree(*_TRITON)] if distribution == "megatron-core" and numbers(version) >= (0, 18) else []


def _tail(text: str, lines: int = 40) -> str:
    return "\n".join(text.splitlines()[-lines:])
