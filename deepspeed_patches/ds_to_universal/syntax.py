"""What a module says, whatever its quotes, line breaks and comments are: the names that it uses, and a digest of it."""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

LENGTH = 12  # hexadecimal digits of a digest


@dataclass(frozen=True)
class Facts:
    """Of a module."""

    functions: frozenset[str]  # that it defines, methods included
    used: frozenset[str]  # names and attributes; one that is imported only is not
    strings: frozenset[str]  # constants, and constant parts of f-strings
    digest: str  # of the syntax tree but for docstrings; the same in every Python


def read(text: str | bytes) -> Facts:
    """Raises SyntaxError or ValueError where this is no module for this Python."""
    tree = ast.parse(text)
    nodes = list(_nodes(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return Facts(
        functions=frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef)),
        used=frozenset(names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}),
        strings=frozenset(value for value in constants if isinstance(value, str)),
        digest=shortened("\n".join(_tokens(tree)).encode()),
    )


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that do something: no docstrings."""
    left = [tree]
    while left:
        node = left.pop()
        if not _is_docstring(node):
            yield node
            left += ast.iter_child_nodes(node)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def shortened(data: bytes) -> str:
    """A digest of some bytes, as long as it has to be to tell releases apart."""
    return hashlib.sha256(data).hexdigest()[:LENGTH]


def _tokens(tree: ast.AST) -> list[str]:
    """The tree in one order. Fields that are empty are left out: a newer Python has more of them."""
    tokens: list[str] = []
    left: list[object] = [tree]
    while left:
        value = left.pop()
        if isinstance(value, ast.AST):
            if _is_docstring(value):
                continue
            fields = [(name, field) for name, field in ast.iter_fields(value) if field is not None and field != []]
            tokens.append(type(value).__name__)
            for name, field in reversed(fields):
                left += [field, _Field(name)]
        elif isinstance(value, list):
            tokens.append(str(len(value)))
            left += reversed(value)
        else:
            tokens.append(str(value) if isinstance(value, _Field) else repr(value))
    return tokens


class _Field(str):
    """A field's name, and not a value."""
