"""No edited module loads a global name that it does not bind and did not load before."""

import builtins
import dis
from collections.abc import Iterator
from types import CodeType

import pytest

import upstream
from ckpt_patches.engine import names
from ckpt_patches.engine.plan import plan_tree
from ckpt_patches.engine.registry import CORE, DEEPSPEED
from ckpt_patches.engine.source import Source


def unbound(text: str, inserted: str) -> list[str]:
    """The unbound names after `inserted` is put before the module's last statement."""
    source = Source(text.encode(), "module.py")
    source.insert_before(source.tree.body[-1], inserted)
    patched = source.edited()
    return names.new_unbound_names(source, compile(patched, "module.py", "exec"))


UPSTREAM = """
import os
from json import loads as parse

if TYPE_CHECKING:
    import typed, both
else:
    import untyped

try:
    import maybe
except ImportError as error:
    maybe = None

for index in range(3):
    del index


class Box:
    size: int = 1

    def get(self):
        global made
        made = strange
        return strange


last = 1
"""


@pytest.mark.parametrize(
    "inserted",
    [
        "os.getcwd()",
        "def f(a, *b, c=os, **d):\n    e = [g for g in b if a]\n    return a, b, c, d, e, len, parse, Box, made, last",
        "import math\ndef f():\n    return math.pi",
        "def f():\n    import math\n    return math.pi",
        "class A:\n    b = 1\n    c = b\n    def d(self):\n        return __name__, __file__, super()",
        "f = lambda x: x.anything(keyword=x)",
        "untyped, maybe",
        "from typed import both\nboth",
        "import typed\ntyped",
        "def f():\n    return strange",  # loaded before, too
        "def f() -> 'unknown':\n    pass",
        "with open('x') as file:\n    [file for file in file]",
        "def outer():\n    n = 1\n    def inner():\n        nonlocal n\n        n = 2\n    return inner",
    ],
)
def test_names_that_the_module_has(inserted: str) -> None:
    assert unbound(UPSTREAM, inserted) == []


@pytest.mark.parametrize(
    ("inserted", "missing"),
    [
        ("math.pi", ["math"]),
        ("def f():\n    return [math.pi for x in range(3)]", ["math"]),
        ("class A(Base):\n    b = c", ["Base", "c"]),
        ("def f(a=unknown) -> other:\n    pass", ["other", "unknown"]),
        ("@decorate\ndef f():\n    pass", ["decorate"]),
        ("def f():\n    return typed, both", ["both", "typed"]),
        ("f = lambda: loads", ["loads"]),
        ("def f():\n    return index", ["index"]),
        ("def f():\n    def g():\n        return json.loads\n    return g", ["json"]),
    ],
)
def test_names_that_it_does_not_have(inserted: str, missing: list[str]) -> None:
    assert unbound(UPSTREAM, inserted) == missing


def test_a_name_is_missing_whose_binding_was_taken_out() -> None:
    source = Source(b"import os\nimport sys\nprint(sys.path)\n", "module.py")
    source.remove(source.tree.body[1])
    patched = source.edited()
    assert names.new_unbound_names(source, compile(patched, "module.py", "exec")) == ["sys"]


def test_a_local_that_becomes_global_is_missing() -> None:
    source = Source(b"def f():\n    world = 1\n    return world\n", "module.py")
    source.replace(source.one("world = 1"), "pass")
    patched = source.edited()
    assert names.new_unbound_names(source, compile(patched, "module.py", "exec")) == ["world"]


def by_dis(code: CodeType) -> Iterator[tuple[str, str]]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in names._NAMES.values():
            yield instruction.opname, instruction.argval


@pytest.mark.long
@pytest.mark.parametrize(
    ("distribution", "version", "package"), [("megatron-core", "0.16.1", CORE), ("deepspeed", "0.12.6", DEEPSPEED)]
)
def test_the_instructions_are_those_that_dis_finds(distribution: str, version: str, package: str) -> None:
    """Both agree in complete modules, with extended arguments and each Python's additions."""
    made = plan_tree(str(upstream.tree(distribution, version)), package)
    assert made.files
    for file in made.files.values():
        for code in names._codes(file.code):
            assert list(names._name_instructions(code)) == list(by_dis(code))


def test_more_names_than_fit_into_one_argument() -> None:
    text = "\n".join(f"def f_{i}(): return g_{i}" for i in range(700))
    code = compile(f"{text}\n" + "\n".join(f"h_{i} = g_{i}" for i in range(700)), "module.py", "exec")
    loaded, bound = names._loaded_and_bound(code, {name for each in names._codes(code) for name in each.co_names})
    assert loaded == {f"g_{i}" for i in range(700)}
    assert set(bound) == {f"{letter}_{i}" for letter in "fh" for i in range(700)}
    assert not loaded & set(dir(builtins))
