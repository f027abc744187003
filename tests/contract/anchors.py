"""Find the places in upstream's source that a fix needs, and change them one at a time."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ckpt_patches.engine import plan
from ckpt_patches.engine.plan import Outcome, plan_tree
from ckpt_patches.engine.source import Source, _is_wildcard, _parse_pattern

RENAMED = b"_renamed"


@dataclass(frozen=True)
class Change:
    """A replacement at every place of a module that one anchor of a fix matches."""

    module: str
    anchor: str  # as written in the fix
    at: tuple[tuple[int, int, bytes], ...]  # start and stop in bytes; replacement

    def applied(self, data: bytes) -> bytes:
        for start, stop, text in sorted(self.at, reverse=True):
            data = data[:start] + text + data[stop:]
        return data


class ObservedText(bytes):
    """The text of a module; records the strings that are looked up in it."""

    searched: set[bytes]

    def __contains__(self, text: object) -> bool:
        assert isinstance(text, bytes)
        self.searched.add(text)
        return super().__contains__(text)


class ObservedSource(Source):
    """A source that records the anchors of a fix.

    An anchor is optional if the fix handles its absence (`has`, `has_function`, `all`, `in source.data`).
    """

    def __init__(self, data: bytes, path: str) -> None:
        text = ObservedText(data)
        text.searched = set()
        super().__init__(text, path)
        self.searched = text.searched
        self.needed: list[tuple[str, ast.AST, list[ast.AST]]] = []  # an anchor, its pattern, and the nodes found
        self.optional: set[str] = set()
        self.named: set[str] = set()  # functions and classes that the fix looks up by name
        self._depth = 0

    def definitions(self) -> list[str]:
        """The names of the functions and classes of this module that a fix looks up or edits."""
        words = " ".join([*(name.replace(".", " ") for name in self.named), *(s.decode() for s in self.searched)])
        defined: list[ast.FunctionDef | ast.ClassDef] = [*self.all_of(ast.FunctionDef), *self.all_of(ast.ClassDef)]
        around = {
            node.name
            for node in defined
            for edit in self.edits
            if self._span(node)[0] <= edit.start and edit.stop <= self._span(node)[1]
        }
        return sorted({node.name for node in defined} & {*re.findall(r"\w+", words), *around})

    def function(self, name: str) -> Any:
        self.named.add(name)
        node = super().function(name)
        self._record(name, node, [node])
        return node

    def class_named(self, name: str) -> Any:
        self.named.add(name)
        node = super().class_named(name)
        self._record(name, node, [node])
        return node

    def one(self, pattern: str, within: ast.AST | None = None) -> Any:
        self._depth += 1
        node = super().one(pattern, within)
        self._depth -= 1
        self._record(pattern, _parse_pattern(pattern), [node])
        return node

    def some(self, pattern: str, within: ast.AST | None = None) -> list[Any]:
        self._depth += 1
        nodes = super().some(pattern, within)
        self._depth -= 1
        self._record(pattern, _parse_pattern(pattern), nodes)
        return nodes

    def branch(self, test: str, within: ast.AST | None = None) -> Any:
        node = super().branch(test, within)
        self._record(test, _parse_pattern(test), [node.test])
        return node

    def loop(self, target: str, within: ast.AST | None = None) -> Any:
        node = super().loop(target, within)
        self._record(target, _parse_pattern(target), [node.target])
        return node

    def all(self, pattern: str, within: ast.AST | None = None) -> list[Any]:
        if not self._depth:
            self.optional.add(pattern)
        return super().all(pattern, within)

    def _defines(self, name: str) -> bool:
        self.named.add(name)
        self.optional.add(name)
        self._depth += 1
        found = super()._defines(name)
        self._depth -= 1
        return found

    def _record(self, anchor: str, pattern: ast.AST, nodes: list[Any]) -> None:
        if not self._depth:
            self.needed.append((anchor, pattern, nodes))

    def is_optional(self, change: Change) -> bool:
        """Whether the fix handles the absence of the changed code."""
        before, after = bytes(self.data), change.applied(bytes(self.data))
        return (
            change.anchor in self.optional
            or any(name.startswith(f"{change.anchor}.") for name in self.optional)
            or any((text in before) != (text in after) for text in self.searched)
        )


def observed(root: str, package: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, ObservedSource]:
    """The sources of a tree by path, with the anchors that a fix looked up in them."""
    sources: dict[str, ObservedSource] = {}

    def observe(data: bytes, path: str) -> Source:
        return sources.setdefault(path, ObservedSource(data, path))

    with monkeypatch.context() as patching:
        patching.setattr(plan, "Source", observe)
        plan_tree(root, package, [fix])
    return sources


def changes(root: str, package: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> list[Change]:
    """Every change of one name or literal that a fix needs in a tree to which it applies."""
    made = plan_tree(root, package, [fix])
    assert made.results[0].outcome is Outcome.APPLIES, made.results[0]
    sources = observed(root, package, fix, monkeypatch)
    by_path = {plan.module_path(root, module): module for module in made.texts}
    found = {
        Change(by_path[path], anchor, at): one
        for path, one in sources.items()
        for anchor, pattern, nodes in one.needed
        for at in zip(*(_others(one, pattern, node) for node in nodes), strict=True)
    }
    return [change for change, one in found.items() if not one.is_optional(change)]


def _others(source: Source, pattern: ast.AST, node: ast.AST) -> Iterator[tuple[int, int, bytes]]:
    """The position of each name and literal of a pattern in a matching node, and its replacement."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and node is pattern:
        start, _ = source._span(node)
        name = re.compile(rb"(?:@.*\s+)*(?:def|class)\s+(\w+)").match(source.data, start)
        assert name, source.text(node)[:80]
        yield name.end(), name.end(), RENAMED
        return
    for part in _parts(pattern, node):
        if isinstance(part, ast.Name | ast.Attribute):
            _, stop = source._span(part)
            yield stop, stop, RENAMED
        elif isinstance(part, ast.Constant):
            yield *source._span(part), b"'other'" if isinstance(part.value, str) else b"other"


def _parts(pattern: Any, node: Any) -> Iterator[ast.AST]:
    """The nodes of an expression or statement that a pattern matches without a wildcard."""
    if _is_wildcard(pattern) or isinstance(pattern, ast.JoinedStr):
        return
    yield node
    if isinstance(pattern, ast.Call) and len(pattern.args) == 1 and _is_wildcard(pattern.args[0]):
        yield from _parts(pattern.func, node.func)
        return
    for field in pattern._fields:
        mine, found = getattr(pattern, field), getattr(node, field)
        for one, other in zip(mine, found, strict=True) if isinstance(mine, list) else [(mine, found)]:
            if isinstance(one, ast.AST):
                yield from _parts(one, other)
