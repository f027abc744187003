"""Source text of an upstream module: anchors are found in its syntax tree, edits are made in its text.

Everything outside an edit stays byte-identical: line endings, quotes, comments, a byte order mark. Anchors are written
as Python (`source.one('zarr.create(...)', within=function)`) and compared as syntax, so quotes, spacing and line breaks
of a release do not matter.
"""

import ast
import bisect
import builtins
import codecs
import difflib
import functools
import itertools
import re
import textwrap
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from io import BytesIO
from typing import Any, NamedTuple, TypeVar

COLUMNS = 100  # maximum line length of upstream
SHOWN = 80  # characters of a line in a message
LIKE = 0.4  # difflib's ratio of a line that may have been an anchor
Function = ast.FunctionDef
Ranges = tuple[tuple[str, str], ...]  # the first and the last release of each range
# Of a fix's code: a pattern, a pattern and the node that it is in, an inserted function, or whether it is there.
Part = str | tuple[str, ast.AST] | Callable[..., Any] | bool
NodeT = TypeVar("NodeT", bound=ast.AST)


class NoMatch(Exception):
    """The code that a fix is for is not there, or is another one. The stated releases decide what that means.

    `near` adds to the message what may have been meant; it is called only if somebody reads the message.
    """

    def __init__(self, text: str, near: Callable[[], str] = str) -> None:
        super().__init__(text)
        self.text = text
        self.near = near

    def __str__(self) -> str:
        return f"{self.text}{self.near()}"


class NotNeeded(Exception):
    """The source shows that it does not need the fix: it has the fix's code, or upstream's own."""


class UnreadableSource(NoMatch):
    """The file cannot be edited at all: it is unreadable or not UTF-8, or does not parse with this Python."""


class TextEdit(NamedTuple):
    """Replace the bytes [start, stop) of the file with `text`."""

    start: int
    stop: int
    text: bytes
    fix: str


def _same(pattern: Any, node: Any) -> bool:
    """Whether two syntax trees are equal; in the pattern, `...` matches any expression or any arguments."""
    if _is_wildcard(pattern):
        return isinstance(node, ast.expr)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and len(pattern.args) == 1 and _is_wildcard(pattern.args[0]):
        return _same(pattern.func, node.func)
    if isinstance(pattern, ast.AST):
        for field in reversed(pattern._fields):  # the last name of `a.b.c` first: most nodes differ there
            if field not in ("ctx", "kind", "type_comment") and not _same(
                getattr(pattern, field), getattr(node, field, None)
            ):
                return False
        return True
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(map(_same, pattern, node))
    return bool(pattern == node)


def _is_wildcard(pattern: Any) -> bool:
    return isinstance(pattern, ast.Constant) and pattern.value is ...


def _children(node: ast.AST) -> list[ast.AST]:
    """As `ast.iter_child_nodes`, without the `ctx` of variables, in half the time."""
    found: list[ast.AST] = []
    for field in node._fields:
        value = getattr(node, field, None)
        if isinstance(value, list):
            found += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
            found.append(value)
    return found


def _walk(root: ast.AST, kind: type[NodeT], lines: Sequence[int]) -> list[NodeT]:
    """The nodes of a kind on any of these lines, which are in order.

    What is on none of them is not walked: that would take longer than all else, in every process of a job.
    """
    nodes = [root]
    for node in nodes:  # the list grows meanwhile
        nodes += [child for child in _children(node) if not child._attributes or _is_on(child, lines)]
    return [node for node in nodes if isinstance(node, kind)]


def _is_on(node: Any, lines: Sequence[int]) -> bool:
    """Whether a node, or a decorator of it, is on one of these lines, which are in order."""
    decorators = getattr(node, "decorator_list", None)
    first = min(node.lineno, decorators[0].lineno) if decorators else node.lineno
    at = bisect.bisect_left(lines, first)
    return at < len(lines) and lines[at] <= node.end_lineno


@functools.cache
def _parse_pattern(pattern: str) -> tuple[ast.AST, tuple[bytes, ...]]:
    """The syntax of a pattern, and the names in it, without those in strings."""
    (statement,) = ast.parse(textwrap.dedent(pattern).strip()).body
    wanted = statement.value if isinstance(statement, ast.Expr) else statement
    names = [getattr(node, field, None) for node in ast.walk(wanted) for field in ("id", "attr", "arg", "name")]
    return wanted, tuple(
        name.encode() for name in dict.fromkeys(names) if isinstance(name, str) and name.isidentifier()
    )


class Source:
    """One upstream file and the edits that fixes have requested.

    `data` is the content of the file on disk. `is_expected` says whether code that these releases have must be there.
    """

    def __init__(self, data: bytes, path: str, is_expected: Callable[[Ranges], bool] = bool) -> None:
        self.data = data
        self.path = path
        self.is_expected = is_expected
        self.edits: list[TextEdit] = []
        self.fix = ""  # that requests edits now
        self._tree: ast.Module | None = None
        self._nodes: dict[ast.AST, dict[type[ast.AST], list[Any]]] = {}

    @property
    def tree(self) -> ast.Module:
        """The syntax tree, parsed once.

        Raises:
            UnreadableSource: the file is not UTF-8, or does not parse with this Python.
        """
        if self._tree is None:
            self._check_encoding()
            try:
                self._tree = ast.parse(self.data, self.path)
            except (SyntaxError, ValueError) as error:
                line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
                raise UnreadableSource(f"it does not parse with this Python: {error.args[0]}{line}") from error
        return self._tree

    def _check_encoding(self) -> None:
        try:
            declared, _ = tokenize.detect_encoding(BytesIO(self.data).readline)
            self.data.decode("utf-8")
        except (SyntaxError, UnicodeDecodeError) as error:
            raise UnreadableSource(f"expected UTF-8: {error}") from error
        if declared not in ("utf-8", "utf-8-sig"):
            raise UnreadableSource(f"expected UTF-8, found a file declared as {declared}")

    # Anchors

    def function(self, name: str) -> Function:
        """The only function of that name; a method is `Class.method`. Raises NoMatch."""
        near = functools.partial(self._near_definition, name)
        if not all(part.encode() in self.data for part in name.split(".")):  # before the file is parsed
            raise NoMatch(f"expected one definition of {name}, found 0", near)
        found: ast.AST = self.tree
        for part in name.split("."):
            body: list[ast.stmt] = getattr(found, "body", [])
            named = [s for s in body if isinstance(s, ast.FunctionDef | ast.ClassDef) and s.name == part]
            if len(named) != 1:
                raise NoMatch(f"expected one definition of {name}, found {len(named)}", near)
            found = named[0]
        if not isinstance(found, ast.FunctionDef):
            raise NoMatch(f"expected {name} to be a function, found a class")
        return found

    def function_of(self, name: str, *releases: tuple[str, str]) -> Function | None:
        """The function that these releases have; None in others that lack it.

        Raises:
            NoMatch: it is absent in one of them.
        """
        return self.function(name) if self.has_function(name) or self.is_expected(releases) else None

    def class_named(self, name: str) -> ast.ClassDef:
        """The only top-level class of that name. Raises NoMatch."""
        found = [node for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        return self._only(found, f"class {name}")

    def has_function(self, name: str) -> bool:
        """Whether that function or method is defined exactly once."""
        try:
            self.function(name)
        except NoMatch:
            return False
        return True

    def all(self, pattern: str, within: ast.AST | None = None) -> list[Any]:
        """Every node equal to the pattern, in text order. `...` is any expression, `f(...)` any call of f."""
        wanted, _ = _parse_pattern(pattern)
        found = [node for node in self.all_of(type(wanted), within, having=pattern) if _same(wanted, node)]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))

    def _lines_with(self, names: Sequence[bytes], within: ast.AST | None) -> list[int]:
        """The lines of a node that have the rarest of these names, in order; none if the node lacks one of them."""
        start, stop = (0, len(self.data)) if within is None or within is self._tree else self._span(within)
        counts = {name: self.data.count(name, start, stop) for name in names}
        rarest = min(counts, key=counts.__getitem__)
        lines, at = list[int](), start - 1
        for _ in range(counts[rarest]):
            at = self.data.index(rarest, at + 1, stop)
            lines.append(bisect.bisect_right(self._lines, at))
        return lines

    def one(self, pattern: str, within: ast.AST | None = None) -> Any:
        """The only node equal to the pattern. Raises NoMatch unless there is exactly one."""
        return self._only(self.all(pattern, within), pattern, within)

    def _only(self, found: Sequence[NodeT], shown: str, within: ast.AST | None = None) -> NodeT:
        """The only node that was found. Raises NoMatch, which says what is there instead of the code that is shown."""
        if len(found) != 1:
            where = f" in {within.name}" if isinstance(within, ast.FunctionDef | ast.ClassDef) else ""
            near = functools.partial(self._near, shown, within, found)
            raise NoMatch(f"expected `{_short(shown)}` once{where}, found it {len(found)} times", near)
        return found[0]

    def _near_definition(self, name: str) -> str:
        """For a message: the line of the function with the most similar name."""
        return self._near(f"def {name.rpartition('.')[2]}(self):", None, [])

    def _near(self, pattern: str, within: ast.AST | None, found: Sequence[Any]) -> str:
        """For a message: the lines of what was found, or the line that is most like the pattern."""
        if found:
            return f" (lines {', '.join(str(node.lineno) for node in found[:5])})"
        first, last = getattr(within, "lineno", 1), getattr(within, "end_lineno", None)
        lines = [line.decode(errors="replace").strip() for line in self.data.splitlines()[first - 1 : last]]
        near = difflib.get_close_matches(pattern.strip().splitlines()[0], lines, n=1, cutoff=LIKE)
        return f"; most like it is line {first + lines.index(near[0])}: `{_short(near[0])}`" if near else ""

    def all_of(self, kind: type[NodeT], within: ast.AST | None = None, *, having: str = "") -> list[NodeT]:
        """Every node of a kind, such as `ast.For`; with `having`, of those that can have this pattern in them."""
        if having and (names := _parse_pattern(having)[1]):
            lines = self._lines_with(names, within)
            return _walk(within or self.tree, kind, lines) if lines else []
        root = within or self.tree
        if root not in self._nodes:
            nodes, self._nodes[root] = [root], {}
            for node in nodes:  # the list grows meanwhile
                nodes += _children(node)
                self._nodes[root].setdefault(type(node), []).append(node)
        return list(self._nodes[root].get(kind, []))

    def some(self, pattern: str, within: ast.AST | None = None) -> list[Any]:
        """Every node equal to the pattern, at least one. Raises NoMatch."""
        return self.all(pattern, within) or [self.one(pattern, within)]

    def branch(self, test: str, within: ast.AST | None = None) -> ast.If:
        """The only `if` with that test. Raises NoMatch."""
        return self._one_with(ast.If, "test", test, within, f"if {test}")

    def branch_around(self, pattern: str, within: ast.AST | None = None) -> ast.If:
        """The only `if` that has this code in its body, not just in its `else`. Raises NoMatch."""
        branches = self.all_of(ast.If, within, having=pattern)
        found = [branch for branch in branches if any(self.has(pattern, line) for line in branch.body)]
        return self._only(found, f"if ...: {pattern}", within)

    def loop(self, target: str, within: ast.AST | None = None) -> ast.For:
        """The only `for` with that target. Raises NoMatch."""
        return self._one_with(ast.For, "target", target, within, f"for {target} in ...")

    def _one_with(self, kind: type[NodeT], field: str, pattern: str, within: ast.AST | None, shown: str) -> NodeT:
        """The only node of a kind whose field equals the pattern."""
        wanted, _ = _parse_pattern(pattern)
        found = [node for node in self.all_of(kind, within, having=pattern) if _same(wanted, getattr(node, field))]
        return self._only(found, shown, within)

    def text(self, node: ast.AST) -> str:
        """The source text of a node, as in the file."""
        start, stop = self._span(node)
        return self.data[start:stop].decode()

    def imports(self, name: str) -> bool:
        """Whether an import statement at module level, outside blocks and functions, binds that name."""
        return name in imported_names(self.tree.body)

    def skip_if(self, *parts: Part, within: ast.AST | None = None) -> None:
        """Recognize the fix's own code: patterns in `within`, or each with the node that it is in, functions, and
        whether a part that is no such thing is there.

        Raises:
            NotNeeded: all of them are there.
            NoMatch: some are: with the rest, this unknown code would become something untested.
        """
        there = [self._has_part(part, within) for part in parts]
        if all(there):
            raise NotNeeded
        if any(there):
            has, lacks = (_shown(parts[there.index(value)]) for value in (True, False))
            raise NoMatch(f"a part of this fix is there already ({has}), missing: {lacks}")

    def _has_part(self, part: Part, within: ast.AST | None) -> bool:
        if isinstance(part, bool):
            return part
        if callable(part):
            named = [node for node in self.all_of(ast.FunctionDef, having=part.__name__) if node.name == part.__name__]
            own = _logic(ast.parse(self.definition(part)).body[0]) if named else ""
            if named and own not in map(_logic, named):
                raise NoMatch(f"expected {part.__name__} as this fix has it, or none; found another one")
            return bool(named)
        return self.has(part, within) if isinstance(part, str) else self.has(*part)

    def has(self, pattern: str, within: ast.AST | None = None) -> bool:
        """Whether any node is equal to the pattern."""
        return bool(self.all(pattern, within))

    def first_there(self, *patterns: str, within: ast.AST | None = None) -> str:
        """The first pattern that occurs, of the forms in several releases; else the first one, for `one` to report."""
        return next((pattern for pattern in patterns if self.has(pattern, within)), patterns[0])

    # Edits

    def replace(self, node: ast.AST, text: str) -> None:
        """Replace a node with `text` (one expression, or statements without indentation)."""
        start, stop = self._span(node)
        if isinstance(node, ast.stmt):
            self._check_begins_line(node)
            self._end_of_line(node)
        self._edit(start, stop, self._indented(text, self._indent(node)))

    def replace_from_to(self, first: ast.stmt, last: ast.stmt, text: str, *, about: str = "") -> None:
        """Replace the statements from `first` to `last` of one block with statements, written without indentation.

        Also removes the comments between them, and the comment above them if it contains the word `about`. Raises
        NoMatch unless the statements are on lines of their own.
        """
        self._check_begins_line(first)
        self._end_of_line(last)
        start = self._comment_above(first, about) if about else self._span(first)[0]
        self._edit(start, self._span(last)[1], self._indented(text, self._indent(first)))

    def _comment_above(self, statement: ast.stmt, word: str) -> int:
        """The offset of the comment above a statement if it contains this word; else the offset of the statement."""
        lines = [self.data[low:high].strip() for low, high in itertools.pairwise(self._lines[: statement.lineno])]
        while lines and not lines[-1]:
            lines.pop()
        comment = list(itertools.takewhile(lambda line: line.startswith(b"#"), reversed(lines)))
        if not any(word.encode() in line for line in comment):
            return self._span(statement)[0]
        return self._lines[len(lines) - len(comment)] + len(self._indent(statement))

    def remove(self, statement: ast.stmt) -> None:
        """Remove a statement, the line breaks before it and a comment on its line. A comment above it stays.

        Raises NoMatch unless the statement is on lines of its own.
        """
        start, _ = self._span(statement)
        self._check_begins_line(statement)
        self._edit(len(self.data[:start].rstrip()), self._end_of_line(statement), "")

    def remove_comment_above(self, statement: ast.stmt, about: str) -> None:
        """Remove the comment above a statement, starting at the line that contains `about`, if one does.

        Raises NoMatch unless the statement begins its line.
        """
        self._check_begins_line(statement)
        start, stop = self._comment_above(statement, about), self._span(statement)[0]
        named = self.data.find(about.encode(), start, stop)
        if named >= 0:
            self._edit(self.data.rindex(b"#", start, named), stop, "")

    def insert_before(self, statement: ast.stmt | ast.expr, text: str) -> None:
        """Insert statements, written without indentation, before a statement (or an expression that is one).

        Raises NoMatch unless it begins its line: after `if a:` on the same line, it would no longer be under the `if`.
        """
        start, _ = self._span(statement)
        self._check_begins_line(statement)
        self._edit(
            start, start, self._indented(text, self._indent(statement)) + self._newline + self._indent(statement)
        )

    def insert_after(self, statement: ast.stmt | ast.expr, text: str) -> None:
        """Insert statements, written without indentation, after a statement and the comment on its last line.

        Raises NoMatch unless the statement is on lines of its own.
        """
        self._check_begins_line(statement)
        stop = self._end_of_line(statement)
        indent = self._indent(statement)
        self._edit(stop, stop, self._newline + indent + self._indented(text, indent))

    def insert_at_start(self, function: Function, text: str) -> None:
        """Insert statements, written without indentation, at the start of a function, after its docstring."""
        if ast.get_docstring(function) is None:
            self.insert_before(function.body[0], text)
        else:
            self.insert_after(function.body[0], text)

    def insert_at(self, node: ast.AST, text: str, *, end: bool = False) -> None:
        """Insert text directly before a node, or with `end` directly after it."""
        position = self._span(node)[1 if end else 0]
        self._edit(position, position, text)

    def insert_import(self, text: str) -> None:
        """Insert an import statement after the last one at module level."""
        imports = [node for node in self.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        if not imports:
            raise NoMatch("expected an import statement, found none")
        self.insert_after(imports[-1], text)

    def decorate(self, function: Function, text: str) -> None:
        """Insert a decorator as the outermost one."""
        self._check_begins_line(function)
        first = self._lines[min([node.lineno for node in function.decorator_list], default=function.lineno) - 1]
        self._edit(first, first, self._indent(function) + text + self._newline)

    def insert_method_before(self, method: ast.stmt, function: Callable[..., Any]) -> None:
        """Insert the source text of a method in a fix's file before an upstream method."""
        owner = next(node for node in self.tree.body if isinstance(node, ast.ClassDef) and method in node.body)
        self._check_undefined(function, owner.body)
        self._insert_definition_before(method, function, blank_lines=1)

    def insert_function_before(self, statement: ast.stmt, function: Callable[..., Any]) -> None:
        """Insert the source text of a function in a fix's file before a function or class of a module."""
        self._check_undefined(function, self.tree.body)
        self._insert_definition_before(statement, function, blank_lines=2)

    def _insert_definition_before(self, other: ast.stmt, function: Callable[..., Any], blank_lines: int) -> None:
        first = (getattr(other, "decorator_list", None) or [other])[0]
        line_start = self._lines[first.lineno - 1]
        indent = self._indent(other)
        text = indent + self._indented(self.definition(function, len(indent)), indent)
        text += self._newline * (1 + blank_lines)
        self._edit(line_start, line_start, text)

    def _check_undefined(self, function: Callable[..., Any], body: Sequence[ast.stmt]) -> None:
        """Raise NoMatch if a module or class has a function of that name, perhaps of another version of the fix."""
        name = function.__name__
        if any(isinstance(node, ast.FunctionDef) and node.name == name for node in body):
            raise NoMatch(f"expected no {name} yet, found one without what calls it in this fix")

    def definition(self, function: Callable[..., Any], indent: int = 0) -> str:
        """The text of a function in a fix's file, unindented, in the form for this module at that indentation."""
        return joined_headers(with_annotations(function_text(function), self._names), COLUMNS - indent)

    @functools.cached_property
    def _names(self) -> set[str]:
        """The names that annotations of inserted functions can use."""
        return {*dir(builtins), *imported_names(self.tree.body)}

    def add_keyword(self, call: ast.Call, name: str, value: str) -> None:
        """Add a keyword argument after a call's last argument, in the call's own layout."""
        last = max([*call.args, *[k.value for k in call.keywords]], key=lambda n: self._span(n)[1])
        if last.lineno == call.lineno:
            self.insert_at(last, f", {name}={value}", end=True)
            return
        indent = self._line_indent(last.lineno)
        self.insert_at(last, f",{self._newline}{indent}{self._indented(f'{name}={value}', indent)}", end=True)

    def add_parameter(self, function: Function, text: str) -> None:
        """Add a parameter (`name: type = default`) after the last one. Raises NoMatch unless all of them are plain."""
        arguments = function.args
        if not arguments.args or arguments.vararg or arguments.kwonlyargs or arguments.kwarg:
            raise NoMatch(f"expected {function.name} to have plain parameters only")
        last = [*arguments.args, *arguments.defaults]
        self.insert_at(max(last, key=lambda node: self._span(node)[1]), f", {text}", end=True)

    def edited(self) -> bytes:
        """The text with all edits."""
        parts, position = [], 0
        for edit in sorted(self.edits, key=lambda e: (e.start, e.stop)):
            parts += [self.data[position : edit.start], edit.text]
            position = edit.stop
        return b"".join([*parts, self.data[position:]])

    def functions_of(self, fix: str) -> list[str]:
        """The functions and methods (`Class.name`) of the module that a fix edits or adds."""
        found: dict[str, None] = {}
        for edit in (edit for edit in self.edits if edit.fix == fix):
            inside = [name for start, stop, name in self._functions if start <= edit.start and edit.stop <= stop]
            before = [(start, name) for start, _, name in self._functions if start == edit.start == edit.stop]
            brought = re.match(r"(?:@.*\s+)*def (\w+)", edit.text.decode().lstrip())
            if brought and edit.start == edit.stop and (before or not inside):
                owner = before[0][1].rpartition(".")[0] if before else ""
                found[f"{owner}.{brought[1]}".lstrip(".")] = None
            elif inside:
                found[inside[0]] = None
        return list(found)

    @functools.cached_property
    def _functions(self) -> list[tuple[int, int, str]]:
        """The start, with decorators, the end, with the line break, and the name of each function and method."""
        found = []
        for node in _definitions(self.tree.body):
            is_class = isinstance(node, ast.ClassDef)
            for each in _definitions(node.body) if is_class else (node,):
                first = min([each.lineno, *(own.lineno for own in each.decorator_list)])
                name = f"{node.name}.{each.name}" if is_class else each.name
                found.append((self._lines[first - 1], self._span(each)[1] + 1, name))
        return found

    # Positions

    @functools.cached_property
    def _lines(self) -> list[int]:
        """The byte offset of the start of each line, and of the end."""
        start = len(codecs.BOM_UTF8) if self.data.startswith(codecs.BOM_UTF8) else 0
        return list(itertools.accumulate(map(len, self.data[start:].splitlines(keepends=True)), initial=start))

    def _span(self, node: Any) -> tuple[int, int]:
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _line_indent(self, lineno: int) -> str:
        line = self.data[self._lines[lineno - 1] : self._lines[lineno]]
        return line[: len(line) - len(line.lstrip(b" \t"))].decode()

    def _indent(self, node: Any) -> str:
        return self._line_indent(node.lineno)

    @functools.cached_property
    def _newline(self) -> str:
        return "\r\n" if b"\r\n" in self.data else "\n"

    def _check_begins_line(self, statement: Any) -> None:
        """Raise NoMatch if anything but indentation precedes a statement on its line."""
        line_start = self._lines[statement.lineno - 1]
        before = self.data[line_start : self._span(statement)[0]]
        above = self.data[:line_start].rstrip(b"\r\n").rpartition(b"\n")[2]
        continued = above.endswith(b"\\") and not above.lstrip().startswith(b"#")
        if before.strip() or continued:
            raise NoMatch(f"line {statement.lineno}: expected `{_short(self.text(statement))}` to begin its line")

    def _end_of_line(self, statement: Any) -> int:
        """The end of a statement's last line, with its comment. Raises NoMatch if the line has another statement."""
        stop = self._span(statement)[1]
        line = self.data[stop : self._lines[statement.end_lineno]]
        if line.strip() and not line.lstrip().startswith(b"#"):
            raise NoMatch(f"line {statement.end_lineno}: expected `{_short(self.text(statement))}` to end its line")
        return stop + len(line.rstrip())

    def _indented(self, text: str, indent: str) -> str:
        """Indent every line except the first, with the file's own indentation and line endings."""
        first, *rest = textwrap.dedent(text).strip().splitlines()
        if indent.startswith("\t"):
            rest = [re.sub("^ +", lambda spaces: "\t" * (len(spaces[0]) // 4), line) for line in rest]
        return self._newline.join([first, *(indent + line if line else "" for line in rest)])

    def _edit(self, start: int, stop: int, text: str) -> None:
        for other in self.edits:
            if start < other.stop and other.start < stop:
                ours, theirs = _short(text), _short(other.text.decode())
                raise NoMatch(f"another fix edits the same place: `{theirs}` and `{ours}`")
        self.edits.append(TextEdit(start, stop, text.encode(), self.fix))


def _definitions(body: Sequence[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The functions and classes of a module or class, also under an `if`, `try` or `with`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            handlers = [each.body for each in getattr(node, "handlers", ())]
            for inner in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", []), *handlers):
                yield from _definitions(inner)


def _logic(function: ast.stmt) -> str:
    """A function's syntax, without its docstring."""
    assert isinstance(function, ast.FunctionDef)
    documented = ast.get_docstring(function, clean=False) is not None
    nodes: list[ast.AST] = [*function.decorator_list, function.args, *function.body[documented:]]
    return "\n".join(map(ast.dump, nodes))


def _shown(part: Part) -> str:
    """A part of a fix in a message."""
    if isinstance(part, bool):
        return "another part"
    if callable(part):
        return f"`{part.__name__}`"
    return (
        f"`{_short(part)}`" if isinstance(part, str) else f"`{_short(part[0])}` in line {getattr(part[1], 'lineno', 1)}"
    )


def _short(text: str) -> str:
    """The first line of a text, for a message."""
    first, *rest = text.strip().splitlines() or [""]
    return f"{first[:SHOWN]}…" if rest or len(first) > SHOWN else first


def imported_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names bound by the import statements among these nodes."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]


def function_text(function: Callable[..., Any]) -> str:
    """The source text of a function in a fix's file, with decorators and comments, without indentation.

    It is found by indentation, which works as the files are formatted; parsing would take longer than all edits.
    """
    lines = _lines_of(function.__code__.co_filename)
    first = function.__code__.co_firstlineno - 1
    indent = _at(lines[first])
    header = next(n for n in range(first, len(lines)) if lines[n].rstrip().endswith(":") and _at(lines[n]) == indent)
    stop = next((n for n in range(header + 1, len(lines)) if lines[n].strip() and _at(lines[n]) <= indent), len(lines))
    return textwrap.dedent("\n".join(lines[first:stop])).rstrip()


def with_annotations(text: str, names: Collection[str]) -> str:
    """The text of a function with unquoted annotations, as upstream writes them; a fix's file quotes them.

    An annotation with a name that is not in `names` is omitted, as the import of the module would look up that name.
    """

    def is_there(annotation: str) -> bool:
        return all(name in names for name in re.findall(r"(?<![\w.])[^\W\d]\w*", annotation))

    def parameter(found: re.Match[str]) -> str:
        name, annotation, default = found.groups("")
        return f"{name}: {annotation}{default}" if is_there(annotation) else f"{name}{default.strip()}"

    def result(found: re.Match[str]) -> str:
        return f" -> {found[1]}:" if is_there(found[1]) else ":"

    def variable(found: re.Match[str]) -> str:
        name, annotation = found.groups()
        return f"{name}: {annotation} = " if is_there(annotation) else f"{name} = "

    lines, in_header = text.split("\n"), False
    for number, line in enumerate(lines):
        in_header = in_header or line.lstrip().startswith("def ")
        if in_header:
            line = re.sub(r' -> "([^"]+)":', result, re.sub(r'(\w+): "([^"]+)"( = )?', parameter, line))
            in_header = not line.endswith(":")
        else:
            line = re.sub(r'^(\s+[\w.]+): "([^"]+)" = ', variable, line)
        lines[number] = line
    return "\n".join(lines)


def joined_headers(text: str, columns: int) -> str:
    """The text with function headers joined into one line where they fit, as formatters write them."""

    def joined(found: re.Match[str]) -> str:
        line = f"{found[1]}{found[2]}{found[3]}"
        return line if len(line) <= columns else found[0]

    return re.sub(r"(?m)^( *def \w+\()\n +(.*[^,\n])\n *(\).*:)$", joined, text)


def _at(line: str) -> int:
    """The column at which a line's text begins."""
    return len(line) - len(line.lstrip())


@functools.cache
def _lines_of(path: str) -> list[str]:
    """The lines of a fix's file; cached because a fix inserts several functions."""
    with open(path, encoding="utf-8") as file:
        return file.read().splitlines()
