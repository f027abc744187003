"""The commands status, diff, show, apply, revert; bad input is one clear line and exit status 2."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import upstream
from ckpt_patches.cli import command_line, status
from ckpt_patches.engine.fix import package_of
from ckpt_patches.engine.registry import CORE, TORCH
from ckpt_patches.runtime.options import spelled
from installs import without_roots_rights
from registered import FIXES
from small_tree import MODULE, UPSTREAM, command, make, on_terminal, one_line, python
from upstream import INSTALLED_TORCH, REPOSITORY, newest, tree


def states(on: Path, **env: str) -> dict[str, str]:
    found = json.loads(command("status", "--json", on=on, **env).stdout)
    return {fix["name"]: fix["state"] for fix in found["fixes"]}


# status


def test_status_tells_active_from_not_needed() -> None:
    found = states(tree("megatron-core", "0.14.0"))
    assert found["zarr_create_synchronizer"] == "active"
    assert found["universal_tensor_paddings"] == "not needed"
    found = states(tree("megatron-core", "0.16.1"))
    assert found["zarr_create_synchronizer"] == "not needed"
    assert found["numpy2_product"] == "not needed"
    assert found["dp_zero_empty_state"] == "active"


def test_status_tells_off_and_in_place() -> None:
    assert states(tree("megatron-core", "0.14.0"), CKPT_PATCHES="off")["numpy2_product"] == "off"
    assert states(tree("megatron-core", "0.14.0"), CKPT_PATCHES_SKIP="numpy2_product")["numpy2_product"] == ("off")
    patched = upstream.in_place(tree("megatron-core", "0.14.0"))
    assert states(patched, CKPT_PATCHES="off")["numpy2_product"] == "in place"
    found = states(patched, CKPT_PATCHES="off")
    missing = [name for name, state in found.items() if state == "off" and package_of(name) == CORE]
    assert missing == []
    assert found["dcp_async_copy"] == "off"  # the installed torch is as it was


def test_status_on_a_release_below_the_floor() -> None:
    """It is an error; the two fixes whose reports are of this release are active all the same."""
    on = tree("megatron-core", upstream.OLDEST_REPORTED)
    found = states(on)
    core = {name: state for name, state in found.items() if package_of(name) == CORE}
    active = [name for name, state in core.items() if state == "active"]
    assert sorted(active) == ["dp_zero_empty_state", "zarr_create_synchronizer"]
    assert {state for name, state in core.items() if name not in active} == {"not needed"}
    done = command("status", on=on)
    assert done.returncode == 1
    assert "megatron-core 0.9.0 is older than this version of training-checkpoint-patches supports" in done.stdout


PLACES = "megatron/core/ or deepspeed/ or nvidia_resiliency_ext/ or apex/ or torch/distributed/checkpoint/"


def test_status_tells_no_match_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed/checkpoint/zero_checkpoint.py"
    path.parent.mkdir(parents=True)
    for folder in (path.parent, path.parent.parent):
        (folder / "__init__.py").touch()
    path.touch()
    path.with_name("ds_to_universal.py").touch()
    done = command("status", on=tmp_path)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("universal_tensor_paddings")]
    assert "NO MATCH" in line


def test_status_exit_tells_whether_a_needed_fix_is_missing() -> None:
    on = tree("megatron-core", "0.14.0")
    assert command("status", on=on).returncode == 0
    assert command("status", on=on, CKPT_PATCHES="off").returncode == 1
    assert command("status", on=on, CKPT_PATCHES_SKIP="numpy2_product").returncode == 1


def test_status_fails_where_a_required_package_is_not_installed() -> None:
    on = tree("megatron-core", "0.14.0")
    assert command("status", "--require", "megatron_core", on=on).returncode == 0
    done = command("status", "--require", "megatron-core", "--require", "deepspeed", on=on)
    assert done.returncode == 1
    assert "error: expected deepspeed to be installed" in done.stdout
    assert command("status", "--require", "zarr", on=on).returncode == 2


def test_status_has_the_fixes_of_installed_packages_problems_first_and_their_number() -> None:
    on = tree("megatron-core", "0.16.1")
    done = command("status", on=on, CKPT_PATCHES_SKIP="sharding_type_default")
    rows = done.stdout.split("\n\n")[2].splitlines()
    assert rows[0] == "megatron-core 0.16.1"
    assert rows[1].split()[:3] == ["sharding_type_default", "off", "CKPT_PATCHES_SKIP=sharding_type_default"]
    found = states(on, CKPT_PATCHES_SKIP="sharding_type_default")
    assert {row.split()[0] for row in rows[1:]} == {n for n in FIXES if package_of(n) == CORE}
    active = sum(found[name] == "active" for name in FIXES if package_of(name) == CORE)
    others = len(rows) - 2 - active
    of_torch = [found[name] for name in FIXES if package_of(name) == TORCH]  # the installed one
    active += of_torch.count("active")
    others += of_torch.count("not needed")
    assert done.stdout.splitlines()[-1].startswith(f"{active} active, {others} not needed, 1 off: unset what switches")
    assert set(found) == set(FIXES)
    assert "zero3_universal_groups" not in done.stdout


def test_status_of_a_tree_does_not_report_what_this_python_lacks() -> None:
    root = str(tree("megatron-core", "0.16.1"))
    without_site = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; "
    code = without_site + "from ckpt_patches.cli import main; sys.exit(main(sys.argv[1:]))"
    assert "zarr  " not in python("-c", code, "status", "--tree", root, tree=REPOSITORY, check=False).stdout
    assert "zarr  " in python("-c", code, "status", tree=REPOSITORY, check=False).stdout
    assert re.search(rf"^torch +{INSTALLED_TORCH}", command("status", "--tree", root).stdout, re.M)


def test_status_warns_where_only_torch_is_installed() -> None:
    """Torch is nearly everywhere, also in the wrong Python of a Dockerfile's RUN."""
    done = command("status")
    assert done.returncode == 0
    warning = f"of the packages only torch is installed for {sys.executable}: --require NAME makes that an error"
    assert warning in done.stdout
    assert warning not in command("status", on=tree("megatron-core", "0.16.1")).stdout
    assert command("status", "--require", "megatron-core").returncode == 1


@pytest.mark.parametrize(("term", "no_color"), [("xterm", None), ("dumb", None), ("xterm", "1")])
def test_status_has_colors_on_a_terminal_that_has_them(term: str, no_color: str | None) -> None:
    env = {"TERM": term, **({"NO_COLOR": no_color} if no_color else {})}
    shown = on_terminal("status", on=tree("megatron-core", "0.16.1"), columns=200, **env)
    assert ("\x1b[32mactive\x1b[0m" in shown) == (term == "xterm" and no_color is None)
    assert "active" in shown


def test_colors_by_option() -> None:
    assert "\x1b[" not in on_terminal("status", "--color", "never", columns=100, TERM="xterm")
    assert "\x1b[1m" in command("list", "--color=always").stdout
    assert "argument --color: invalid choice: 'red'" in one_line(command("--color", "red", "list"))
    assert one_line(command("list", "--color")) == "ckpt-patches: argument --color: expected one argument"


@pytest.mark.parametrize("left", ["megatron/core/optimizer", "deepspeed/ops"])
def test_folders_that_an_uninstall_has_left_are_no_package(left: str, tmp_path: Path) -> None:
    (tmp_path / left).mkdir(parents=True)
    found = json.loads(command("status", "--json", on=tmp_path).stdout)
    versions = {one["name"]: one["version"] for one in found["installed"]}
    assert versions["megatron-core"] is versions["deepspeed"] is None
    assert {fix["state"] for fix in found["fixes"] if fix["package"] != "torch"} == {"not needed"}


def test_status_without_torch_says_that_nothing_can_run() -> None:
    code = (
        "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; "
        "from ckpt_patches.cli import main; sys.exit(main(['status']))"
    )
    done = python("-c", code, tree=tree("megatron-core", "0.16.1"), check=False)
    assert done.returncode == 1
    assert "error: torch is not installed for" in done.stdout


def test_the_help_of_status_has_every_state() -> None:
    shown = " ".join(python("-m", "ckpt_patches", "status", "--help", tree=Path("/")).stdout.split())
    states = (status.ACTIVE, status.IN_PLACE, status.NOT_NEEDED, status.NO_MATCH, status.OFF, status.REPLACED)
    assert [state for state in states if state not in shown] == []


def test_status_in_a_process_names_what_was_replaced() -> None:
    code = (
        "import megatron.core.dist_checkpointing.mapping as m; from ckpt_patches.cli.status import collect\n"
        "m.ShardedTensor.local_coordinates = lambda self: ()\n"
        "(fix,) = [fix for fix in collect().fixes if fix.name == 'numpy2_product']\n"
        "print(fix.state, fix.reason)"
    )
    done = python("-c", code, tree=tree("megatron-core", "0.14.0"))
    assert re.match(r"replaced NOT active any more: .*ShardedTensor\.local_coordinates was replaced by", done.stdout)


def test_status_finds_a_package_that_has_no_init_file() -> None:
    """`status` finds a package without `__init__.py`, like nvidia-resiliency-ext before 0.5."""
    on = tree("nvidia-resiliency-ext", "0.4.1")
    assert not (on / "nvidia_resiliency_ext/__init__.py").exists()
    found = json.loads(command("status", "--json", on=on).stdout)
    assert {package["name"]: package["version"] for package in found["installed"]}["nvidia-resiliency-ext"] == "0.4.1"
    assert [fix["state"] for fix in found["fixes"] if fix["name"] == "nvrx_staging"] == ["active"]


def test_status_of_a_tree_is_that_of_the_scripts_in_it(tmp_path: Path) -> None:
    """`status --tree` reports the tree's package, which scripts in it import, not the installed one."""
    checkout, installed = tree("megatron-core", "0.16.1"), tree("megatron-core", "0.14.0")
    found = json.loads(command("status", "--json", "--tree", str(checkout), on=installed).stdout)
    core = {"name": "megatron-core", "version": "0.16.1", "location": str(checkout)}
    assert core in found["installed"]
    by_name = {fix["name"]: fix for fix in found["fixes"]}
    assert by_name["numpy2_product"]["state"] == "not needed"
    assert by_name["zero3_universal_groups"]["reason"] == f"deepspeed is not in {checkout}"
    done = command("status", "--tree", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"expected {PLACES} in {tmp_path}, found none" in line


def test_status_says_that_scripts_in_this_folder_import_another_tree(tmp_path: Path) -> None:
    make(tmp_path)
    console = "from ckpt_patches.cli import main; import sys; sys.path.remove(''); sys.exit(main(['status']))"
    on = tree("megatron-core", "0.16.1")
    done = python("-c", console, tree=on, check=False, cwd=tmp_path)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("warning")]
    assert f"{tmp_path}/megatron/core is megatron-core 0.14.0: a script in this folder" in line
    assert "warning" not in python("-c", console, tree=on, cwd=on).stdout


def test_status_says_once_that_there_is_no_hook() -> None:
    on = tree("megatron-core", "0.14.0")
    code = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != 'PatchFinder']\n"
    code += "from ckpt_patches.cli import main; sys.exit(main(sys.argv[1:]))"
    done = python("-c", code, "status", tree=on, check=False)
    assert done.returncode == 1
    assert done.stdout.count("no .pth file of ours") == 1
    assert "import hook: NOT ACTIVE" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("zarr_")]
    assert rows == [["zarr_create_synchronizer", "off"]]
    found = json.loads(python("-c", code, "status", "--json", tree=on, check=False).stdout)
    assert (found["hook_active"], found["complete"]) == (False, False)
    off = command("status", on=on, CKPT_PATCHES="off").stdout
    assert off.count("CKPT_PATCHES=off") == 1


def test_status_imports_nothing_heavy() -> None:
    code = "import sys; from ckpt_patches.cli import main; main(['status'])"
    code += "; print(sorted(sys.modules), file=sys.stderr)"
    done = python("-c", code, tree=tree("megatron-core", "0.14.0"))
    loaded = set(eval(done.stderr.splitlines()[-1]))
    assert not {"torch", "numpy", "megatron", "megatron.core", "deepspeed", "zarr"} & loaded


def fake_distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_status_says_that_zarr_3_does_not_do(tmp_path: Path) -> None:
    fake_distribution(tmp_path, "zarr", "3.1.6")
    both = f"{tmp_path}:{tree('megatron-core', '0.14.0')}"
    done = python("-m", "ckpt_patches", "status", tree=Path("/"), env={"PYTHONPATH": both}, check=False)
    assert "warning: zarr 3.1.6 is installed" in done.stdout
    newer = f"{tmp_path}:{tree('megatron-core', '0.16.1')}"  # without the zarr strategy
    done = python("-m", "ckpt_patches", "status", tree=Path("/"), env={"PYTHONPATH": newer}, check=False)
    assert "warning" not in done.stdout


# diff


def checkout(tmp_path: Path, text: str | bytes = UPSTREAM) -> Path:
    """A git repository with the small tree."""
    make(tmp_path, text)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "start"]):
        subprocess.run([*git, *arguments], check=True)
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [UPSTREAM, UPSTREAM.replace("\n", "\r\n"), UPSTREAM.rstrip(), "\ufeff" + UPSTREAM],
    ids=["LF", "CRLF", "no last newline", "byte order mark"],
)
def test_a_diff_applies_and_is_what_the_hook_runs(tmp_path: Path, text: str) -> None:
    root = checkout(tmp_path, text.encode())
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_patches", "diff", "--tree", str(root), "numpy2_product"],
        capture_output=True,
        check=True,
    )
    subprocess.run(["git", "-C", str(root), "apply", "--whitespace=nowarn"], input=done.stdout, check=True)
    path = root.joinpath(*MODULE.split(".")).with_suffix(".py")
    assert path.read_bytes() == text.encode().replace(b"np.product(", b"np.prod(")


def test_a_diff_of_nothing_says_why(tmp_path: Path) -> None:
    make(tmp_path, "import numpy as np\nx = np.prod(())\n")
    done = command("diff", "numpy2_product", "--tree", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "numpy2_product: not needed\n"


# apply


# The options of every command


def test_aliases_help_and_version() -> None:
    assert command("help", "audit").stdout == command("check", "--help").stdout == command("audit", "--help").stdout
    assert command("ds-to-universal", "--help").stdout == command("to-universal", "--help").stdout
    assert command("version").stdout == command("-V").stdout == command("--version").stdout
    assert command("help").stdout == command("--help").stdout


def test_a_diff_says_nothing_beside_it_and_an_option_that_is_gone_is_named() -> None:
    done = command("diff", "scheduler_steps", "--tree", str(tree("megatron-core", newest("megatron-core"))))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("--- ")
    assert "no option --plot" in one_line(command("audit", "--plot", "page.png"))


def test_quiet_and_verbose(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    done = command("resume-from", "--quiet", "--allow-empty", str(tmp_path / "absent"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    absent = ("repair", str(tmp_path / "absent"), "--output", str(tmp_path / "new"))
    line = one_line(command(*absent))
    assert line == one_line(command("-q", *absent))
    first, *_, last = command("-v", *absent).stderr.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", line)


def test_the_diff_of_a_fix_in_place_says_so(tmp_path: Path) -> None:
    make(tmp_path)
    assert command("apply", "numpy2_product", "--tree", str(tmp_path)).returncode == 0
    done = command("diff", "numpy2_product", "--tree", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "numpy2_product: in place: revert it to see its diff\n"
    listed = command("list", "--json", "--tree", str(tmp_path)).stdout  # the bug is still that of this release
    assert "numpy2_product" in [fix["name"] for fix in json.loads(listed)["fixes"]]


# Bad input


@pytest.mark.parametrize("verb", ["diff", "apply", "revert"])
def test_a_tree_without_the_package(verb: str, tmp_path: Path) -> None:
    line = one_line(command(verb, "--tree", str(tmp_path)))
    assert f"expected {PLACES} in {tmp_path}, found none" in line
    assert "found no folder" in one_line(command(verb, "--tree", str(tmp_path / "nowhere")))
    make(tmp_path)
    assert "expected deepspeed/ in" in one_line(command(verb, "zero3_universal_groups", "--tree", str(tmp_path)))


UNREADABLE: dict[bytes | None, str] = {
    b"x = 'np.product \xe9'\n": "expected UTF-8",
    b"def f(:\n    np.product\n": "it does not parse with this Python: invalid syntax",
    None: "it cannot be read: Is a directory",
}


@pytest.mark.parametrize(("text", "reason"), UNREADABLE.items(), ids=UNREADABLE.values())
@pytest.mark.parametrize("verb", ["status", "list", "diff", "diff --split patches", "apply"])
def test_a_file_of_a_tree_that_cannot_be_worked_on_is_one_line(
    verb: str, text: bytes | None, reason: str, tmp_path: Path
) -> None:
    path = make(tmp_path, text or b"")
    if text is None:
        path.unlink()
        path.mkdir()
    line = one_line(command(*verb.split(), "--tree", str(tmp_path)))
    assert f"{path}: {reason}" in line
    assert text is None or path.read_bytes() == text


def test_a_file_edited_by_hand_afterwards(tmp_path: Path) -> None:
    path = make(tmp_path)
    assert command("apply", "numpy2_product", "--tree", str(tmp_path)).returncode == 0
    path.write_text(path.read_text() + "# by hand\n")
    for verb in ("apply", "revert"):
        assert f"{path} changed since" in one_line(command(verb, "numpy2_product", "--tree", str(tmp_path)))


FULL = [["status"], ["--help"], ["to-universal", "--help"], ["diff", "--tree", "TREE"]]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", FULL, ids=" ".join)
def test_an_output_that_is_full_is_one_line(arguments: list[str], unbuffered: str, tmp_path: Path) -> None:
    make(tmp_path)
    env = {"PYTHONUNBUFFERED": unbuffered}
    arguments = [str(tmp_path) if argument == "TREE" else argument for argument in arguments]
    with open("/dev/full", "w") as full:
        done = python("-m", "ckpt_patches", *arguments, tree=tmp_path, check=False, env=env, stdout=full.fileno())
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "ckpt-patches: cannot write the output: No space left on device"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_standard_output_that_is_closed_is_no_error(tmp_path: Path) -> None:
    make(tmp_path)
    of_tree = ["--tree", str(tmp_path)]
    for arguments in (["list"], ["status"], ["--help"], ["diff", *of_tree]):
        command = [sys.executable, "-m", "ckpt_patches", *arguments]
        done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
        assert "Traceback" not in done.stderr


def test_a_reader_that_has_gone_is_no_success() -> None:
    """The status is that of SIGPIPE, without a message: `audit RUN | head -1 && resume` must not resume."""
    reader, writer = os.pipe()
    os.close(reader)
    done = python("-m", "ckpt_patches", "list", tree=Path("/"), check=False, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    checkout(tmp_path)
    for key in ("user.name", "user.email"):
        subprocess.run(["git", "-C", str(tmp_path), "config", key, "someone"], check=True)
    line = one_line(command("diff", "--split", "/proc/x", "numpy2_product", "--tree", str(tmp_path)))
    assert line == "ckpt-patches: /proc/x: No such file or directory"


# The spelling of options

SPELLED = [
    (["to-universal", "--input_folder=a_b", "--no_strict"], ["to-universal", "--input-folder=a_b", "--no-strict"]),
    (["audit", "--trust_checkpoint", "x_y", "--", "--a_b"], ["audit", "--trust-checkpoint", "x_y", "--", "--a_b"]),
]


@pytest.mark.parametrize(("given", "found"), SPELLED)
def test_underscores_in_the_names_of_options_are_dashes(given: list[str], found: list[str]) -> None:
    """Underscores in option names become dashes, but not in values, paths, or after `--`."""
    assert spelled(given) == found


def test_the_converters_help_has_dashes_alone_and_both_names_of_its_workers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["to-universal", "--help"])
    said = capsys.readouterr().out
    assert re.findall(r"--[a-z]+_\w+", said) == []
    assert re.search("--workers( N)?, --num-extract-workers N", said)  # Python 3.13 prints N once


def test_a_file_in_place_of_the_folder_for_patches(tmp_path: Path) -> None:
    make(tmp_path / "tree")
    (tmp_path / "file").touch()
    done = command("diff", "--split", str(tmp_path / "file"), "--tree", str(tmp_path / "tree"))
    assert f"expected a folder for the patches, found a file: {tmp_path / 'file'}" in one_line(done)


def test_nothing_is_applied_where_a_part_is_read_only(tmp_path: Path) -> None:
    """Rights are checked in all packages before the first change; where nothing was applied, there is none to undo."""
    path = make(tmp_path)
    before = path.read_bytes()
    own = Path("torch/distributed/checkpoint")
    shutil.copytree(tree("torch", INSTALLED_TORCH) / own, tmp_path / own)
    (tmp_path / own).chmod(0o555)
    try:
        done = python(
            *("-m", "ckpt_patches", "apply", "--tree", str(tmp_path)),
            tree=tmp_path,
            check=False,
            through=without_roots_rights,
        )
        assert f"{tmp_path / own}: no permission to write there" in one_line(done)
        assert path.read_bytes() == before
        undone = ("-m", "ckpt_patches", "revert", "--tree", str(tmp_path))
        assert python(*undone, tree=tmp_path, through=without_roots_rights).returncode == 0
    finally:
        (tmp_path / own).chmod(0o755)
