"""Find the fixes: each is one file in a folder of fixes, and names the upstream modules that it edits.

The files are parsed, not imported. A wheel stores the result as `index.py`, so that no process of a job parses them.
`setup.py` runs this file alone, before it can import any other module of the project.

In a checkout it runs while Python's import lock is held, so it imports only modules that are part of the interpreter.
"""

import _ast
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# By the fix's name: the modules that it edits or reads, all in one upstream package.
Modules = dict[str, tuple[str, ...]]
STATED = ("concerns", "depends_on", "switch")  # the arguments of Fix that are read


def find_fixes(folders: "Iterable[str]") -> tuple[Modules, dict[str, Modules]]:
    """The fixes in the order of application, and the other edits by their switch.

    A fix follows its dependencies; otherwise the order is by folder, then alphabetical by name.
    """
    fixes: Modules = {}
    switched: dict[str, Modules] = {}
    for folder in folders:
        read = {
            file.removesuffix(".py"): _read(os.path.join(folder, file))
            for file in sorted(os.listdir(folder))
            if file.endswith(".py")
        }
        found = {name: definition for name, definition in read.items() if definition}

        def add(name: str, found: dict[str, _Definition] = found) -> None:
            for other in found[name].depends_on:
                add(other)
            fixes[name] = found[name].modules

        for name, definition in found.items():
            if definition.switch:
                switched.setdefault(definition.switch, {})[name] = definition.modules
            elif name not in fixes:
                add(name)
    return fixes, switched


def index_text(folders: "Iterable[str]") -> str:
    """The text of a wheel's `index.py`."""
    fixes, switched = find_fixes(folders)
    heading = '"""Made by setup.py from the files of the fixes."""\n\n'
    return f"{heading}FIXES = {fixes!r}\nSWITCHED = {switched!r}\n"


class _Definition:
    """The arguments that a fix's file states, as literals or as names of its own constants."""

    def __init__(self, modules: tuple[str, ...], depends_on: tuple[str, ...], switch: str) -> None:
        self.modules = modules
        self.depends_on = depends_on
        self.switch = switch


def _read(path: str) -> _Definition | None:
    """The definition in a fix's file; None if the file defines no `fix`."""
    with open(path, encoding="utf-8") as file:
        tree = compile(file.read(), path, "exec", _ast.PyCF_ONLY_AST)
    assert isinstance(tree, _ast.Module)
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, _ast.Assign)
        for target in node.targets
        if isinstance(target, _ast.Name)
    }
    if "fix" not in constants:
        return None
    call = constants["fix"]
    if not isinstance(call, _ast.Call):
        raise ValueError(f"{path}: expected `fix = Fix(...)`")
    stated = {keyword.arg: _strings(keyword.value, constants) for keyword in call.keywords if keyword.arg in STATED}
    edited = [module for argument in _edit_arguments(tree) for module in _strings(argument, constants)]
    # A package's `__init__` is not a module name that an import uses.
    concerned = [module for module in stated.get("concerns", ()) if not module.endswith(".__init__")]
    return _Definition(
        modules=tuple(dict.fromkeys((*edited, *concerned))),
        depends_on=stated.get("depends_on", ()),
        switch="".join(stated.get("switch", ())),
    )


def _edit_arguments(tree: "_ast.Module") -> list[_ast.expr]:
    """The module arguments of each `@fix.edit(...)`, in order."""
    decorators = [each for node in tree.body if isinstance(node, _ast.FunctionDef) for each in node.decorator_list]
    return [
        argument
        for each in decorators
        if isinstance(each, _ast.Call) and isinstance(each.func, _ast.Attribute) and each.func.attr == "edit"
        for argument in each.args
    ]


def _strings(node: _ast.expr, constants: "Mapping[str, _ast.expr]") -> tuple[str, ...]:
    """The values of an expression that is a string, a tuple of strings or a constant's name."""
    if isinstance(node, _ast.Starred):
        return _strings(node.value, constants)
    if isinstance(node, _ast.Name):
        return _strings(constants[node.id], constants)
    if isinstance(node, _ast.Tuple):
        return tuple(string for each in node.elts for string in _strings(each, constants))
    if isinstance(node, _ast.Constant) and isinstance(node.value, str):
        return (node.value,)
    found = type(node).__name__
    raise ValueError(f"line {node.lineno}: expected a string, a tuple of strings or a constant's name, found {found}")
