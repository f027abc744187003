"""The layers of the code import only layers below them, and no two modules import each other."""

import ast
from collections.abc import Iterator
from pathlib import Path

from upstream import REPOSITORY

# By module prefix, which names the layer: the other layers that it may import.
COMMON = {"ckpt_patches", "ckpt_patches.errors", "ckpt_patches.runtime"}
ROOMS = {
    "ckpt_patches.runtime": {"ckpt_patches", "ckpt_patches.errors"},
    "ckpt_patches.engine": COMMON,
    "ckpt_patches.formats": COMMON,
    "ckpt_patches.hook": COMMON | {"ckpt_patches.engine", "ckpt_patches.inplace"},
    "ckpt_patches.inplace": COMMON | {"ckpt_patches.engine"},
    "ckpt_patches.fingerprint": COMMON | {"ckpt_patches.formats"},
    "ckpt_patches.convert": COMMON
    | {"ckpt_patches.formats", "ckpt_patches.fingerprint", "ckpt_patches.engine.installed"}
    | {"ckpt_patches.engine.registry", "ckpt_patches.engine.releases"},
    "ckpt_patches.audit": COMMON | {"ckpt_patches.formats", "ckpt_patches.fingerprint", "ckpt_patches.convert"},
    "ckpt_patches.migrate": COMMON | {"ckpt_patches.formats", "ckpt_patches.audit"},
    "deepspeed_patches.ds_to_universal": {"ckpt_patches.convert"},
    "deepspeed_patches.universal_converter": {"ckpt_patches.engine", "ckpt_patches.convert"},  # its text imports it
    "deepspeed_patches": {"ckpt_patches.engine"},
    "megatron.patches": {"ckpt_patches.engine"},
    "nvrx_patches": {"ckpt_patches.engine"},
    "apex_patches": {"ckpt_patches.engine"},
    "torch_patches": {"ckpt_patches.engine"},
}
# The entry points import all layers. No layer imports them, except the package itself, which is always loaded.
CLI = "ckpt_patches.cli"
ENTRANCES = ("ckpt_patches", "ckpt_patches.__main__", "ckpt_patches.api", "ckpt_patches.startup")
FOLDERS = ("ckpt_patches", "deepspeed_patches", "megatron/patches", "nvrx_patches", "apex_patches", "torch_patches")


def modules() -> dict[str, Path]:
    paths = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py")]
    named = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path for path in paths}
    return {
        name.removesuffix(".__init__"): path for name, path in named.items() if "upstream_tests" not in name.split(".")
    }


MODULES = modules()


def imported(path: Path) -> set[str]:
    """The project's modules that a module imports, also in functions, but not for type checkers only."""
    found = set()
    for node in _nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in MODULES else str(node.module) for name in full}
    return {name for name in found if name in MODULES}


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module, except those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.If) or ast.unparse(child.test) != "TYPE_CHECKING":
            yield child
            yield from _nodes(child)


def room(name: str) -> str:
    return next((room for room in ROOMS if name == room or name.startswith(f"{room}.")), "")


def test_a_room_knows_the_rooms_below_it_and_none_above() -> None:
    violations = []
    for name, path in MODULES.items():
        if name in ENTRANCES or name.startswith(CLI):
            continue
        own = room(name)
        allowed = ROOMS[own] if own else COMMON
        others = {other for other in imported(path) if room(other) != own or not own}
        violations += [f"{name}: {o}" for o in others if o not in allowed and room(o) not in allowed]
    assert violations == []


def test_no_two_modules_know_each_other() -> None:
    """No cycle of imports exists. The package itself is left out: it imports the layers when needed."""
    package = {"ckpt_patches"}
    graph = {name: imported(path) - package for name, path in MODULES.items() if name not in package}
    done: set[str] = set()
    while ready := {name for name, needs in graph.items() if name not in done and needs <= done | {name}}:
        done |= ready
    assert graph.keys() - done == set()
