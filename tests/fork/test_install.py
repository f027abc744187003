"""Real pip installs of the working tree into fresh environments: what Python imports, and what an uninstall leaves."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import installs
import upstream
from installs import SHOW_HOOK, Environment, copy_working_tree, without_roots_rights
from registered import FIXES, SWITCHED
from small_tree import make_two

pytestmark = pytest.mark.slow

# Imports all that can be imported without torch, so that bytecode is written before an uninstall.
IMPORT_US = """
import importlib, pkgutil, ckpt_patches, ckpt_patches.engine.fix, ckpt_patches.engine.registry
for module in pkgutil.iter_modules(ckpt_patches.__path__):
    if module.name != "__main__":
        importlib.import_module(f"ckpt_patches.{module.name}")
registry = ckpt_patches.engine.registry
for name, fix in ckpt_patches.engine.fix.every_fix().items():
    importlib.import_module(f"{registry.PACKAGES[fix.package].folders[0]}.{name}")
"""


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment.make(tmp_path / "venv")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return copy_working_tree(tmp_path / "source")


@pytest.fixture
def wheel() -> Path:
    return installs.wheel()


@pytest.fixture
def installed() -> Environment:
    """The environment with the wheel; read-only."""
    return installs.installed()


def as_folder(environment: Environment, source: Path) -> list[str]:
    """The folder itself, with files left by the build of an earlier version."""
    left = source / "build" / "lib" / "megatron" / "patches" / "earlier.py"
    left.parent.mkdir(parents=True)
    left.write_text("")
    return [str(source)]


def as_editable(environment: Environment, source: Path) -> list[str]:
    return ["-e", str(source)]


def as_wheel(environment: Environment, source: Path) -> list[str]:
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    environment.pip("wheel", *options, "-w", str(source / "dist"), str(source))
    return [str(path) for path in (source / "dist").glob("*.whl")]


def as_source_distribution(environment: Environment, source: Path) -> list[str]:
    program = "import setuptools.build_meta as b; b.build_sdist('dist')"
    done = environment.python("-c", program, cwd=source, PYTHONPATH=str(environment.tools), CKPT_PATCHES="off")
    assert done.returncode == 0, done.stderr
    return [str(path) for path in (source / "dist").glob("*.tar.gz")]


def as_git(environment: Environment, source: Path) -> list[str]:
    def git(*args: str) -> None:
        identity = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *args], cwd=source, check=True, capture_output=True)

    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--no-verify", "-m", "The working tree")
    return [f"git+file://{source}"]


KINDS = [
    as_editable,
    as_git,
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in (as_folder, as_wheel, as_source_distribution)),
]


@pytest.mark.parametrize("kind", KINDS)
def test_install_activates_the_hook_and_uninstall_leaves_nothing(
    kind: Callable[[Environment, Path], list[str]], environment: Environment, source: Path
) -> None:
    requirement = kind(environment, source)
    before = environment.files()

    environment.install(*requirement)
    assert environment.hook().startswith("['PatchFinder',")
    done = environment.python("-c", IMPORT_US)
    assert done.returncode == 0, done.stderr
    assert not environment.finds_megatron()
    for command in (
        [str(environment.folder / "bin" / "ckpt-patches")],
        [str(environment.executable), "-m", "ckpt_patches"],
    ):
        assert subprocess.run([*command, "--help"], cwd=environment.folder, capture_output=True).returncode == 0

    environment.pip("uninstall", "--quiet", "--yes", "training-checkpoint-patches")
    assert environment.files() == before
    assert "PatchFinder" not in environment.hook()


def test_a_checkout_needs_no_install(environment: Environment, source: Path) -> None:
    program = "from ckpt_patches.engine import fix; print(*(fix.load(name).name for name in fix.every_fix()))"
    assert environment.python("-c", program, cwd=source).stdout.split() == list(FIXES)
    assert environment.python("-m", "ckpt_patches", "--help", cwd=source).returncode == 0


def only_start_up_file(environment: Environment) -> list[str]:
    """The lines of the only start-up file, after checking that no installer module is beside it."""
    assert [path.name for path in environment.site_packages.iterdir() if path.suffix in (".pth", ".py")] == [
        "training_checkpoint_patches.pth"
    ]
    return (environment.site_packages / "training_checkpoint_patches.pth").read_text().splitlines()


@pytest.mark.slow
def test_reinstall_replaces(environment: Environment, source: Path, wheel: Path) -> None:
    """After editable, wheel and wheel again, one start-up file and nothing of the editable install is left."""
    before = environment.files()
    environment.install("-e", str(source))
    environment.install("--force-reinstall", str(wheel))
    environment.install("--force-reinstall", str(wheel))
    assert len(only_start_up_file(environment)) == 1
    assert "PatchFinder" in environment.hook()
    environment.pip("uninstall", "--quiet", "--yes", "training-checkpoint-patches")
    assert environment.files() == before


@pytest.mark.parametrize("init", [(), ("megatron/__init__.py",)], ids=["namespace", "regular package"])
def test_the_package_megatron_is_left_alone(init: tuple[str, ...], environment: Environment, wheel: Path) -> None:
    """A namespace package of megatron-core and a user's regular package do not change."""
    files = ["megatron/core/__init__.py", *init]
    for name in files:
        other = environment.site_packages / name
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("")
    environment.install(str(wheel))
    program = "import megatron.core, megatron_patches.numpy2_product; print(list(megatron.__path__))"
    done = environment.python("-B", "-c", program)
    assert (done.stdout, done.stderr) == (f"{[str(environment.site_packages / 'megatron')]}\n", "")
    environment.pip("uninstall", "--quiet", "--yes", "training-checkpoint-patches")
    left = {str(path.relative_to(environment.site_packages)) for path in environment.site_packages.rglob("*")}
    assert left == {"megatron", "megatron/core", *files}


def test_record_names_every_file_and_none_of_another_package(environment: Environment, wheel: Path) -> None:
    environment.install("--no-compile", str(wheel))
    (record,) = environment.site_packages.glob("training_checkpoint_patches-*.dist-info/RECORD")
    recorded = {line.split(",")[0] for line in record.read_text().splitlines()}
    ours = {str(p.relative_to(environment.site_packages)) for p in environment.site_packages.rglob("*") if p.is_file()}
    assert recorded == ours | {"../../../bin/ckpt-patches"}
    sources = installs.PACKAGES
    assert {name.split("/")[0] for name in recorded if name.endswith(".py")} == sources.keys()
    for name, source in sources.items():
        shipped = {path for path in recorded if path.startswith(f"{name}/") and path.endswith(".py")}
        folder = upstream.REPOSITORY / source
        in_checkout = {str(Path(name) / p.relative_to(folder)) for p in folder.rglob("*.py")}
        assert shipped == in_checkout


def test_the_fixes_of_a_wheel_are_those_of_the_checkout(installed: Environment) -> None:
    program = "from ckpt_patches.engine import fix; print({name: one.modules for name, one in fix.every_fix().items()})"
    assert installed.python("-c", program).stdout == f"{FIXES}\n"


def test_what_a_wheel_has(installed: Environment, wheel: Path) -> None:
    """One for every Python and machine, with types and pages, and without a dependency that pulls another torch."""
    assert wheel.name.endswith("-py3-none-any.whl")
    pages = {page.stem for page in (installed.site_packages / "ckpt_patches" / "pages").iterdir()}
    assert pages >= {*FIXES, *SWITCHED, "audit", "ds_to_universal", "hook", "json", "migrate"}
    explained = installed.python("-m", "ckpt_patches", "explain", "json", COLUMNS="")
    assert explained.stdout.startswith("# JSON output")
    assert all((installed.site_packages / package / "py.typed").exists() for package in installs.PACKAGES)
    (metadata,) = installed.site_packages.glob("training_checkpoint_patches-*.dist-info/METADATA")
    required = [line for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist:")]
    assert required
    assert not [line for line in required if "extra ==" not in line]


@pytest.mark.slow
def test_package_indexes_and_linters_of_wheels_take_them(environment: Environment, source: Path, wheel: Path) -> None:
    (archive,) = as_source_distribution(environment, source)
    with tarfile.open(source / archive) as files:
        assert {f"{name}.md" for name in FIXES} <= {Path(name).name for name in files.getnames()}
    for command in (["twine", "check", "--strict", str(wheel), archive], ["check_wheel_contents", str(wheel)]):
        done = subprocess.run([sys.executable, "-m", *command], cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_status_fails_where_there_is_nothing_to_patch(installed: Environment) -> None:
    """`status` fails without any package, as in the wrong Python in a Dockerfile's RUN."""
    done = installed.python("-m", "ckpt_patches", "status")
    assert done.returncode == 1
    packages = "megatron-core or deepspeed or nvidia-resiliency-ext or apex or torch"
    assert f"error: nothing to patch: expected {packages} to be installed for {installed.executable}" in done.stdout
    assert done.stdout.endswith("\n0 active, 0 not needed\n")
    found = json.loads(installed.python("-m", "ckpt_patches", "status", "--json").stdout)
    assert (found["complete"], len(found["errors"])) == (False, 1)


def test_editable_install_is_a_plain_path_in_front_of_the_start_up_line(environment: Environment, source: Path) -> None:
    """There is no import hook of setuptools, which would cost more per start than all that we do."""
    environment.install("-e", str(source))
    environment.install("--config-settings", "editable_mode=strict", "-e", str(source))  # over the existing install
    folder, start_up = only_start_up_file(environment)
    assert folder == str(source / ".editable")
    assert [start_up] == (upstream.REPOSITORY / "training_checkpoint_patches.pth").read_text().splitlines()
    assert sorted(os.listdir(folder)) == sorted(installs.PACKAGES)


def test_editable_install_runs_the_files_of_the_checkout(environment: Environment, source: Path) -> None:
    environment.install("-e", str(source))
    fixes = source / "megatron" / "patches"
    (fixes / "numpy2_product.py").write_text((fixes / "numpy2_product.py").read_text() + "\ntext = 'edited'\n")
    (fixes / "new.py").write_text("text = 'new'\n")
    program = "from megatron_patches import new, numpy2_product; print(numpy2_product.text, new.text)"
    assert environment.python("-c", program).stdout == "edited new\n"
    status = environment.python(
        "-c", "from ckpt_patches.engine.registry import folder; print(folder('megatron.core'))"
    ).stdout
    assert Path(status.strip()).samefile(fixes)


# The oldest that pyproject.toml allows (none before 66.1 runs on Python 3.12), and the newest.
OLDEST = "setuptools==65.0.0" if sys.version_info < (3, 12) else "setuptools==66.1.0"


@pytest.mark.slow
@pytest.mark.parametrize("setuptools", [OLDEST, "setuptools"], ids=["oldest", "newest"])
def test_editable_install_by_other_releases_of_setuptools(
    setuptools: str, environment: Environment, source: Path
) -> None:
    for path in environment.tools.iterdir():
        if path.name != "pip":
            path.unlink()
    environment.pip("install", "--quiet", "--target", str(environment.tools), setuptools, "wheel")
    environment.install("-e", str(source))
    assert len(only_start_up_file(environment)) == 2
    assert environment.hook().startswith("['PatchFinder',")
    assert not environment.finds_megatron()


def test_target_folder(environment: Environment, wheel: Path) -> None:
    """`pip install --target`: its .pth does not run; the hook can be installed by hand, nothing breaks without."""
    target = environment.folder / "target"
    environment.install("--target", str(target), str(wheel))
    assert (target / "training_checkpoint_patches.pth").exists()
    assert not environment.finds_megatron(path=str(target))
    done = environment.python("-c", SHOW_HOOK, PYTHONPATH=str(target))
    assert (done.returncode, done.stderr) == (0, "")
    assert "PatchFinder" not in done.stdout
    by_hand = f"from ckpt_patches.startup import install; install(); {SHOW_HOOK}"
    assert "PatchFinder" in environment.python("-c", by_hand, PYTHONPATH=str(target)).stdout


@pytest.mark.parametrize("options", [["-I"], ["-E"], ["-s"], ["-O"], ["-W", "error"], ["-X", "utf8=0"]], ids=" ".join)
def test_interpreter_options(options: list[str], installed: Environment) -> None:
    done = installed.python(*options, "-c", SHOW_HOOK)
    assert (done.returncode, done.stderr) == (0, "")
    assert "PatchFinder" in done.stdout


def remove_package(installed: Path) -> None:
    (installed / "__init__.py").unlink()
    shutil.rmtree(installed / "__pycache__")


def damage_package(installed: Path) -> None:
    (installed / "__init__.py").write_text("def run(:\n")


def empty_package(installed: Path) -> None:
    (installed / "__init__.py").write_text("")


@pytest.mark.parametrize("damage", [remove_package, damage_package, empty_package, shutil.rmtree])
def test_broken_install_says_so_in_one_line(
    damage: Callable[[Path], None], installed: Environment, tmp_path: Path
) -> None:
    environment = installed.copy(tmp_path / "venv")
    assert "PatchFinder" in environment.hook()
    damage(environment.site_packages / "ckpt_patches")
    done = environment.python("-c", "print('started')")
    assert (done.returncode, done.stdout) == (0, "started\n")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(
        "ckpt-patches: the import hook is not active, reinstall training-checkpoint-patches: "
    )


def test_errors_are_said_once(installed: Environment) -> None:
    """An error is printed once, though Python runs .pth files twice in a virtual environment."""
    done = installed.python("-c", SHOW_HOOK, CKPT_PATCHES="sometimes")
    assert done.stdout.count("PatchFinder") == 1
    assert len(done.stderr.splitlines()) == 1


def test_read_only_site_packages(environment: Environment, wheel: Path) -> None:
    """Everything works without bytecode, which cannot be written."""
    environment.install("--no-compile", str(wheel))
    before = environment.files()
    folders = [environment.site_packages, *(p for p in environment.site_packages.rglob("*") if p.is_dir())]
    command = without_roots_rights(str(environment.executable), "-c", f"{IMPORT_US}\n{SHOW_HOOK}")
    try:
        for folder in folders:
            folder.chmod(0o555)
        done = subprocess.run(command, cwd=environment.folder, capture_output=True, text=True)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert (done.returncode, done.stderr) == (0, "")
    assert "PatchFinder" in done.stdout
    assert environment.files() == before


MEGATRON_SCRIPT = """
import sys
before = "megatron" in sys.modules
import megatron
import deepspeed.checkpoint.ds_to_universal as converter
print(before, megatron.OWNER, type(converter.__loader__).__name__, converter.__file__)
"""


@pytest.mark.slow
def test_regular_package_megatron_beside_a_script(tmp_path: Path) -> None:
    """DeepSpeed is patched though `megatron` is the script's own package, as in the DP=768 report."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("OWNER = 'the script'\n")
    script = tmp_path / "convert.py"
    script.write_text(MEGATRON_SCRIPT)
    tree = upstream.tree("deepspeed", "0.16.2")
    done = upstream.run(script, tree=tree, delivery="hook")
    converter = tree / "deepspeed" / "checkpoint" / "ds_to_universal.py"
    assert done.stdout.splitlines()[-1] == f"False the script PatchedLoader {converter}"


# A process that runs during the change

CORE_PATH = "megatron.core.dist_checkpointing"
MEANWHILE = """
import subprocess, sys
IMPORTED
print(subprocess.run(sys.argv[1:], env=ENV, capture_output=True, text=True).stderr, end="", file=sys.stderr)
import CORE.mapping as m, CORE.exchange_utils as e
print(*("prod" in module.size.__code__.co_names for module in (m, e)))
from importlib import reload
reload(m)
""".replace("CORE", CORE_PATH)


@pytest.mark.parametrize("mode", ["warn", "strict"])
@pytest.mark.parametrize("change", ["uninstall", "upgrade"])
@pytest.mark.parametrize("imported", ["", "import CORE.exchange_utils".replace("CORE", CORE_PATH)])
def test_a_running_process_survives_an_uninstall_and_an_upgrade(
    imported: str, change: str, mode: str, environment: Environment, wheel: Path, tmp_path: Path
) -> None:
    """Plans stay valid. After an uninstall, later imports are upstream's, which one message reports."""
    environment.install(str(wheel))
    make_two(tmp_path / "tree")
    for path in (environment.site_packages, tmp_path / "tree"):
        (path / "numpy.py").write_text("def product(shape): ...\ndef prod(shape): ...\n")
    pip = ["-m", "pip", change if change == "uninstall" else "install", "--quiet"]
    pip += ["--yes", "training-checkpoint-patches"] if change == "uninstall" else []
    pip += ["--no-deps", "--no-index", "--force-reinstall", str(wheel)] if change == "upgrade" else []
    env = {"PYTHONPATH": str(environment.tools), "CKPT_PATCHES": "off", "PATH": ""}
    text = MEANWHILE.replace("IMPORTED", imported).replace("ENV", repr(env))
    command = ["-c", text, str(environment.executable), *pip]
    done = environment.python(*command, PYTHONPATH=str(tmp_path / "tree"), CKPT_PATCHES=mode)
    said = [line for line in done.stderr.splitlines() if "no fix is active in what is imported from now on" in line]
    if imported or change == "upgrade":
        assert (done.returncode, done.stdout.split()[-2:], said) == (0, ["True", "True"], []), done.stderr
    elif mode == "warn":
        assert (done.returncode, done.stdout.split()[-2:]) == (0, ["False", "False"]), done.stderr
        assert (len(said), said[0][:22]) == (1, "ckpt-patches: WARNING:"), done.stderr
        assert "start the program again" in said[0]
    else:
        assert (done.returncode, len(said)) == (1, 1), done.stderr


def test_pip_says_which_packages_keep_fixes_in_their_files(environment: Environment, wheel: Path) -> None:
    environment.install(str(wheel))
    make_two(environment.site_packages)
    pip = ("-m", "pip", "uninstall", "--quiet", "--yes")
    tools = str(environment.tools)
    assert environment.python("-m", "ckpt_patches", "apply").returncode == 0
    assert environment.python(*pip, "another", PYTHONPATH=tools).stderr.startswith("WARNING: Skipping another")
    said = environment.python(*pip, "Training_Checkpoint.Patches", PYTHONPATH=tools).stderr
    begin, end = "ckpt-patches: WARNING: fixes stay in the files of", "run `ckpt-patches revert` before the uninstall"
    assert said == f"{begin} megatron-core: {end}\n"


@pytest.mark.parametrize("command", ["install", "develop"])
def test_setup_py_refuses_what_leaves_the_hook_out(command: str, source: Path) -> None:
    done = subprocess.run([sys.executable, "setup.py", command], cwd=source, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: setup.py {command} leaves the import hook out; use: pip install .\n"
