"""The import hook beside other hooks, installed late, in threads: no partial fix, no interference, true reports."""

import py_compile
import sys
import textwrap
from pathlib import Path

import pytest

import upstream
from small_tree import IS_PATCHED, IS_PATCHED_SECOND, MODULE, SECOND, UPSTREAM, make, make_two, python

pytestmark = pytest.mark.long

# A module that programs import last, for one more search of sys.meta_path.
LATER = "later"
STRICT = {"CKPT_PATCHES": "strict"}


def program(tree: Path, text: str, **env: str) -> tuple[int, str, str]:
    """Run a program with the tree on its path: exit status, stdout and stderr."""
    (tree / f"{LATER}.py").write_text("")
    done = python("-c", textwrap.dedent(text), tree=tree, env=env, check=False)
    return done.returncode, done.stdout.strip(), done.stderr


def warnings(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "WARNING" in line]


def about(stderr: str, *words: str) -> None:
    """Check that one line with these words reports the fix as not active; other fixes need the same modules."""
    (line,) = (line for line in warnings(stderr) if "numpy2_product" in line)
    for word in ("numpy2_product is NOT active", *words):
        assert word in line


def runs(tree: Path, text: str, *lines: str, **env: str) -> None:
    """Check that a program prints these lines and succeeds."""
    status, output, stderr = program(tree, text, **env)
    assert (status, output.splitlines()) == (0, list(lines)), stderr


def is_reported(tree: Path, text: str, output: str, *words: str, in_strict: str = "") -> None:
    """Check that a program prints `output` and warns, and that strict mode ends it after `in_strict`."""
    status, printed, stderr = program(tree, text)
    assert (status, printed) == (0, output), stderr
    about(stderr, *words)
    status, printed, stderr = program(tree, text, **STRICT)
    assert (status, printed) == (1, in_strict)
    assert "StrictModeError: the fix numpy2_product is NOT active" in stderr


# Another hook's loader, and the ways in which hooks install theirs.
OTHER = """
import importlib.machinery as im, importlib.util, sys
class Other(im.SourceFileLoader): pass
def others(spec):
    if spec is not None: spec.loader = Other(spec.name, spec.origin)
    return spec
"""


def takes(name: str, at: str) -> str:
    """A hook that finds one module without asking other finders."""
    return f"""{OTHER}
class Takes:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return others(im.PathFinder.find_spec(name, path)) if name == {name!r} else None
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


# All or none


def test_a_module_that_was_imported_before_takes_the_whole_fix_away(tmp_path: Path) -> None:
    make_two(tmp_path)
    late = f"""
    import os, sys, {MODULE}
    os.environ["CKPT_PATCHES"] = sys.argv[1] if len(sys.argv) > 1 else "warn"
    from ckpt_patches.startup import install
    install()
    """
    text = textwrap.dedent(late) + f"{IS_PATCHED}\n{IS_PATCHED_SECOND}"
    status, output, stderr = program(tmp_path, text, CKPT_PATCHES="off")
    assert (status, output) == (0, "False\nFalse")
    about(stderr, MODULE.rpartition(".")[2], "imported before the hook was installed")
    strict = textwrap.dedent(late).replace('"warn"', '"strict"')
    status, _, stderr = program(tmp_path, strict, CKPT_PATCHES="off")
    assert status == 1
    assert "StrictModeError: the fix numpy2_product is NOT active" in stderr


LATE_DEEPSPEED = """
import os, sys
import deepspeed
import deepspeed.checkpoint
os.environ["CKPT_PATCHES"] = sys.argv[1]
from ckpt_patches.startup import install
try:
    install()
except RuntimeError as error:
    print(type(error).__name__)
import deepspeed.checkpoint.ds_to_universal as converter
print("load_checkpoint_file" in vars(converter), "max(" in open(converter.__file__).read())
"""


@pytest.mark.slow
def test_a_late_install_breaks_no_program_that_ran_without_us(tmp_path: Path) -> None:
    """No import fails; with the fix, the converter would import a function from a module loaded without it."""
    (tmp_path / "late.py").write_text(LATE_DEEPSPEED)
    tree = upstream.tree("deepspeed", "0.15.4")
    done = upstream.run(tmp_path / "late.py", "warn", tree=tree)
    assert done.stdout.splitlines()[-1].split()[0] == "False"
    said = [line for line in warnings(done.stderr) if "torch_load_weights_only is NOT active" in line]
    assert len(said) == 1
    assert "imported before the hook was installed" in said[0]
    strict = upstream.run(tmp_path / "late.py", "strict", tree=tree, check=False)
    assert "StrictModeError" in strict.stdout
    assert "ImportError" not in strict.stderr


@pytest.mark.parametrize("at", ["0", "1", "len(sys.meta_path)"])
@pytest.mark.parametrize("first", [MODULE, SECOND])
def test_a_module_that_another_hook_loads_takes_the_whole_fix_away(tmp_path: Path, at: str, first: str) -> None:
    """The fix is off at any hook position and import order; behind the standard finder, that hook is never asked."""
    make_two(tmp_path)
    order = [IS_PATCHED, IS_PATCHED_SECOND] if first == MODULE else [IS_PATCHED_SECOND, IS_PATCHED]
    text = takes(SECOND, at) + "\n".join([*order, f"import {LATER}"])
    if at.startswith("len"):
        runs(tmp_path, text, "True", "True", **STRICT)
    else:
        is_reported(tmp_path, text, "False\nFalse", "mapping.py", "Other")


def test_a_module_without_source_takes_the_whole_fix_away(tmp_path: Path) -> None:
    _, second = make_two(tmp_path)
    py_compile.compile(str(second), cfile=str(second) + "c", doraise=True)
    second.unlink()
    text = f"{IS_PATCHED}\n{IS_PATCHED_SECOND}"
    is_reported(tmp_path, text, "False\nFalse", "no source, only bytecode")


def test_a_part_that_is_loaded_already_is_named_when_another_hook_takes_the_rest(tmp_path: Path) -> None:
    """The report names the loaded part, which cannot be undone."""
    make_two(tmp_path)
    text = IS_PATCHED + takes(SECOND, "0") + f"{IS_PATCHED_SECOND}\nimport {LATER}"
    said = f"Its part in {MODULE} is loaded already"
    is_reported(tmp_path, text, "True\nFalse", "mapping.py", said, in_strict="True\nFalse")


def test_a_module_of_another_tree_takes_the_whole_fix_away(tmp_path: Path) -> None:
    """The fix is off if one module comes from another folder of a namespace package."""
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
    """
    status, output, stderr = program(tmp_path / "one", textwrap.dedent(text) + f"{IS_PATCHED}\n{IS_PATCHED_SECOND}")
    assert status == 0
    assert output.splitlines()[0] == "False"
    assert f"is loaded from {other}, of another tree" in stderr


# Real third-party hooks


@pytest.mark.parametrize(
    ("install", "loader"),
    [
        ("from typeguard import install_import_hook as hook", "TypeguardLoader"),
        ("from beartype.claw import beartype_package as hook", "BeartypeSourceFileLoader"),
    ],
    ids=["typeguard in front", "beartype behind"],
)
def test_hooks_that_load_modules_themselves_are_reported(tmp_path: Path, install: str, loader: str) -> None:
    make(tmp_path)
    is_reported(tmp_path, f"{install}\nhook('megatron.core')\n{IS_PATCHED}", "False", loader)


def test_wrapt_which_asks_the_others_hands_the_module_to_our_loader(tmp_path: Path) -> None:
    """Our loader runs, through wrapt's proxy, with which tracing tools watch imports."""
    make(tmp_path)
    text = f"import wrapt\nwrapt.when_imported({MODULE!r})(lambda m: print('seen', m.__name__))\n{IS_PATCHED}"
    status, output, stderr = program(tmp_path, text, **STRICT)
    assert (status, output) == (0, f"seen {MODULE}\nTrue"), stderr


def test_a_loader_around_ours_that_calls_it_runs_the_edited_code(tmp_path: Path) -> None:
    """Loaders like those of ddtrace and New Relic, which are no proxies, run the edited code."""
    make_two(tmp_path)
    text = f"""{OTHER}
class Around:
    def __init__(self, loader): self.loader = loader
    def create_module(self, spec): return self.loader.create_module(spec)
    def exec_module(self, module):
        import {LATER}
        self.loader.exec_module(module)
        print("ran", module.__name__.rpartition(".")[2])
class Watches:
    asking = False
    def find_spec(self, name, path=None, target=None):
        if self.asking or not name.startswith("megatron.core.dist_checkpointing."): return None
        self.asking = True
        try: spec = importlib.util.find_spec(name)
        finally: self.asking = False
        spec.loader = Around(spec.loader)
        return spec
sys.meta_path.insert(0, Watches())
{IS_PATCHED}
{IS_PATCHED_SECOND}
from ckpt_patches.startup import verify
verify()
"""
    runs(tmp_path, text, "ran exchange_utils", "True", "ran mapping", "True", **STRICT)


# Asking, and being asked


STRANGE = """
class Strange:
    def __eq__(self, other): raise TypeError("not with me")
    def find_spec(self, name, path=None, target=None): return None
"""
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
# Two that ask each other need a recursion guard, which real ones have.
ASK_IN_TURN = ASKS.replace("class Asks:", "class Asks:\n    asking = False").replace(
    "        for finder", "        if self.asking: return None\n        self.asking = True\n        for finder"
)
HARMLESS = {
    "one that asks the others, in front": f"{ASKS}sys.meta_path.insert(0, Asks())",
    "one that asks the others, behind": f"{ASKS}sys.meta_path.insert(1, Asks())",
    "two that ask the others": f"{ASK_IN_TURN}sys.meta_path.insert(0, Asks())\nsys.meta_path.insert(2, Asks())",
    "one that cannot be compared, in front": f"import sys{STRANGE}sys.meta_path.insert(0, Strange())",
    "one that cannot be compared, behind": f"import sys{STRANGE}sys.meta_path.insert(1, Strange())",
    "one that keeps its specs": KEEPS,
}
if sys.version_info >= (3, 12):  # before, Python itself fails
    HARMLESS["one without find_spec"] = "import sys\nsys.meta_path.insert(1, object())"


@pytest.mark.parametrize("finder", HARMLESS)
def test_beside_another_finder_the_fix_is_whole(finder: str, tmp_path: Path) -> None:
    make_two(tmp_path)
    text = f"{HARMLESS[finder]}\n{IS_PATCHED}\n{IS_PATCHED_SECOND}\nimport {LATER}"
    runs(tmp_path, text, "True", "True", **STRICT)


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
        status, output, stderr = program(tmp_path, text, **env)
        assert (status, output, stderr) == (0, "its own", "")


def test_finders_in_front_are_not_asked_again(tmp_path: Path) -> None:
    make(tmp_path)
    text = f"""
    import sys
    asked = []
    class Counts:
        @staticmethod
        def find_spec(name, path=None, target=None):
            asked.append(name)
    sys.meta_path.insert(0, Counts)
    import {MODULE}
    """
    # One call by the import itself, one by us to find the loaders of the modules that the plan edits.
    status, output, stderr = program(tmp_path, textwrap.dedent(text) + f"print(asked.count({MODULE!r}))", RANK="1")
    assert (status, output, stderr) == (0, "2", "")


def test_a_hook_that_compiles_what_our_loader_has_gets_upstreams_code(tmp_path: Path) -> None:
    """Upstream's code runs; otherwise an unknown part of a fix could."""
    make(tmp_path)
    text = f"""{OTHER}
class Compiles:
    def __init__(self, inner): self.inner = inner
    def create_module(self, spec): return self.inner.create_module(spec)
    def exec_module(self, module): exec(self.inner.get_code(module.__name__), module.__dict__)
class Wraps:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {MODULE!r}:
            spec = next(f for f in sys.meta_path if type(f).__name__ == "PatchFinder").find_spec(name, path)
            spec.loader = Compiles(spec.loader)
            return spec
sys.meta_path.insert(0, Wraps)
{IS_PATCHED}
"""
    is_reported(tmp_path, text, "False", "Compiles")


# Reports match what runs


def test_strict_mode_is_not_swallowed_by_the_idiom_for_a_missing_package(tmp_path: Path) -> None:
    make(tmp_path)
    text = takes(MODULE, "1") + f"try:\n    import {MODULE}\nexcept ImportError:\n    print('swallowed')"
    status, output, stderr = program(tmp_path, text, **STRICT)
    assert (status, output) == (1, "")
    assert "ckpt_patches.errors.StrictModeError" in stderr


def test_to_ask_for_a_module_raises_nothing(tmp_path: Path) -> None:
    make(tmp_path)
    text = takes(MODULE, "1") + f"import importlib.util; print(importlib.util.find_spec({MODULE!r}) is not None)"
    status, output, stderr = program(tmp_path, text, **STRICT)
    assert (status, output, stderr) == (0, "True", "")


def test_a_wiped_meta_path_is_said_at_exit(tmp_path: Path) -> None:
    make(tmp_path)
    text = """
    import sys, importlib.machinery as im
    sys.meta_path[:] = [im.BuiltinImporter, im.FrozenImporter, im.PathFinder]
    """
    text = textwrap.dedent(text) + f"{IS_PATCHED}; print('end')"
    status, output, stderr = program(tmp_path, text)
    assert (status, output) == (0, "False\nend")
    about(stderr, "by a finder in front of it")
    assert program(tmp_path, text, RANK="1")[2] == ""
    assert program(tmp_path, text, CKPT_PATCHES_SKIP="numpy2_product")[2].count("NOT active") == 0
    assert "[ckpt_patches] ERROR: the fix numpy2_product is NOT active" in program(tmp_path, text, **STRICT)[2]


def test_a_program_can_ask_before_it_trains(tmp_path: Path) -> None:
    path = make(tmp_path)
    text = f"""
    import importlib.util, sys, megatron.core
    spec = importlib.util.spec_from_file_location({MODULE!r}, {str(path)!r})
    sys.modules[{MODULE!r}] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from ckpt_patches.startup import verify
    verify()
    print('trains')
    """
    is_reported(tmp_path, text, "trains", "imported before")
    assert program(tmp_path, f"import {MODULE}\nfrom ckpt_patches.startup import verify\nverify()", **STRICT)[0] == 0


def test_what_no_fix_needs_is_no_reason_to_say_anything(tmp_path: Path) -> None:
    make(tmp_path, "import numpy as np\n\n\ndef size(shape):\n    return np.prod(shape)\n")
    for at in ("0", "1"):
        status, output, stderr = program(tmp_path, takes(MODULE, at) + f"import {MODULE}, {LATER}", **STRICT)
        assert (status, output, warnings(stderr)) == (0, "", [])


def test_python_dash_m_of_a_module_that_is_not_ours_is_said_and_refused_in_strict_mode(tmp_path: Path) -> None:
    path = make(tmp_path)
    py_compile.compile(str(path), cfile=str(path) + "c", doraise=True)
    path.unlink()
    done = python("-m", MODULE, tree=tmp_path)
    assert done.stdout.strip() == "False"
    about(done.stderr, "no source, only bytecode")
    done = python("-m", MODULE, tree=tmp_path, env=STRICT, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "StrictModeError" in done.stderr


def test_strict_mode_refuses_again_what_was_swallowed_once(tmp_path: Path) -> None:
    make(tmp_path, UPSTREAM.replace("import numpy as np\n", "import sys\nnp = sys\n"))
    text = f"""{takes(MODULE, "0")}
import {MODULE}
from ckpt_patches.startup import verify
for _ in range(2):
    for attempt in ("import {LATER}", "verify()"):
        try: exec(attempt)
        except Exception as error: print(type(error).__name__)
"""
    status, output, _ = program(tmp_path, text, **STRICT)
    assert (status, output.split()) == (0, ["StrictModeError"] * 4)


def test_to_verify_after_the_meta_path_was_wiped_says_it(tmp_path: Path) -> None:
    make(tmp_path)
    text = f"""
    import sys, importlib.machinery as im
    from ckpt_patches.startup import verify
    sys.meta_path[:] = [im.BuiltinImporter, im.FrozenImporter, im.PathFinder]
    import {MODULE}
    verify()
    """
    status, _, stderr = program(tmp_path, text, **STRICT)
    assert status == 1
    assert "StrictModeError" in stderr


STUBS = {
    "a module that loads itself when it is touched": """
import types
class Lazy(types.ModuleType):
    def __getattr__(self, name): raise ImportError("must not be touched")
stub = Lazy("stub")
""",
    "a mock": "from unittest.mock import MagicMock\nstub = MagicMock()",
    "no module": "import types\nstub = types.SimpleNamespace()",
    "nothing": "stub = None",
    "an empty module": "import types\nstub = types.ModuleType('stub')",
}


@pytest.mark.parametrize("stub", STUBS)
@pytest.mark.parametrize("hook", [takes(MODULE, "0"), ""], ids=["beside a hook", "alone"])
def test_a_stub_in_the_place_of_a_target_disturbs_nothing(tmp_path: Path, stub: str, hook: str) -> None:
    """Programs use stubs to avoid a package; they cause no error."""
    make_two(tmp_path)
    text = f"{STUBS[stub]}\nimport sys\nsys.modules[{SECOND!r}] = stub\n{hook}\n{IS_PATCHED}\nimport {LATER}"
    status, output, stderr = program(tmp_path, text)
    assert (status, "Traceback" in stderr, "could not look" in stderr) == (0, False, False), stderr
    module = "module" in stub and stub != "no module"
    assert output == str(not hook and not module)  # a module that we did not load turns the fix off


@pytest.mark.parametrize(
    "loader",
    [
        "def __init__(self, inner): self.inner = inner\n    def create_module(self, spec):\n"
        "        assert spec.loader is self\n    def exec_module(self, module): self.inner.exec_module(module)",
        "def __init__(self, inner): self.inner = inner\n    def exec_module(self, module): pass",
    ],
    ids=["that looks for itself", "without create_module"],
)
def test_a_loader_behind_ours_finds_what_it_would_find_without_us(tmp_path: Path, loader: str) -> None:
    make(tmp_path)
    text = f"""{OTHER}
class Own:
    {loader}
class Takes:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = im.PathFinder.find_spec(name, path)
        if name in ({MODULE!r}, {LATER!r}): spec.loader = Own(spec.loader)
        return spec
sys.meta_path.insert(1, Takes)
for name in ({MODULE!r}, {LATER!r}):
    try: print(importlib.import_module(name).__loader__.__class__.__name__)
    except ImportError as error: print(error)
"""
    for env in ({}, {"CKPT_PATCHES": "off"}):
        text_now = text if not env else text.replace("insert(1", "insert(0")
        status, output, _ = program(tmp_path, text_now, **env)
        expected = "loaders that define exec_module() must also define create_module()" if "pass" in loader else "Own"
        assert (status, output.splitlines()) == (0, [expected] * 2)


def test_a_finder_that_begins_to_take_modules_later_takes_the_rest_of_a_fix_and_is_said(tmp_path: Path) -> None:
    make_two(tmp_path)
    text = f"""{takes(SECOND, "1").replace("if name ==", "if ready and name ==")}
ready = False
{IS_PATCHED}
ready = True
{IS_PATCHED_SECOND}
"""
    is_reported(tmp_path, text, "True\nFalse", f"Its part in {MODULE} is loaded already", in_strict="True")


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


@pytest.mark.parametrize("rank", ["1", "7"])
def test_only_rank_zero_says_it_and_every_rank_refuses(tmp_path: Path, rank: str) -> None:
    make(tmp_path)
    text = takes(MODULE, "0") + f"import {MODULE}, {LATER}; print('end')"
    assert program(tmp_path, text, RANK=rank) == (0, "end", "")
    status, output, stderr = program(tmp_path, text, RANK=rank, **STRICT)
    assert (status, output) == (1, "")
    assert "StrictModeError" in stderr


def test_a_reload_plans_anew_also_for_a_module_that_had_no_edit(tmp_path: Path) -> None:
    path = make(tmp_path, "import numpy as np\n\n\ndef size(shape):\n    return np.prod(shape)\n")
    text = f"""
    import importlib, pathlib, {MODULE} as m
    print(type(m.__loader__).__name__)
    path = pathlib.Path({str(path)!r})
    path.write_text("import numpy as np\\n\\n\\ndef size(shape):\\n    return [np.product(shape)]\\n")
    importlib.reload(m)
    print(type(m.__loader__).__name__, 'prod' in m.size.__code__.co_names)
    path.write_text("def size(shape):\\n    return 1  # np.prod(shape)\\n")
    importlib.reload(m)
    print(type(m.__loader__).__name__, m.size(2))
    """
    runs(tmp_path, text, "SourceFileLoader", "PatchedLoader True", "SourceFileLoader 1", **STRICT)


def test_a_reload_after_a_late_install_gets_the_fix(tmp_path: Path) -> None:
    make(tmp_path)
    text = f"""
    import importlib, os, {MODULE} as m
    os.environ["CKPT_PATCHES"] = "warn"
    from ckpt_patches.startup import install
    install()
    importlib.reload(m)
    """
    runs(tmp_path, textwrap.dedent(text) + IS_PATCHED, "True", CKPT_PATCHES="off")


def test_a_module_that_no_fix_edits_any_more_shows_its_own_lines(tmp_path: Path) -> None:
    path = make(tmp_path)
    text = f"""
    import importlib, inspect, pathlib, {MODULE} as m
    pathlib.Path({str(path)!r}).write_text("def size(shape):\\n    return 'as it is now'\\n")
    importlib.reload(m)
    print(inspect.getsource(m.size).splitlines()[-1].strip())
    """
    assert program(tmp_path, text)[1] == "return 'as it is now'"


def test_a_tree_by_another_spelling_of_its_path_shows_the_edited_lines(tmp_path: Path) -> None:
    make(tmp_path / "tree")
    (tmp_path / "beside").mkdir()
    code = f"import inspect, {MODULE} as m\nprint(m.size.__code__.co_filename == m.__file__)\n"
    code += "print(inspect.getsource(m.size).splitlines()[-1].strip())"
    done = python("-c", code, tree=tmp_path / "beside/../tree", env=STRICT)
    assert done.stdout.splitlines() == ["True", "return np.prod(shape)"]


def test_the_spec_of_an_edited_module_can_be_pickled(tmp_path: Path) -> None:
    make(tmp_path)
    code = f"import pickle, {MODULE} as m; print(type(pickle.loads(pickle.dumps(m.__spec__)).loader).__name__)"
    assert python("-c", code, tree=tmp_path).stdout.strip() == "SourceFileLoader"


# Where messages appear


def test_a_program_that_switches_all_loggers_off_gets_it_on_stderr(tmp_path: Path) -> None:
    make(tmp_path)
    text = takes(MODULE, "1") + "import logging, logging.config\nlogging.getLogger('ckpt_patches')\n"
    text += "logging.config.dictConfig({'version': 1, 'root': {'level': 'INFO', 'handlers': []}})\n"
    text += f"logging.getLogger().addHandler(logging.NullHandler())\nimport {MODULE}"
    about(program(tmp_path, text)[2], "Other")


def test_what_is_said_at_exit_is_on_stderr_whatever_became_of_logging(tmp_path: Path) -> None:
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
    about(program(tmp_path, text)[2], "by a finder in front of it")  # once: not in each child of a fork


def test_an_empty_rank_is_none(tmp_path: Path) -> None:
    make(tmp_path)
    assert "INFO" in program(tmp_path, f"import {MODULE}", RANK="")[2]


def test_other_ranks_modules_keep_their_loaders(tmp_path: Path) -> None:
    make(tmp_path)
    text = takes(MODULE, "0") + f"import {MODULE}, {LATER}, importlib.util\n"
    text += f"print(type({LATER}.__loader__).__name__, type(importlib.util.find_spec('pytest').loader).__name__)"
    for rank in ("0", "3"):
        assert program(tmp_path, text, RANK=rank)[1] == "SourceFileLoader SourceFileLoader"


def test_what_is_found_out_late_leaves_no_frame_of_ours_in_a_traceback(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "fails.py").write_text("raise KeyError('its own')\n")
    status, _, stderr = program(tmp_path, takes(MODULE, "0") + f"import {MODULE}\nimport fails")
    assert status == 1
    assert "NOT active" in stderr
    assert "ckpt_patches/hook" not in stderr.split("Traceback")[1]


# Threads, forks, locks


def test_to_find_a_module_is_all_that_happens_under_the_import_systems_lock(tmp_path: Path) -> None:
    make(tmp_path)
    text = f"""
    import sys
    before = set(sys.modules)
    finder = sys.meta_path[0]
    opened = []
    sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
    import megatron.core.dist_checkpointing as package
    del opened[:]
    spec = finder.find_spec({MODULE!r}, package.__path__)
    ours = [path for path in opened if "ckpt_patches" not in str(path) and "/lib/python" not in str(path)]
    print(type(spec.loader).__name__, ours)
    print(sorted((set(sys.modules) - before) & {{"ast", "logging", "ckpt_patches.engine.plan"}}))
    """
    status, output, stderr = program(tmp_path, text)
    assert (status, output.splitlines(), stderr) == (0, ["PatchedLoader []", "[]"], "")


FORK = f"""
import logging, os, sys, threading, time
import ckpt_patches.engine.plan
ready, real = threading.Event(), ckpt_patches.engine.plan.plan_tree
def slow(*arguments, **keywords):
    ready.set()
    time.sleep(0.5)
    return real(*arguments, **keywords)
ckpt_patches.engine.plan.plan_tree = slow
def fork():
    ready.wait()
    child = os.fork()
    if child == 0: os._exit(0)
    print("forked", os.waitpid(child, 0)[1], flush=True)
thread = threading.Thread(target=fork)
thread.start()
{IS_PATCHED}
thread.join()
"""


def test_a_fork_in_another_thread_while_a_tree_is_planned_does_not_wait_for_it(tmp_path: Path) -> None:
    """The fork, which takes logging's lock and then the import lock, does not wait; a deadlock would time out."""
    make(tmp_path)
    runs(tmp_path, FORK, "forked 0", "True")


def test_the_child_of_a_fork_while_a_tree_is_planned_collects_garbage(tmp_path: Path) -> None:
    make(tmp_path)
    text = FORK.replace("os._exit(0)", "os._exit(0 if gc.isenabled() else 9)").replace(
        "import logging", "import gc, logging"
    )
    status, output, stderr = program(tmp_path, text + "print(gc.isenabled())")
    assert (status, output.splitlines()) == (0, ["forked 0", "True", "True"]), stderr


def test_an_import_in_another_thread_does_not_wait_for_a_plan(tmp_path: Path) -> None:
    make(tmp_path)
    text = FORK.replace("    child = os.fork()\n    if child == 0: os._exit(0)\n", f"    import {LATER}\n")
    text = text.replace('print("forked", os.waitpid(child, 0)[1], flush=True)', 'print("imported", flush=True)')
    runs(tmp_path, text, "imported", "True")


def test_a_logging_handler_may_import_a_target(tmp_path: Path) -> None:
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


def test_a_logging_handler_that_fails_stops_no_import_and_hides_nothing(tmp_path: Path) -> None:
    make(tmp_path)
    text = """
    import logging
    class Fails(logging.Handler):
        def emit(self, record): raise KeyError("its own")
    logging.basicConfig(level="INFO", handlers=[Fails()])
    """
    status, output, stderr = program(tmp_path, textwrap.dedent(text) + IS_PATCHED)
    assert (status, output) == (0, "True")
    assert "training-checkpoint-patches" in stderr
    assert "KeyError in a logging handler" in stderr


def test_threads_that_meet_the_first_targets_at_once_are_all_served(tmp_path: Path) -> None:
    make_two(tmp_path)
    text = f"""
    import importlib, threading
    gate = threading.Barrier(2)
    def load(name):
        gate.wait()
        importlib.import_module(name)
    threads = [threading.Thread(target=load, args=(name,)) for name in ({MODULE!r}, {SECOND!r})]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    """
    status, output, stderr = program(tmp_path, textwrap.dedent(text) + f"{IS_PATCHED}\n{IS_PATCHED_SECOND}", **STRICT)
    assert (status, output) == (0, "True\nTrue")
    assert len(stderr.splitlines()) == 1


# Side effects in a process


LEFT = f"""
import gc, os, sys
before = dict(os.environ), gc.isenabled(), sys.excepthook
import {MODULE}
print(sorted(os.environ.keys() - before[0].keys()), gc.isenabled() == before[1], sys.excepthook is before[2])
"""


def test_what_is_left_behind_in_a_process(tmp_path: Path) -> None:
    """Only what docs/hook.md lists is left."""
    make(tmp_path)
    for rank in ("0", "3"):
        assert program(tmp_path, LEFT, RANK=rank)[1] == "[] True True"
    assert program(tmp_path, "import gc; gc.disable()\n" + LEFT)[1] == "[] True True"


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
    assert len([line for line in done.stderr.splitlines() if "INFO" in line]) == lines
