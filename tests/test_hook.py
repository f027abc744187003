"""The import hook's contract."""

import py_compile
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches import REMOVED, PatchFinder, Switches
from ckpt_patches.engine import plan
from ckpt_patches.engine.plan import TreePlan, plan_tree
from ckpt_patches.hook import running
from ckpt_patches.startup import install
from installs import without_roots_rights
from small_tree import IS_PATCHED, MODULE, UPSTREAM, make, python


def patched(tree: Path, **env: str) -> bool:
    return python("-c", IS_PATCHED, tree=tree, env=env).stdout.strip() == "True"


# Patching


def test_a_target_is_patched_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path)
    code = f"import {MODULE} as m, megatron.core as c; print(type(m.__loader__).__name__, type(c.__loader__).__name__)"
    assert python("-c", code, tree=tmp_path).stdout.split() == ["PatchedLoader", "SourceFileLoader"]
    assert patched(tmp_path)


def test_a_module_that_no_fix_edits_keeps_its_ordinary_loader(tmp_path: Path) -> None:
    make(tmp_path, "import numpy as np\n\n\ndef size(shape):\n    return np.prod(shape)\n")
    code = f"import {MODULE} as m; print(type(m.__loader__).__name__)"
    assert python("-c", code, tree=tmp_path).stdout.split() == ["SourceFileLoader"]


def test_what_is_not_a_target_is_left_to_the_other_finders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [])  # no other finder
    monkeypatch.delattr("ckpt_patches.hook.finder", raising=False)  # set by an earlier test
    monkeypatch.setitem(sys.modules, "ckpt_patches.hook.finder", None)  # cannot be imported
    monkeypatch.setattr("ckpt_patches.any_loaded", lambda: False)  # as if no test had imported torch's checkpoints
    finder = PatchFinder(Switches({}))
    assert finder.find_spec("numpy") is None
    assert finder.find_spec("megatron.core") is None
    with pytest.raises(ImportError):
        finder.find_spec(MODULE)


def test_dash_m_runs_the_edited_source(tmp_path: Path) -> None:
    make(tmp_path)
    done = python("-m", MODULE, tree=tmp_path)
    assert done.stdout.strip() == "True", done.stderr
    assert python("-m", MODULE, tree=tmp_path, env={"CKPT_PATCHES": "off"}).stdout.strip() == "False"


def test_tracebacks_and_getsource_show_the_edited_source(tmp_path: Path) -> None:
    make(tmp_path)
    code = f"import {MODULE} as m, inspect, traceback\nprint(inspect.getsource(m.size))\n"
    code += "try: m.size(None, 1)\nexcept TypeError: pass\ntry: m.size('x')\nexcept Exception: traceback.print_exc()\n"
    code += "import linecache; linecache.checkcache(); print(linecache.getline(m.__file__, 5))"
    done = python("-c", code, tree=tmp_path)
    assert done.stdout.count("return np.prod(shape)") == 2
    assert "np.product" not in done.stdout + done.stderr
    assert "return np.prod(shape)" in done.stderr


def test_pdb_shows_the_edited_source(tmp_path: Path) -> None:
    make(tmp_path)
    code = f"import io, pdb, sys, {MODULE} as m\n"
    code += "pdb.Pdb(stdin=io.StringIO('list\\ncontinue\\n'), stdout=sys.stdout).runcall(m.size, (1, 2))"
    shown = python("-c", code, tree=tmp_path).stdout
    assert "5  ->\t    return np.prod(shape)" in shown
    assert "np.product" not in shown


@pytest.mark.skipif(sys.version_info < (3, 13), reason="until Python 3.12 the interpreter prints the lines on disk")
def test_an_exception_that_nobody_catches_shows_the_edited_source(tmp_path: Path) -> None:
    """The traceback, which the interpreter prints itself, shows edited source."""
    make(tmp_path)
    done = python("-c", f"import {MODULE} as m\nm.size('x')", tree=tmp_path, check=False)
    assert done.returncode == 1
    assert "return np.prod(shape)" in done.stderr
    assert "np.product" not in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1


def test_a_programs_own_hook_for_exceptions_stays(tmp_path: Path) -> None:
    make(tmp_path)
    code = f"import sys\nsys.excepthook = lambda *_: print('its own')\nimport {MODULE} as m\nm.size('x')"
    done = python("-c", code, tree=tmp_path, check=False)
    assert (done.stdout, "Traceback" in done.stderr) == ("its own\n", False)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_worker_processes_are_patched(tmp_path: Path, method: str) -> None:
    make(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing as mp\n\ndef work(_):\n"
        f"    import {MODULE} as m\n    return 'prod' in m.size.__code__.co_names\n\n"
        f"if __name__ == '__main__':\n    with mp.get_context('{method}').Pool(1) as pool:\n"
        "        print(pool.map(work, [0]))\n"
    )
    assert python(str(program), tree=tmp_path).stdout.strip() == "[True]"


def test_reload_takes_the_file_as_it_is_now(tmp_path: Path) -> None:
    path = make(tmp_path)
    code = f"""
import importlib, pathlib, {MODULE} as m
path = pathlib.Path({str(path)!r})
path.write_text(path.read_text().replace("return", "return 1 *"))
importlib.reload(m)
import inspect
print(inspect.getsource(m.size).splitlines()[-1].strip())
"""
    assert python("-c", code, tree=tmp_path).stdout.strip() == "return 1 * np.prod(shape)"


def test_an_editable_install_with_a_finder_of_its_own(tmp_path: Path) -> None:
    make(tmp_path / "checkout")
    code = f"""
import sys, importlib.util
class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "megatron.core":
            file = {str(tmp_path / "checkout/megatron/core/__init__.py")!r}
            return importlib.util.spec_from_file_location(name, file)
sys.meta_path.append(Editable)
{IS_PATCHED}
"""
    (tmp_path / "other/megatron").mkdir(parents=True)
    assert python("-c", code, tree=tmp_path / "other").stdout.strip() == "True"


def test_a_fork_whose_megatron_is_a_regular_package_is_patched_as_well(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "megatron/__init__.py").write_text("OWN = True\n")
    code = f"import megatron; print(megatron.OWN); {IS_PATCHED}"
    assert python("-c", code, tree=tmp_path).stdout.split() == ["True", "True"]


@pytest.mark.parametrize(
    "text",
    [
        UPSTREAM.replace("\n", "\r\n").encode(),
        UPSTREAM.replace("    ", "\t").encode(),
        b"\xef\xbb\xbf" + UPSTREAM.encode(),
        UPSTREAM.rstrip().encode(),
        ("# ümläut, 日本\n" + UPSTREAM.replace("shape", "größe")).encode(),
    ],
    ids=["CRLF", "tabs", "byte order mark", "no last newline", "not ASCII"],
)
def test_unusual_source_text(tmp_path: Path, text: bytes) -> None:
    make(tmp_path, text)
    assert patched(tmp_path, CKPT_PATCHES="strict")


def test_the_edit_leaves_every_other_byte(tmp_path: Path) -> None:
    path = make(tmp_path, UPSTREAM.replace("\n", "\r\n").encode())
    code = f"import {MODULE} as m; print(m.__loader__.get_data(m.__file__) == open(m.__file__, 'rb').read()"
    code += ".replace(b'np.product(', b'np.prod('))"
    assert python("-c", code, tree=tmp_path).stdout.strip() == "True"
    assert path.read_bytes() == UPSTREAM.replace("\n", "\r\n").encode()


# Bytecode


def caches(path: Path) -> list[Path]:
    return sorted((path.parent / "__pycache__").glob(f"{path.stem}.*"))


def test_bytecode_never_holds_the_edited_source(tmp_path: Path) -> None:
    path = make(tmp_path)
    assert patched(tmp_path)
    assert caches(path) == []
    assert not patched(tmp_path, CKPT_PATCHES="off")  # writes upstream's bytecode
    (cached,) = caches(path)
    before = cached.read_bytes()
    assert patched(tmp_path)
    assert cached.read_bytes() == before
    assert not patched(tmp_path, CKPT_PATCHES="off")


def test_stale_bytecode_is_never_run_in_place_of_the_edited_source(tmp_path: Path) -> None:
    path = make(tmp_path)
    py_compile.compile(str(path), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert caches(path)
    assert patched(tmp_path)


def test_an_unwritable_directory_is_no_obstacle(tmp_path: Path) -> None:
    path = make(tmp_path)
    writes = f"try: open({str(path.parent / 'new')!r}, 'w')\nexcept PermissionError: print('unwritable')"
    path.parent.chmod(0o555)
    try:
        done = python("-c", f"{writes}\n{IS_PATCHED}", tree=tmp_path, through=without_roots_rights)
    finally:
        path.parent.chmod(0o755)
    assert (done.stdout.split(), caches(path)) == (["unwritable", "True"], [])


# What cannot be patched


def make_sourceless(tmp_path: Path) -> Path:
    path = make(tmp_path)
    py_compile.compile(str(path), cfile=str(path) + "c", doraise=True)
    path.unlink()
    return path


def test_bytecode_alone_is_said_to_have_no_source(tmp_path: Path) -> None:
    make_sourceless(tmp_path)
    done = python("-c", IS_PATCHED, tree=tmp_path)
    assert done.stdout.strip() == "False"
    (line,) = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert "numpy2_product is NOT active" in line
    assert "no source" in line
    assert "CKPT_PATCHES_SKIP=numpy2_product" in line
    done = python("-c", IS_PATCHED, tree=tmp_path, env={"CKPT_PATCHES": "strict"}, check=False)
    assert done.returncode != 0
    assert "ckpt_patches.errors.StrictModeError" in done.stderr


UNKNOWN = {  # this text lacks a real fix's anchor
    "megatron.core.dist_checkpointing.strategies.zarr": "def _create_zarr_array(tensor):\n    return None\n",
}
ZARR = "megatron.core.dist_checkpointing.strategies.zarr"


def make_unknown(tmp_path: Path) -> Path:
    make(tmp_path)
    path = tmp_path.joinpath(*ZARR.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(UNKNOWN[ZARR])
    return path


def test_unknown_code_is_warned_of_once_on_rank_zero_alone(tmp_path: Path) -> None:
    path = make_unknown(tmp_path)
    code = f"import {ZARR}, importlib; importlib.reload({ZARR})"
    warnings = [line for line in python("-c", code, tree=tmp_path).stderr.splitlines() if "WARNING" in line]
    assert len(warnings) == 2
    for name, line in zip(("zarr_create_synchronizer", "zarr_range_write"), warnings, strict=True):
        for part in (f"{name} is NOT active", "megatron-core 0.14.0", str(path), "zarr_array", "SKIP="):
            assert part in line
    for variable in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        assert python("-c", code, tree=tmp_path, env={variable: "3"}).stderr == ""
        assert "WARNING" in python("-c", code, tree=tmp_path, env={variable: "0"}).stderr


def test_strict_mode_refuses_unknown_code_on_every_rank(tmp_path: Path) -> None:
    make_unknown(tmp_path)
    for rank in ("0", "3"):
        env = {"CKPT_PATCHES": "strict", "RANK": rank}
        done = python("-c", f"import {ZARR}", tree=tmp_path, env=env, check=False)
        assert done.returncode == 1
        assert "StrictModeError: the fix zarr_create_synchronizer is NOT active" in done.stderr
    env = {"CKPT_PATCHES": "strict", "CKPT_PATCHES_SKIP": "zarr_create_synchronizer,zarr_range_write"}
    assert python("-c", f"import {ZARR}", tree=tmp_path, env=env).returncode == 0


def test_a_release_below_the_floor_is_warned_about_and_refused_in_strict_mode(tmp_path: Path) -> None:
    """Only the fixes that state such a release apply to it; the warning says what supports it."""
    make(tmp_path)
    info = tmp_path / "megatron/core/package_info.py"
    info.write_text(info.read_text().replace("MINOR = 14", "MINOR = 11"))
    done = python("-c", IS_PATCHED, tree=tmp_path)
    assert done.stdout.strip() == "False"
    (line,) = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert "megatron-core 0.11.0 is older than this version of training-checkpoint-patches supports (0.12.0" in line
    assert "version 0.2 (git revision ee6adc7) supports it" in line
    for rank in ("0", "1"):
        refused = python("-c", IS_PATCHED, tree=tmp_path, env={"CKPT_PATCHES": "strict", "RANK": rank}, check=False)
        assert refused.returncode == 1
        assert "StrictModeError: megatron-core 0.11.0 is older than" in refused.stderr
    assert python("-c", IS_PATCHED, tree=tmp_path, env={"CKPT_PATCHES": "off"}).stderr == ""


def test_other_fixes_of_the_tree_are_active_beside_one_that_does_not_match(tmp_path: Path) -> None:
    make_unknown(tmp_path)
    assert patched(tmp_path)


def test_a_module_that_does_not_parse_fails_as_it_would_without_us(tmp_path: Path) -> None:
    make(tmp_path, "def size(shape:\n    return np.product(shape)\n")
    done = python("-c", IS_PATCHED, tree=tmp_path, check=False)
    assert "does not parse with this Python" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("SyntaxError: ")
    assert "ckpt_patches/" not in done.stderr.split("Traceback")[1]


def test_a_defect_of_ours_does_not_stop_the_import(tmp_path: Path) -> None:
    make(tmp_path)
    code = f"""
import ckpt_patches.engine.plan
def broken(*a, **k): raise RuntimeError("our defect")
ckpt_patches.engine.plan.plan_tree = broken
{IS_PATCHED}
"""
    done = python("-c", code, tree=tmp_path)
    assert done.stdout.strip() == "False"
    assert "our defect" in done.stderr
    assert "Traceback" not in done.stderr


# Switches


def test_off_and_skip(tmp_path: Path) -> None:
    make(tmp_path)
    assert not patched(tmp_path, CKPT_PATCHES="off")
    assert not patched(tmp_path, CKPT_PATCHES_SKIP="dp_zero_empty_state, numpy2_product")
    assert patched(tmp_path, CKPT_PATCHES_SKIP="dp_zero_empty_state")
    assert patched(tmp_path, CKPT_PATCHES="")


@pytest.mark.parametrize(
    ("variable", "value", "valid"),
    [
        ("CKPT_PATCHES", "stirct", ["off", "warn", "strict"]),
        ("CKPT_PATCHES_SKIP", "numpy2", ["did you mean numpy2_product?"]),
        ("CKPT_PATCHES_FINGERPRINT", "on", ["1", "warn", "0", "off", "going on with 1"]),
    ],
)
def test_an_unknown_value_is_an_error_that_lists_the_valid_ones(
    tmp_path: Path, variable: str, value: str, valid: list[str]
) -> None:
    make(tmp_path)
    done = python("-c", IS_PATCHED, tree=tmp_path, env={variable: value})
    assert done.stdout.strip() == "True"
    line = done.stderr.splitlines()[0]
    assert f"{variable}={value}" in line
    assert all(name in line for name in valid)
    said = python("-c", "pass", tree=tmp_path, env={variable: value, "RANK": "1"}).stderr
    assert said.count("\n") == (variable == "CKPT_PATCHES")  # each rank reports it, as its environment may differ


@pytest.mark.parametrize("names", [REMOVED, *((name,) for name in REMOVED)])
def test_removed_switches_are_named_in_one_line(names: tuple[str, ...], tmp_path: Path) -> None:
    make(tmp_path)
    done = python("-c", IS_PATCHED, tree=tmp_path, env=dict.fromkeys(names, "45"))
    assert done.stdout.strip() == "True"
    removed = [line for line in done.stderr.splitlines() if "CKPT_PATCHES_" in line]
    assert removed == [f"ckpt-patches: {', '.join(names)}: removed, does nothing (CHANGELOG.md, upgrade notes)"]


def test_fingerprints_without_the_hook_are_a_warning(tmp_path: Path) -> None:
    make(tmp_path)
    done = python("-c", IS_PATCHED, tree=tmp_path, env={"CKPT_PATCHES": "off", "CKPT_PATCHES_FINGERPRINT": "1"})
    assert "CKPT_PATCHES_FINGERPRINT=1 does nothing with CKPT_PATCHES=off: no resume is verified" in done.stderr
    quiet = python("-c", IS_PATCHED, tree=tmp_path, env={"CKPT_PATCHES": "off", "CKPT_PATCHES_FINGERPRINT": "0"})
    assert (done.stdout.strip(), quiet.stderr) == ("False", "")


# Messages


def info_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "INFO" in line]


def test_one_line_of_rank_zero_says_what_is_active(tmp_path: Path) -> None:
    make(tmp_path)
    code = f"import importlib, {MODULE} as m\nimportlib.reload(m)"
    (line,) = info_lines(python("-c", code, tree=tmp_path).stderr)
    assert "megatron-core 0.14.0" in line
    assert line.endswith(": numpy2_product")
    assert info_lines(python("-c", code, tree=tmp_path, env={"RANK": "1"}).stderr) == []


def test_a_programs_own_logging_gets_the_line(tmp_path: Path) -> None:
    make(tmp_path)
    code = f"import logging; logging.basicConfig(level='INFO', format='MINE %(message)s'); import {MODULE}"
    (line,) = python("-c", code, tree=tmp_path).stderr.splitlines()
    assert line.startswith("MINE training-checkpoint-patches")


def test_what_is_said_before_a_program_sets_up_logging_leaves_nothing_in_its_way(tmp_path: Path) -> None:
    """The logger is unchanged: the first line goes to stderr, later ones where the program sends them."""
    make_unknown(tmp_path)
    code = f"import {MODULE}, logging\nlogger = logging.getLogger('ckpt_patches')\n"
    code += "print(logger.handlers, logger.propagate, logger.level)"
    assert python("-c", code, tree=tmp_path).stdout.strip() == "[] True 0"


# Installing by hand


def test_the_handle_takes_the_hook_away() -> None:
    before = list(sys.meta_path)
    handle = install()
    assert handle is not None
    assert handle.finder in sys.meta_path
    handle.uninstall()
    handle.uninstall()
    assert handle.finder not in sys.meta_path
    sys.meta_path[:] = before


# Start-up


def test_start_up_imports_only_what_is_light() -> None:
    code = "import sys; print(sorted(sys.modules))"
    with_hook = set(eval(python("-c", code, tree=Path("/")).stdout))
    light = {"ckpt_patches"}
    assert light <= with_hook
    without = set(eval(python("-I", "-S", "-c", code, tree=Path("/")).stdout))
    heavy = {
        "ast",
        "difflib",
        "logging",
        "re",
        "torch",
        "numpy",
        "megatron",
        "inspect",
        "typing",
        "json",
        "dataclasses",
    }
    assert not (heavy & with_hook) - without
    assert {name for name in with_hook if name.startswith(("ckpt_patches", "megatron", "deepspeed"))} == light


def test_the_plan_of_a_tree_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path)
    calls = []

    def counted(*arguments: Any, **keywords: Any) -> TreePlan:
        calls.append(arguments)
        return plan_tree(*arguments, **keywords)

    monkeypatch.setattr(plan, "plan_tree", counted)
    plans = [running.plan_for(MODULE, str(path), Switches({})) for _ in range(2)]
    assert plans[0] is plans[1]
    assert len(calls) == 1
