"""The import hook's contract: what runs in a process, beside other hooks, and that it never ends a program."""

import os
import py_compile
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from ckpt_patches import REMOVED
from ckpt_patches.engine.plan import plan_tree
from ckpt_patches.engine.registry import CORE
from ckpt_patches.startup import install
from installs import PTH
from small_tree import IS_PATCHED, IS_PATCHED_SECOND, MODULE, RELEASE, SECOND, UPSTREAM, make, make_two, python
from upstream import REPOSITORY, TIMEOUT
from upstream import tree as tree_of_release

STRICT = {"CKPT_PATCHES": "strict"}
MODES = ("off", "warn", "strict")
FIXED = UPSTREAM.replace("np.product", "np.prod")


def patched(tree: Path, **env: str) -> bool:
    return python("-c", IS_PATCHED, tree=tree, env=env).stdout.strip() == "True"


def program(tree: Path, text: str, **env: str) -> tuple[int, str, str]:
    """Run a program with the tree on its path: exit status, stdout and stderr."""
    done = python("-c", textwrap.dedent(text), tree=tree, env=env, check=False)
    return done.returncode, done.stdout.strip(), done.stderr


def runs(tree: Path, text: str, *lines: str, **env: str) -> None:
    """Check that a program prints these lines and succeeds."""
    status, output, stderr = program(tree, text, **env)
    assert (status, output.splitlines()) == (0, list(lines)), stderr


def about(stderr: str, *words: str) -> None:
    """Check that one line reports the fix as not active, with these words."""
    (line,) = (line for line in stderr.splitlines() if "numpy2_product is NOT active" in line)
    for word in ("WARNING", *words):
        assert word in line


VERIFIES = "from ckpt_patches.startup import verify; verify()"


def is_said(tree: Path, text: str, output: str, *words: str) -> None:
    """Check that a program prints `output`, with one warning at exit, and that `verify` ends it in strict mode."""
    status, printed, stderr = program(tree, text)
    assert (status, printed) == (0, output), stderr
    about(stderr, *words)
    assert program(tree, text, RANK="1")[2] == ""
    status, _, stderr = program(tree, f"{textwrap.dedent(text)}\n{VERIFIES}", RANK="1", **STRICT)
    assert status == 1
    assert "StrictModeError: the fix numpy2_product is NOT active" in stderr


# What runs


def test_the_text_and_the_code_are_those_of_the_plan(tmp_path: Path) -> None:
    """What runs and what tools show is what `diff` and `apply` write."""
    make_two(tmp_path)
    code = f"""
    import inspect, sys, types
    ran = {{}}
    sys.addaudithook(lambda event, args: event == "exec" and ran.update({{args[0].co_filename: args[0]}}))
    from ckpt_patches.engine.plan import plan_tree
    import {MODULE}, {SECOND}
    for module, file in plan_tree({str(tmp_path)!r}, {CORE!r}, ["numpy2_product"]).files.items():
        loaded = sys.modules[module]
        shown = inspect.getsource(loaded).encode()
        print(ran[file.path] == file.code, shown == file.patched, loaded.__loader__.get_data(file.path) == file.patched)
    """
    runs(tmp_path, code, "True True True", "True True True")
    assert len(plan_tree(str(tmp_path), CORE, ["numpy2_product"]).files) == 2


def test_a_target_is_patched_and_other_modules_keep_their_ordinary_loader(tmp_path: Path) -> None:
    path = make(tmp_path)
    code = f"import {MODULE} as m, megatron.core as c; print(type(m.__loader__).__name__, type(c.__loader__).__name__)"
    assert python("-c", code, tree=tmp_path).stdout.split() == ["PatchedLoader", "SourceFileLoader"]
    assert patched(tmp_path)
    path.write_text(FIXED)  # which no fix edits
    assert python("-c", code, tree=tmp_path).stdout.split() == ["SourceFileLoader", "SourceFileLoader"]


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


def test_a_fork_whose_megatron_is_a_regular_package_is_patched_as_well(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "megatron/__init__.py").write_text("OWN = True\n")
    code = f"import megatron; print(megatron.OWN); {IS_PATCHED}"
    assert python("-c", code, tree=tmp_path).stdout.split() == ["True", "True"]


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


# What cannot be patched


def test_bytecode_alone_is_said_to_have_no_source(tmp_path: Path) -> None:
    path = make(tmp_path)
    py_compile.compile(str(path), cfile=str(path) + "c", doraise=True)
    path.unlink()
    is_said(tmp_path, IS_PATCHED, "False", "no source", "CKPT_PATCHES_SKIP=numpy2_product")


ZARR = "megatron.core.dist_checkpointing.strategies.zarr"
WITHOUT_ANCHOR = "def _create_zarr_array(tensor):\n    return None\n"


def make_unknown(tmp_path: Path) -> Path:
    make(tmp_path)
    path = tmp_path.joinpath(*ZARR.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(WITHOUT_ANCHOR)
    return path


def test_unknown_code_is_warned_of_once_on_rank_zero_alone(tmp_path: Path) -> None:
    """Each warning is one line; its reason fits two lines of a terminal."""
    path = make_unknown(tmp_path)
    code = f"import {ZARR}, importlib; importlib.reload({ZARR})"
    warnings = [line for line in python("-c", code, tree=tmp_path).stderr.splitlines() if "WARNING" in line]
    (line,) = warnings
    parts = ("zarr_create_synchronizer is NOT active", "megatron-core 0.14.0", str(path), "zarr_array", "SKIP=")
    assert [part for part in parts if part not in line] == []
    assert len(line) < 700
    for variable in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        assert python("-c", code, tree=tmp_path, env={variable: "3"}).stderr == ""
        for rank in ("0", "00", "first", "9" * 5000 + "x"):  # one that does not know its rank speaks
            assert "WARNING" in python("-c", code, tree=tmp_path, env={variable: rank}).stderr


def test_strict_mode_refuses_unknown_code_on_every_rank(tmp_path: Path) -> None:
    make_unknown(tmp_path)
    for rank in ("0", "3"):
        env = {"CKPT_PATCHES": "strict", "RANK": rank}
        done = python("-c", f"import {ZARR}", tree=tmp_path, env=env, check=False)
        assert done.returncode == 1
        assert "StrictModeError: the fix zarr_create_synchronizer is NOT active" in done.stderr
    env = {"CKPT_PATCHES": "strict", "CKPT_PATCHES_SKIP": "zarr_create_synchronizer"}
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


def test_a_module_that_does_not_parse_fails_as_it_would_without_us(tmp_path: Path) -> None:
    make(tmp_path, "def size(shape:\n    return np.product(shape)\n")
    done = python("-c", IS_PATCHED, tree=tmp_path, check=False)
    assert "does not parse with this Python" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("SyntaxError: ")
    assert "ckpt_patches/" not in done.stderr.split("Traceback")[1]


def test_a_defect_of_ours_does_not_stop_the_import(tmp_path: Path) -> None:
    make(tmp_path)
    code = """
    import sys
    import ckpt_patches.engine.plan
    def broken(*a, **k): raise RuntimeError("our defect")
    ckpt_patches.engine.plan.plan_tree = broken
    """
    code = textwrap.dedent(code) + IS_PATCHED
    status, output, stderr = program(tmp_path, code)
    assert (status, output, stderr.count("our defect")) == (0, "False", 1)
    assert "Traceback" not in stderr
    status, output, stderr = program(tmp_path, code, **STRICT)
    assert (status, output) == (1, "")
    assert "StrictModeError: megatron-core: no fix is active: RuntimeError: our defect" in stderr


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
    """Names of fixes are checked at the first import of a package: a start of Python lists none."""
    make(tmp_path)
    done = python("-c", IS_PATCHED, tree=tmp_path, env={variable: value})
    assert done.stdout.strip() == "True"
    line = done.stderr.splitlines()[0]
    assert f"{variable}={value}" in line
    assert all(name in line for name in valid)
    said = python("-c", IS_PATCHED, tree=tmp_path, env={variable: value, "RANK": "1"}).stderr
    assert said.count("\n") == (variable == "CKPT_PATCHES")  # each rank reports it, as its environment may differ
    assert python("-c", "pass", tree=tmp_path, env={"CKPT_PATCHES_SKIP": value}).stderr == ""


@pytest.mark.parametrize(("begin", "mode"), [("Strict", "strict"), ("", "warn")])
def test_an_odd_and_huge_mode_is_printed_short_and_escaped(begin: str, mode: str, tmp_path: Path) -> None:
    value = f"{begin}\udcff\x1b[2J\n" + "x" * 100_000
    code = "import ckpt_patches; print(ckpt_patches.installed.switches.mode)"
    done = python("-c", code, tree=tmp_path, env={"CKPT_PATCHES": value})
    (line,) = done.stderr.splitlines()
    assert done.stdout == f"{mode}\n"
    assert f"CKPT_PATCHES={begin}\\udcff\\x1b[2J\\nxx" in line
    assert len(line) < 250


@pytest.mark.parametrize("names", [REMOVED, REMOVED[-1:]])
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
    assert line == "[ckpt_patches] INFO: 1 fix active on megatron-core 0.14.0 (ckpt-patches status)"
    assert info_lines(python("-c", code, tree=tmp_path, env={"RANK": "1"}).stderr) == []


def test_a_programs_own_logging_gets_the_line_and_at_debug_level_the_names(tmp_path: Path) -> None:
    make(tmp_path)
    code = f"import logging; logging.basicConfig(level='INFO', format='MINE %(message)s'); import {MODULE}"
    (line,) = python("-c", code, tree=tmp_path).stderr.splitlines()
    assert line == "MINE 1 fix active on megatron-core 0.14.0 (ckpt-patches status)"
    first, second = python("-c", code.replace("INFO", "DEBUG"), tree=tmp_path).stderr.splitlines()
    assert (first, second) == (line, f"MINE megatron-core 0.14.0 in {tmp_path}: active: numpy2_product; in place: ")
    make_unknown(tmp_path)  # what is said before logging is set up leaves nothing in its way
    code = f"import {MODULE}, logging\nlogger = logging.getLogger('ckpt_patches')\n"
    code += "print(logger.handlers, logger.propagate, logger.level)"
    assert python("-c", code, tree=tmp_path).stdout.strip() == "[] True 0"


def test_after_apply_the_line_says_that_fixes_are_active_in_place(tmp_path: Path) -> None:
    """Also beside fixes that the hook adds. A function that was edited in place is compared as well."""
    make(tmp_path)
    apply = ("-m", "ckpt_patches", "apply", "--tree", str(tmp_path), "numpy2_product")
    assert python(*apply, tree=tmp_path).returncode == 0
    program = f"import {MODULE} as m; from ckpt_patches.startup import report, verify; print(report().splitlines()[-1])"
    done = python("-c", program, tree=tmp_path, env=STRICT)
    assert "INFO: 1 fix active in place on megatron-core 0.14.0 (ckpt-patches status)" in done.stderr
    assert done.stdout == "  numpy2_product: active in place\n"
    replaced = python("-c", f"{program}; m.size = print; verify()", tree=tmp_path, env=STRICT, check=False).stderr
    assert f"StrictModeError: the fix numpy2_product is NOT active any more: {MODULE}.size was replaced by" in replaced
    original = tree_of_release("megatron-core", RELEASE).joinpath(*ZARR.split(".")).with_suffix(".py")
    tmp_path.joinpath(*ZARR.split(".")).with_suffix(".py").write_bytes(original.read_bytes())
    assert "INFO: 1 fix active, 1 in place on megatron-core 0.14.0" in python("-c", program, tree=tmp_path).stderr
    path = tmp_path.joinpath(*MODULE.split(".")).with_suffix(".py")
    path.write_text(f"{path.read_text()}# of another release\n")
    assert "INFO: 1 fix active on megatron-core 0.14.0" in python("-c", program, tree=tmp_path).stderr


def test_a_logging_handler_may_import_a_module_of_upstream(tmp_path: Path) -> None:
    make_two(tmp_path)
    text = f"""
    import logging
    class Imports(logging.Handler):
        def emit(self, record):
            import {SECOND}, {MODULE}
            print(record.levelname)
    logging.basicConfig(level="INFO", handlers=[Imports()])
    """
    runs(tmp_path, textwrap.dedent(text) + f"{IS_PATCHED}\n{IS_PATCHED_SECOND}", "INFO", "True", "True")


# Installing by hand, and the start


def test_the_finder_takes_the_hook_away() -> None:
    before = list(sys.meta_path)
    finder = install()
    assert finder is not None
    assert finder in sys.meta_path
    finder.uninstall()
    finder.uninstall()
    assert finder not in sys.meta_path
    sys.meta_path[:] = before


def test_the_start_imports_nothing_but_the_package() -> None:
    code = "import sys; print(sorted(sys.modules))"
    switched = {"CKPT_PATCHES_SKIP": "numpy2_product", "CKPT_PATCHES_FINGERPRINT": "1"}
    for env in ({}, switched):
        with_hook = set(eval(python("-c", code, tree=Path("/"), env=env).stdout))
        assert {name for name in with_hook if name.startswith(("ckpt_patches", "megatron", "deepspeed"))} == {
            "ckpt_patches"
        }
        without = set(eval(python("-I", "-S", "-c", code, tree=Path("/")).stdout))
        heavy = {
            "ast",
            "difflib",
            "logging",
            "re",
            "inspect",
            "typing",
            "json",
            "dataclasses",
            "threading",
            "contextlib",
        }
        assert not (heavy & with_hook) - without


# Beside other hooks: as planned, or said

OTHER = """
import importlib.machinery as im, importlib.util, sys
class Other(im.SourceFileLoader): pass
"""


def takes(name: str, at: str) -> str:
    """A hook that finds one module, without asking other finders, and loads it with its own loader."""
    return f"""{OTHER}
class Takes:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = im.PathFinder.find_spec(name, path) if name == {name!r} else None
        if spec is not None: spec.loader = Other(spec.name, spec.origin)
        return spec
sys.meta_path.insert({at}, Takes)
"""


ASKS = """
import sys
class Asks:
    def find_spec(self, name, path=None, target=None):
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
"""
# Two that ask each other need a recursion guard, which real ones have.
ASK_IN_TURN = ASKS.replace("class Asks:", "class Asks:\n    asking = False").replace(
    "        for finder", "        if self.asking: return None\n        self.asking = True\n        for finder"
)
KEEPS = f"""{OTHER}
import functools
class Keeps:
    @staticmethod
    @functools.cache
    def kept(name, path): return im.PathFinder.find_spec(name, list(path))
    @classmethod
    def find_spec(cls, name, path=None, target=None): return cls.kept(name, tuple(path or sys.path))
sys.meta_path.insert(1, Keeps)
"""
STRANGE = """
class Strange:
    def __eq__(self, other): raise TypeError("not with me")
    def find_spec(self, name, path=None, target=None): return None
"""
AROUND = f"""{OTHER}
class Around:  # such as those of ddtrace and New Relic
    def __init__(self, loader): self.loader = loader
    def create_module(self, spec): return self.loader.create_module(spec)
    def exec_module(self, module):
        import {SECOND}
        self.loader.exec_module(module)
class Watches:
    asking = False
    def find_spec(self, name, path=None, target=None):
        if self.asking or name != {MODULE!r}: return None
        self.asking = True
        try: spec = importlib.util.find_spec(name)
        finally: self.asking = False
        spec.loader = Around(spec.loader)
        return spec
sys.meta_path.insert(0, Watches())
"""
WRAPT = f"import wrapt\nwrapt.when_imported({MODULE!r})(lambda module: None)"
HARMLESS = {
    "one that asks the others, in front": f"{ASKS}sys.meta_path.insert(0, Asks())",
    "one that asks the others, behind": f"{ASKS}sys.meta_path.insert(1, Asks())",
    "two that ask the others": f"{ASK_IN_TURN}sys.meta_path.insert(0, Asks())\nsys.meta_path.insert(2, Asks())",
    "one that cannot be compared, in front": f"import sys{STRANGE}sys.meta_path.insert(0, Strange())",
    "one that cannot be compared, behind": f"import sys{STRANGE}sys.meta_path.insert(1, Strange())",
    "one that keeps its specs": KEEPS,
    "one whose loader calls ours": AROUND,
    "one of a name that is found before": takes(SECOND, "len(sys.meta_path)"),
    "wrapt in front": WRAPT,
    "wrapt behind": f"{WRAPT}\nimport sys\nsys.meta_path.insert(1, sys.meta_path.pop(0))",
}
if sys.version_info >= (3, 12):  # before, Python itself fails
    HARMLESS["one without find_spec"] = "import sys\nsys.meta_path.insert(1, object())"


@pytest.mark.parametrize("finder", HARMLESS)
def test_beside_another_finder_the_fix_is_active_in_both_modules(finder: str, tmp_path: Path) -> None:
    make_two(tmp_path)
    runs(tmp_path, f"{HARMLESS[finder]}\n{IS_PATCHED}\n{IS_PATCHED_SECOND}\n{VERIFIES}", "True", "True", **STRICT)


LOADED = f"{SECOND}: Other, of another import hook, loaded it"
BEARTYPE = "from beartype.claw import beartype_package as hook; hook('megatron.core')"
OTHERS = {  # what the program does first, what the warning says
    "in front": (takes(SECOND, "0"), LOADED),
    "behind": (takes(SECOND, "1"), LOADED),
    "typeguard": (
        BEARTYPE.replace("beartype.claw", "typeguard").replace("beartype_package", "install_import_hook"),
        "",
    ),
    "beartype": (BEARTYPE, "BeartypeSourceFileLoader"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_module_that_another_hook_loads_is_said(tmp_path: Path, other: str) -> None:
    make_two(tmp_path)
    first, words = OTHERS[other]
    output = "True\nFalse" if words == LOADED else "False\nFalse"
    is_said(tmp_path, f"{first}\n{IS_PATCHED}\n{IS_PATCHED_SECOND}", output, words or "TypeguardLoader")


def test_the_next_module_of_upstream_is_refused_in_strict_mode(tmp_path: Path) -> None:
    """At every attempt: a program may swallow the error, but not as an ImportError."""
    make_two(tmp_path)
    text = f"""{takes(SECOND, "0")}
import {SECOND}
for _ in range(2):
    try: import {MODULE}
    except ImportError: print("swallowed")
    except Exception as error: print(type(error).__name__)
"""
    for rank in ("0", "3"):
        runs(tmp_path, text, "StrictModeError", "StrictModeError", **STRICT, RANK=rank)
    about(program(tmp_path, text)[2], LOADED)


def test_a_module_that_was_imported_before_takes_the_whole_fix_away(tmp_path: Path) -> None:
    make_two(tmp_path)
    late = f"""
    import os, sys, {MODULE}
    os.environ["CKPT_PATCHES"] = "warn"
    from ckpt_patches.startup import install
    install()
    """
    text = textwrap.dedent(late) + f"{IS_PATCHED}\n{IS_PATCHED_SECOND}"
    status, output, stderr = program(tmp_path, text, CKPT_PATCHES="off")
    assert (status, output) == (0, "False\nFalse")
    about(stderr, MODULE.rpartition(".")[2], "imported before the hook was installed")
    status, _, stderr = program(tmp_path, late.replace('"warn"', '"strict"'), CKPT_PATCHES="off")
    assert status == 1
    assert "StrictModeError: the fix numpy2_product is NOT active" in stderr


def test_a_module_of_another_tree_is_patched_there(tmp_path: Path) -> None:
    """A namespace package may have portions in several folders."""
    make_two(tmp_path / "one")
    _, other = make_two(tmp_path / "two")
    text = f"""
    import importlib.util, sys
    class Portions:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == {SECOND!r}:
                return importlib.util.spec_from_file_location(name, {str(other)!r})
    sys.meta_path.insert(1, Portions)
    {IS_PATCHED}
    {IS_PATCHED_SECOND}
    """
    status, output, stderr = program(tmp_path / "one", text, **STRICT)
    assert (status, output.split()) == (0, ["True", "True"]), stderr


def test_a_package_that_is_imported_again_from_elsewhere_is_patched_there(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_two(tmp_path / name)
    code = f"""
    import sys
    import {MODULE}, {SECOND}
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.path.insert(0, {str(tmp_path / "two")!r})
    {IS_PATCHED}
    {IS_PATCHED_SECOND}
    """
    status, output, stderr = program(tmp_path / "one", code, **STRICT)
    assert (status, output.split()) == (0, ["True", "True"]), stderr
    assert "NOT active" not in stderr


def test_a_path_through_a_link_and_back_is_the_one_on_the_disk(tmp_path: Path) -> None:
    """Its edited lines are shown as well."""
    make(tmp_path / "real" / "tree")
    make(tmp_path / "links" / "tree", "import numpy as np\nx = 'another tree'\n")
    (tmp_path / "real" / "scripts").mkdir()
    (tmp_path / "links" / "scripts").symlink_to(tmp_path / "real" / "scripts")
    path = f"{tmp_path}/links/scripts/../tree"
    code = f"import inspect, sys; sys.path.insert(0, {path!r}); {IS_PATCHED}"
    code += "; print(inspect.getsource(m).count('np.prod('))"
    runs(tmp_path, code, "True", "1", **STRICT)


def test_a_package_in_a_folder_of_another_name_is_said(tmp_path: Path) -> None:
    make(tmp_path / "tree")
    (tmp_path / "tree/megatron/core").rename(tmp_path / "mcore")
    text = f"""
    import importlib.util, sys
    class Renamed:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "megatron.core":
                return importlib.util.spec_from_file_location(name, {str(tmp_path / "mcore/__init__.py")!r})
    sys.meta_path.insert(1, Renamed)
    """
    text = textwrap.dedent(text) + IS_PATCHED
    status, output, stderr = program(tmp_path / "tree", text)
    assert (status, output) == (0, "False")
    assert "no fix is active: ValueError: expected files that are named like their modules" in stderr
    assert "StrictModeError: megatron-core: no fix is active" in program(tmp_path / "tree", text, **STRICT)[2]


def test_a_wiped_meta_path_is_said_at_exit(tmp_path: Path) -> None:
    make(tmp_path)
    text = """
    import sys, importlib.machinery as im
    sys.meta_path[:] = [im.BuiltinImporter, im.FrozenImporter, im.PathFinder]
    """
    text = textwrap.dedent(text) + f"{IS_PATCHED}; print('end')"
    is_said(tmp_path, text, "False\nend", "by a finder in front of it")
    assert "NOT active" not in program(tmp_path, text, CKPT_PATCHES_SKIP="numpy2_product")[2]
    assert "[ckpt_patches] ERROR: the fix numpy2_product is NOT active" in program(tmp_path, text, **STRICT)[2]


def test_what_is_said_at_exit_is_on_stderr_once_whatever_became_of_logging(tmp_path: Path) -> None:
    make(tmp_path)
    text = f"""
    import logging, os, sys
    logging.basicConfig(filename={str(tmp_path / "log")!r}, filemode="w")
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "PatchFinder"]
    import {MODULE}
    for _ in range(3):
        if os.fork() == 0: sys.exit()
        os.wait()
    """
    about(program(tmp_path, text)[2], "by a finder in front of it")


def test_what_no_fix_needs_is_no_reason_to_say_anything(tmp_path: Path) -> None:
    make(tmp_path, FIXED)
    for at in ("0", "1"):
        text = takes(MODULE, at) + f"import {MODULE}\n{VERIFIES}"
        status, _, stderr = program(tmp_path, text, **STRICT)
        assert (status, "WARNING" in stderr) == (0, False)


def test_what_another_finder_raises_is_raised(tmp_path: Path) -> None:
    make(tmp_path)
    text = f"""
    import sys
    class Raises:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == {MODULE!r}: raise OSError("its own")
    sys.meta_path.insert(1, Raises)
    try:
        import {MODULE}
    except OSError as error:
        print(error)
    """
    for env in ({}, STRICT):
        runs(tmp_path, text, "its own", **env)


STUBS = {
    "a module that loads itself when it is touched": """
import types
class Lazy(types.ModuleType):
    def __getattribute__(self, name): raise ImportError("must not be touched")
stub = Lazy("stub")
""",
    "a mock": "from unittest.mock import MagicMock\nstub = MagicMock()",
    "no module": "import types\nstub = types.SimpleNamespace()",
    "nothing": "stub = None",
    "an empty module": "import types\nstub = types.ModuleType('stub')",
}


@pytest.mark.parametrize("stub", STUBS)
def test_a_stub_in_the_place_of_a_module_disturbs_nothing(tmp_path: Path, stub: str) -> None:
    """Programs use stubs to avoid a package; a module that we did not load turns the fix off."""
    make_two(tmp_path)
    text = f"{STUBS[stub]}\nimport sys\nsys.modules[{SECOND!r}] = stub\n{IS_PATCHED}"
    status, output, stderr = program(tmp_path, text)
    assert (status, "Traceback" in stderr, "could not find out" in stderr) == (0, False, False), stderr
    module = "module" in stub and stub != "no module"
    assert output == str(not module)
    assert ("NOT active" in stderr) is module


def test_to_ask_for_a_module_imports_and_reads_nothing_of_it(tmp_path: Path) -> None:
    """A finder runs under the lock of the import system: the hook does nothing but find the module there."""
    make(tmp_path)
    text = """
    import sys
    before = set(sys.modules)
    finder = sys.meta_path[0]
    opened = []
    sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
    import megatron
    del opened[:]
    spec = finder.find_spec("megatron.core", megatron.__path__)
    print(type(spec.loader).__name__, opened, [name for name in set(sys.modules) - before if "ckpt" in name])
    print(finder.find_spec("numpy"))
    """
    runs(tmp_path, text, "PatchedLoader [] []", "None", **STRICT)


def test_a_reload_plans_anew_also_for_a_module_that_had_no_edit(tmp_path: Path) -> None:
    path = make(tmp_path, FIXED)
    text = f"""
    import importlib, inspect, pathlib, {MODULE} as m
    path = pathlib.Path({str(path)!r})
    path.write_text("import numpy as np\\n\\n\\ndef size(shape):\\n    return [np.product(shape)]\\n")
    importlib.reload(m)
    print('prod' in m.size.__code__.co_names)
    path.write_text("def size(shape):\\n    return 1  # np.prod(shape)\\n")
    importlib.reload(m)
    print(m.size(2), inspect.getsource(m.size).splitlines()[-1].strip())
    """
    runs(tmp_path, f"{textwrap.dedent(text)}\n{VERIFIES}", "True", "1 return 1  # np.prod(shape)", **STRICT)


def test_a_file_that_cannot_be_read_for_a_moment_does_not_halve_a_fix(tmp_path: Path) -> None:
    make_two(tmp_path)
    text = """
    import builtins
    real = builtins.open
    def flaky(path, *rest, **more):
        if str(path).endswith("mapping.py") and planned: raise OSError(5, "Input/output error")
        return real(path, *rest, **more)
    planned = False
    builtins.open = flaky
    """
    text = textwrap.dedent(text) + f"{IS_PATCHED}\nplanned = True\n{IS_PATCHED_SECOND}"
    runs(tmp_path, text, "True", "True", **STRICT)


def test_the_spec_of_an_edited_module_can_be_pickled(tmp_path: Path) -> None:
    make(tmp_path)
    code = f"import pickle, {MODULE} as m; print(type(pickle.loads(pickle.dumps(m.__spec__)).loader).__name__)"
    runs(tmp_path, code, "SourceFileLoader")


# Kinds of processes


def test_eight_threads_that_import_at_once_are_all_served(tmp_path: Path) -> None:
    make_two(tmp_path)
    text = f"""
    import importlib, threading
    gate = threading.Barrier(8)
    def load(name):
        gate.wait()
        importlib.import_module(name)
    threads = [threading.Thread(target=load, args=(name,)) for name in ({MODULE!r}, {SECOND!r}) * 4]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    """
    text = f"{textwrap.dedent(text)}\n{IS_PATCHED}\n{IS_PATCHED_SECOND}\n{VERIFIES}"
    status, output, stderr = program(tmp_path, text, **STRICT)
    assert (status, output, len(stderr.splitlines())) == (0, "True\nTrue", 1)


SLOW_PLAN = f"""
import gc, logging, os, sys, threading, time
import ckpt_patches.engine.plan
ready, real = threading.Event(), ckpt_patches.engine.plan.plan_tree
def slow(*arguments, **keywords):
    ready.set()
    done.wait(60)
    return real(*arguments, **keywords)
ckpt_patches.engine.plan.plan_tree = slow
done = threading.Event()
def beside():
    ready.wait()
    BESIDE
    done.set()
thread = threading.Thread(target=beside)
thread.start()
{IS_PATCHED}
thread.join()
"""


@pytest.mark.parametrize(
    ("beside", "line"),
    [
        ("child = os.fork()\n    if child == 0: os._exit(0 if gc.isenabled() else 9)\n    print(os.wait()[1])", "0"),
        ("import colorsys; print('imported')", "imported"),
    ],
    ids=["fork", "import"],
)
def test_other_threads_do_not_wait_while_a_tree_is_planned(tmp_path: Path, beside: str, line: str) -> None:
    """The plan waits for the other thread here: an import or a fork that waited for the plan would be a deadlock."""
    make(tmp_path)
    runs(tmp_path, SLOW_PLAN.replace("BESIDE", beside), line, "True")


def test_a_subinterpreter_is_patched(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "numpy.py").write_text("def product(shape): ...\ndef prod(shape): ...\n")
    text = f"""
    import _xxsubinterpreters as interpreters
    interpreters.run_string(interpreters.create(), {IS_PATCHED!r})
    """
    if sys.version_info >= (3, 13):
        text = text.replace("_xxsubinterpreters", "_interpreters")
    runs(tmp_path, text, "True")


def test_without_assertions_and_docstrings(tmp_path: Path) -> None:
    make(tmp_path)
    for option in ("-O", "-OO"):
        done = python(option, "-c", f"{IS_PATCHED}\n{VERIFIES}", tree=tmp_path, env=STRICT)
        assert done.stdout.strip() == "True"


def test_a_package_in_a_zip_file_is_said(tmp_path: Path) -> None:
    make(tmp_path / "tree")
    archive = shutil.make_archive(str(tmp_path / "tree"), "zip", tmp_path / "tree")
    status, output, stderr = program(Path(archive), IS_PATCHED)
    assert (status, output) == (0, "False")
    about(stderr, "Not a directory")
    assert program(Path(archive), f"{IS_PATCHED}\n{VERIFIES}", **STRICT)[0] == 1


@pytest.mark.parametrize(("daemon", "lines"), [(True, 1), (False, 2)])
def test_the_workers_of_a_data_loader_do_not_repeat_the_line(tmp_path: Path, daemon: bool, lines: int) -> None:
    """Workers log nothing; a rank that the same module starts logs its own line."""
    make(tmp_path)
    (tmp_path / "load.py").write_text(
        "import importlib, multiprocessing\n"
        "if __name__ == '__main__':\n"
        f"    import {MODULE}\n"
        f"    arguments = dict(target=importlib.import_module, args=({MODULE!r},), daemon={daemon})\n"
        "    worker = multiprocessing.get_context('spawn').Process(**arguments)\n"
        "    worker.start()\n"
        "    worker.join()\n"
    )
    done = python(str(tmp_path / "load.py"), tree=tmp_path)
    assert len(info_lines(done.stderr)) == lines


def test_what_is_left_behind_in_a_process(tmp_path: Path) -> None:
    make(tmp_path)
    left = f"""
    import gc, os, sys
    before = dict(os.environ), gc.isenabled(), sys.excepthook
    import {MODULE}
    print(sorted(os.environ.keys() - before[0].keys()), gc.isenabled() == before[1], sys.excepthook is before[2])
    """
    for first in ("", "import gc; gc.disable()"):
        runs(tmp_path, f"{first}\n{textwrap.dedent(left)}", "[] True True", RANK="3")


# It never ends a program in warn mode, and never stops Python


def without_site(
    text: str, tree: Path, env: Mapping[str, str], interpreter: str = sys.executable, ours: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """Run a program on a folder with our packages, after the .pth file's line, which `site` runs in an install."""
    (tree / "with_pth.py").write_text(f"{(REPOSITORY / PTH).read_text()}\nprint('started', flush=True)\n{text}")
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (tree, ours))), "PATH": os.environ["PATH"], **env}
    command = [interpreter, "-S", "-B", str(tree / "with_pth.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)


NUISANCES: dict[str, tuple[dict[str, str], str, str]] = {  # environment, redirection, the program's first lines
    "stderr on a full disk": ({}, "2>/dev/full", ""),
    "stderr a pipe without a reader": ({}, "2> >(exec true)", "import time; time.sleep(0.2)"),
    "no stderr": ({}, "2>&-", ""),
    "stderr is None": ({}, "", "import sys; sys.stderr = None"),
    "a stderr that raises": (
        {},
        "",
        "import sys\nclass Bad:\n    def write(self, text): raise KeyError\n    def flush(self): ...\n"
        "sys.stderr = Bad()",
    ),
    "a full disk": ({}, "", "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"),
    "no HOME": ({"HOME": ""}, "", ""),
    "a rank that is no number": ({"RANK": "first"}, "", ""),
    "a huge rank": ({"RANK": "9" * 5000}, "", ""),
    "odd names of fixes": ({"CKPT_PATCHES_SKIP": "\udcff\x1b[2J\n," + "x" * 50_000 + ",,  " + "y," * 9000}, "", ""),
    "an odd fingerprint": ({"CKPT_PATCHES_FINGERPRINT": "\udcff\x1b[2J\n" + "x" * 100_000}, "2>/dev/full", ""),
    "a logging handler that raises": (
        {},
        "",
        "import logging\nclass Bad(logging.Handler):\n    def emit(self, record): raise KeyError('its own')\n"
        "logging.basicConfig(level='INFO', handlers=[Bad()])",
    ),
    "a logging level of its own": ({}, "", "import logging\nlogging.basicConfig(level=10**9)"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nuisance", NUISANCES)
def test_nothing_ends_a_program_but_strict_mode_at_an_import(nuisance: str, mode: str, tmp_path: Path) -> None:
    """With fixes that do not match, so that there is something to say; in strict mode Python starts as well."""
    make_unknown(tmp_path)
    env, redirection, first = NUISANCES[nuisance]
    shell = ["bash", "-c", f'"$@" {redirection}', "run"]
    done = python(
        "-c",
        f"{first}\nprint('started', flush=True)\nimport {ZARR}\nprint('ran')",
        tree=tmp_path,
        env={**env, "CKPT_PATCHES": mode},
        check=False,
        through=lambda *command: [*shell, *command],
    )
    refused = mode == "strict"
    assert done.stdout.split() == ["started"] + ["ran"] * (not refused), done.stderr
    assert (done.returncode != 0) is refused
    assert len(done.stderr) < 5000
    if nuisance == "a logging handler that raises" and mode == "warn":  # what it should have logged
        assert "zarr_create_synchronizer is NOT active" in done.stderr
        assert "(KeyError in a logging handler)" in done.stderr
    assert "\x1b" not in done.stderr


GONE = ["hook", "hook/running.py", "engine", "engine/source.py", "runtime", "runtime/shown.py", "errors.py"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gone", GONE)
def test_a_half_deleted_installation_ends_no_program_but_strict_mode_at_an_import(
    gone: str, mode: str, tmp_path: Path
) -> None:
    make(tmp_path / "tree")
    (tmp_path / "tree/numpy.py").write_text("def product(shape): ...\ndef prod(shape): ...\n")
    ours = tmp_path / "ours/ckpt_patches"
    shutil.copytree(REPOSITORY / "ckpt_patches", ours, ignore=shutil.ignore_patterns("__pycache__"))
    for fixes in ("deepspeed_patches", "nvrx_patches", "apex_patches", "torch_patches"):
        (tmp_path / "ours" / fixes).symlink_to(REPOSITORY / fixes)
    (tmp_path / "ours/megatron_patches").symlink_to(REPOSITORY / "megatron/patches")
    whole = without_site(IS_PATCHED, tmp_path / "tree", {"CKPT_PATCHES": mode}, ours=tmp_path / "ours")
    assert whole.stdout.split() == ["started", str(mode != "off")], whole.stderr
    path = ours / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = without_site(
        f"{IS_PATCHED}; import megatron.core.package_info",
        tmp_path / "tree",
        {"CKPT_PATCHES": mode},
        ours=tmp_path / "ours",
    )
    if mode == "strict":
        assert (done.returncode, done.stdout) == (1, "started\n")
        assert "StrictModeError: no fix is active in what is imported from now on: ModuleNotFoundError: " in done.stderr
    else:
        assert (done.returncode, done.stdout.split()) == (0, ["started", "False"]), done.stderr
        said = [line for line in done.stderr.splitlines() if line.startswith("ckpt-patches: WARNING: ")]
        assert len(said) == len(done.stderr.splitlines()) == (mode == "warn") * (1 + (len(said) > 1))


@pytest.mark.parametrize("mode", MODES)
def test_the_pth_file_never_stops_python(mode: str, tmp_path: Path) -> None:
    """Without the package, and where stderr cannot be written."""
    for redirection, lines in (("2>&1", 1), ("2>/dev/full", 0), ("2>&-", 0)):
        (tmp_path / "with_pth.py").write_text(f"{(REPOSITORY / PTH).read_text()}\nprint('started')\n")
        command = ["bash", "-c", f'"$@" {redirection}', "run", sys.executable, "-S", str(tmp_path / "with_pth.py")]
        done = subprocess.run(command, env={"CKPT_PATCHES": mode}, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 0
        *said, last = done.stdout.splitlines()
        assert (len(said), last) == (lines, "started")
        assert all("the import hook is not active, reinstall training-checkpoint-patches: " in line for line in said)
