"""Find global names that a compiled module loads but never binds. An edit must not add such a name.

The names are read from the bytecode, where Python has already resolved local names; a walk of the syntax tree would
take as long as parsing it. Instructions: https://docs.python.org/3/library/dis.html; a test compares with `dis`.
"""

import ast
import builtins
import opcode
import re
import sys
from collections import Counter
from collections.abc import Iterator, Set
from types import CodeType

from ckpt_patches.engine.source import Source, imported_names

_EXTENDED_ARG = opcode.opmap["EXTENDED_ARG"]
_LOAD_GLOBAL = opcode.opmap["LOAD_GLOBAL"]
# Since 3.11 the lowest bit of its argument is a flag: whether to push a null as well.
_GLOBAL_SHIFT = 1 if sys.version_info >= (3, 11) else 0
_NAMES = {
    opcode.opmap[name]: name
    for name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "STORE_NAME", "DELETE_NAME")
    if name in opcode.opmap
}
# Names that every module has.
_OF_EVERY_MODULE = {*dir(builtins), "__file__", "__cached__", "__path__", "__annotations__"}


def new_unbound_names(source: Source, code: CodeType) -> list[str]:
    """The global names that an edited module loads and does not bind, unless this was so before the edits.

    Args:
        source: the module with its edits.
        code: the edited text, compiled.
    """
    touched = {name for text in _touched(source) for name in re.findall(r"[^\W\d]\w*", text)} - _OF_EVERY_MODULE
    unbound = _unbound(source, code, touched)
    if unbound:  # perhaps upstream's own, from `import *` or by mistake
        unbound -= _unbound(source, compile(source.data, source.path, "exec", dont_inherit=True), unbound)
    return sorted(unbound)


def _unbound(source: Source, code: CodeType, names: Set[str]) -> Set[str]:
    """The subset of `names` that a module looks up and does not bind.

    A name bound by `except … as` in the module counts as bound; a name imported only for type checkers does not.
    """
    loaded, bound = _loaded_and_bound(code, names)
    if b"TYPE_CHECKING" in source.data:
        bound.subtract(_bound_for_type_checkers(source.tree))
    return {name for name in loaded if bound[name] <= 0}


def _touched(source: Source) -> Iterator[str]:
    """The inserted and the removed texts: only these can change what a name is bound to."""
    for edit in source.edits:
        yield edit.text.decode()
        yield source.data[edit.start : edit.stop].decode()


def _loaded_and_bound(module: CodeType, names: Set[str]) -> tuple[set[str], Counter[str]]:
    """The subset of `names` that a module's code, functions and classes look up as globals, and how often the module
    binds each."""
    loaded: set[str] = set()
    bound: Counter[str] = Counter()
    for code in _codes(module):
        own: set[str] = set()  # names that a class body binds
        for instruction, name in () if names.isdisjoint(code.co_names) else _name_instructions(code):
            if instruction == "STORE_GLOBAL" or (code is module and instruction == "STORE_NAME"):
                bound[name] += 1
            elif code is module and instruction == "DELETE_NAME":
                bound[name] -= 1
            elif instruction == "STORE_NAME":
                own.add(name)
            elif instruction.startswith("LOAD") and name not in own:
                loaded.add(name)
    return loaded & names, bound


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _name_instructions(code: CodeType) -> Iterator[tuple[str, str]]:
    """Each instruction on a name that is not local to a function, and the name."""
    high = 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        if operation == _EXTENDED_ARG:
            high = (high | low) << 8
            continue
        if operation in _NAMES:
            index = (high | low) >> (_GLOBAL_SHIFT if operation == _LOAD_GLOBAL else 0)
            yield _NAMES[operation], code.co_names[index]
        high = 0


def _bound_for_type_checkers(tree: ast.Module) -> Counter[str]:
    """How often a module binds each name in an import under `if TYPE_CHECKING:`, which never runs."""
    blocks = (node for node in tree.body if isinstance(node, ast.If) and _is_type_checking(node.test))
    imports = (node for block in blocks for statement in block.body for node in ast.walk(statement))
    return Counter(imported_names(imports))


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"
