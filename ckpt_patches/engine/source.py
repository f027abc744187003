"""Source text of an upstream module: anchors are found in its syntax tree, edits are made in its text.

Everything outside an edit stays byte-identical: line endings, quotes, comments, a byte order mark. Anchors are written
as Python (`source.one('zarr.create(...)', within=function)`) and compared as syntax, so quotes, spacing and line breaks
of a release do not matter.

Each process of a job pays for this, so only the functions that may have an anchor are parsed: the beginnings of lines
give an outline of the file. Where the outline and the parser disagree, the outline is that of the parser.
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
from collections.abc import Callable, Collection, Sequence
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
# What can have statements in it, and other nodes with a place, or with nodes that have one: no operators.
_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)
_PLACED = (
    *(*_BLOCKS, ast.expr, ast.arguments, ast.arg, ast.keyword, ast.withitem),
    *(ast.comprehension, ast.alias, ast.pattern),
)
# The beginning of a function or class, or a method: indentation, decorator, keyword and name; or of another statement.
_BEGIN = re.compile(
    rb"\n(?:( {4}|)(?:(@)|(?:async +)?(def|class) +(\w+))|(?!else\b|elif\b|except\b|finally\b)[^\s#)\]}])"
)
_OTHER_INDENT = re.compile(rb"\n {1,3}(?:async|def|class) ")
_STRING_OR_WORD = re.compile(r"""[bBfFrRuU]*(?:"[^"]*"|'[^']*')|(?<!\w)([^\W\d]\w*)""")


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


class _Inexact(Exception):
    """The outline from the text of the lines is not that of the syntax, or may not be."""


class TextEdit(NamedTuple):
    """Replace the bytes [start, stop) of the file with `text`."""

    start: int
    stop: int
    text: bytes
    fix: str
    function: str  # that is edited or added, also `Class.name`; empty if it is none


class _Chunk:
    """The text of a statement at the margin, up to the next one; of a class up to its first method: a chunk, too."""

    def __init__(self, start: int, name: str | None, *, is_member: bool = False) -> None:
        self.start = start
        self.stop = start
        self.name = name  # of a function or class, or `Class.method`; None as long as only decorators were read
        self.is_member = is_member
        self.nodes: list[ast.stmt] | None = None  # parsed


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


def _walk(root: ast.AST, kind: type[NodeT], lines: Sequence[int] | None) -> list[NodeT]:
    """The nodes of a kind, with `lines` only those on any of these lines, which are in order."""
    nodes: list[Any] = [root]
    kinds = _BLOCKS if issubclass(kind, ast.stmt) else _PLACED
    for node in nodes:  # the list grows meanwhile
        for field in node._fields:  # no attributes of other packages
            value = getattr(node, field, None)
            inner = value if isinstance(value, list) else (value,)
            nodes += [one for one in inner if isinstance(one, kinds) and (lines is None or _is_on(one, lines))]
    return [node for node in nodes if isinstance(node, kind)]


def _is_on(node: Any, lines: Sequence[int]) -> bool:
    """Whether a node, or a decorator of it, is on one of these lines; true for one without a place."""
    if not node._attributes:
        return True
    at = bisect.bisect_left(lines, _first_line(node))
    return at < len(lines) and lines[at] <= node.end_lineno


def _first_line(node: Any) -> int:
    """The first line of a statement, with its decorators."""
    decorators = getattr(node, "decorator_list", None)
    line: int = min(node.lineno, decorators[0].lineno) if decorators else node.lineno
    return line


@functools.cache
def _parse_pattern(pattern: str) -> ast.AST:
    """The syntax of a pattern."""
    (statement,) = ast.parse(textwrap.dedent(pattern).strip()).body
    return statement.value if isinstance(statement, ast.Expr) else statement


@functools.cache
def _words(pattern: str) -> tuple[bytes, ...]:
    """The names and keywords of a pattern, without those in strings: what lacks one of them cannot be equal."""
    return tuple(word.encode() for word in dict.fromkeys(_STRING_OR_WORD.findall(pattern)) if word)


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
        self.used: set[str] = set()  # functions and classes that were found by the text of their lines
        self.is_exact = False  # whether the outline is that of the parser

    def request(self, edit: "Callable[[Source], None]") -> None:
        """Request the edits of a function, or none if it raises."""
        before = list(self.edits)
        try:
            try:
                edit(self)
            except _Inexact:
                self.edits = list(before)
                self.parse_whole()
                edit(self)
        except BaseException:
            self.edits = before
            raise

    # The outline

    @functools.cached_property
    def _chunks(self) -> list[_Chunk]:
        """The statements of the module, and the methods. Raises UnreadableSource if it is not UTF-8, or no Python."""
        self._check_encoding()
        chunks = None if self.is_exact or self._has_other_layout() else self._outline()
        if chunks is None:
            self.is_exact, chunks = True, self._parsed_outline()
        for chunk, following in itertools.pairwise(chunks):
            chunk.stop = following.start
        chunks[-1].stop = len(self.data)
        return chunks

    def _check_encoding(self) -> None:
        try:
            declared, _ = tokenize.detect_encoding(BytesIO(self.data).readline)
            self.data.decode("utf-8")
        except (SyntaxError, UnicodeDecodeError) as error:
            raise UnreadableSource(f"expected UTF-8: {error}") from error
        if declared not in ("utf-8", "utf-8-sig"):
            raise UnreadableSource(f"expected UTF-8, found a file declared as {declared}")

    def _has_other_layout(self) -> bool:
        """Whether there are tabs, form feeds, line ends that are a CR alone, or definitions at other indentations."""
        has_lone_cr = b"\r" in self.data and self.data.count(b"\r") != self.data.count(b"\r\n")
        has_others = has_lone_cr or b"\n\t" in self.data or b"\f" in self.data
        return has_others or bool(_OTHER_INDENT.search(self.data))

    def _outline(self) -> list[_Chunk] | None:
        """The chunks by the beginnings of lines; None if they do not show them."""
        begin, owner, quotes = self._lines[0], "", [quote for quote in (b'"""', b"'''") if quote in self.data]
        chunks = [_Chunk(begin, "")]
        for found in _BEGIN.finditer(b"\n" + self.data[begin:]):
            start, last, is_member = found.start() + begin, chunks[-1], bool(found[1])
            if is_member and not owner:
                continue
            if any(self.data.count(quote, last.start, start) % 2 for quote in quotes):  # in a string of several lines
                continue
            if last.name is not None:
                chunks.append(last := _Chunk(start, None, is_member=is_member))
            elif is_member != last.is_member or not (found[2] or found[3]):  # a decorator of several lines
                return None
            name = (found[4] or b"").decode()
            last.name = None if found[2] else f"{owner}.{name}" if is_member else name
            if not is_member:
                owner = name if found[3] == b"class" else ""
        return chunks if chunks[-1].name is not None else None

    def parse_whole(self) -> None:
        """Forget the outline: from now on, it is that of the parser."""
        self.is_exact = True
        self.used.clear()
        for known in ("_chunks", "_named", "_imported"):
            self.__dict__.pop(known, None)

    def _parsed_outline(self) -> list[_Chunk]:
        """The chunks by the syntax tree. Raises UnreadableSource if the file does not parse with this Python."""
        try:
            tree = ast.parse(self.data, self.path)
        except (SyntaxError, ValueError) as error:
            line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
            raise UnreadableSource(f"it does not parse with this Python: {error.args[0]}{line}") from error
        chunks, end = [_Chunk(self._lines[0], "")], 0
        for statement in tree.body:
            name = getattr(statement, "name", "")
            if _first_line(statement) > end:
                chunks.append(_Chunk(self._lines[_first_line(statement) - 1], name))
            for member in statement.body if isinstance(statement, ast.ClassDef) else ():
                if inner := getattr(member, "name", ""):
                    start = self._lines[_first_line(member) - 1]
                    chunks.append(_Chunk(start, f"{name}.{inner}", is_member=True))
            end = statement.end_lineno or 0
        return chunks

    def _nodes(self, chunk: _Chunk) -> list[ast.stmt]:
        """The statements of a chunk; the first one is what it is named by. Raises _Inexact."""
        if chunk.nodes is None:
            following = self._chunk_at(chunk.stop)
            is_class = following.is_member and not chunk.is_member
            nodes = self._parsed(chunk, chunk.stop, self._indent_at(following.start) + "pass" if is_class else "")
            if chunk.name and (not nodes or getattr(nodes[0], "name", "") != chunk.name.rpartition(".")[2]):
                raise _Inexact
            chunk.nodes = nodes
        return chunk.nodes

    def _parsed(self, chunk: _Chunk, stop: int, more: str = "") -> list[ast.stmt]:
        line = bisect.bisect_right(self._lines, chunk.start) - 1
        before = b"\n" * (line - 1) + b"if 1:\n" if chunk.is_member else b"\n" * line
        try:
            nodes = ast.parse(before + self.data[chunk.start : stop] + more.encode()).body
        except (SyntaxError, ValueError):
            raise _Inexact from None
        return [*nodes[0].body, *nodes[1:]] if chunk.is_member and isinstance(nodes[0], ast.If) else nodes

    def _chunk_at(self, offset: int) -> _Chunk:
        """The chunk with a byte of the file."""
        return self._chunks[max(0, bisect.bisect_right(self._chunks, offset, key=lambda chunk: chunk.start) - 1)]

    @functools.cached_property
    def _named(self) -> dict[str, list[_Chunk]]:
        """The chunks of functions and classes, by name."""
        named: dict[str, list[_Chunk]] = {}
        for chunk in self._chunks:
            named.setdefault(chunk.name or "", []).append(chunk)
        return named

    def _check_known(self, name: str) -> None:
        """Raise _Inexact if the text has more, or fewer, definitions of this name than the outline."""
        known = sum(len(chunks) for own, chunks in self._named.items() if own.rpartition(".")[2] == name)
        begins = ("def %s(", "class %s(", "class %s:")
        if not self.is_exact and known != sum(self.data.count((begin % name).encode()) for begin in begins):
            raise _Inexact

    # Anchors

    def function(self, name: str) -> Function:
        """The only function of that name; a method is `Class.method`. Raises NoMatch."""
        found = self._definition(name)
        if not isinstance(found, ast.FunctionDef):
            raise NoMatch(f"expected {name} to be a function, found a class")
        return found

    def _definition(self, name: str) -> Any:
        """The only function or class of that name, of the module, a class or a function. Raises NoMatch."""
        parts = name.split(".")
        chunks = self._named.get(".".join(parts[:2])) or self._named.get(parts[0], [])
        found: list[Any] = [self._nodes(chunk)[0] for chunk in chunks]
        inner = parts[1 + str(chunks[0].name).count(".") :] if chunks else []
        for part in inner if len(chunks) == 1 else ():
            members = (member for one in found for member in getattr(one, "body", []))
            found = [one for one in members if getattr(one, "name", "") == part]
        if len(found) != 1 or len(self._named.get(parts[0], [])) != 1:
            self._check_known(parts[-1])
            near = functools.partial(self._near, f"def {parts[-1]}(self):", None, [])
            raise NoMatch(f"expected one definition of {name}, found {len(found)}", near)
        self.used.add(".".join(parts[:2]))
        return found[0]

    def function_of(self, name: str, *releases: tuple[str, str]) -> Function | None:
        """The function that these releases have; None in others that lack it.

        Raises:
            NoMatch: it is absent in one of them.
        """
        return self.function(name) if self.has_function(name) or self.is_expected(releases) else None

    def class_named(self, name: str) -> ast.ClassDef:
        """The only top-level class of that name. Raises NoMatch."""
        named = self._named.get(name, [])
        if len(named) != 1:
            self._check_known(name)
        self.used.add(name)
        margin = [chunk.start for chunk in self._chunks if not chunk.is_member] + [len(self.data)]
        nodes = [self._parsed(one, margin[bisect.bisect_right(margin, one.start)])[0] for one in named]
        return self._only([node for node in nodes if isinstance(node, ast.ClassDef)], f"class {name}")

    def has_function(self, name: str) -> bool:
        """Whether that function or method is defined exactly once."""
        try:
            self.function(name)
        except NoMatch:
            return False
        return True

    def all(self, pattern: str, within: ast.AST | None = None) -> list[Any]:
        """Every node equal to the pattern, in text order. `...` is any expression, `f(...)` any call of f."""
        roots, lines = self._where(pattern, within)
        wanted = _parse_pattern(pattern) if roots else ast.Pass()
        found = [node for root in roots for node in _walk(root, type(wanted), lines) if _same(wanted, node)]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))

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
        roots, lines = self._where(having, within)
        return [node for root in roots for node in _walk(root, kind, lines)]

    def _where(self, pattern: str, within: ast.AST | None) -> "tuple[Sequence[ast.AST], list[int] | None]":
        """The nodes, and the lines in them, that may have all words of a pattern; None for all lines."""
        start, stop = self._span(within) if within else (0, len(self.data))
        rarest, least = b"", len(self.data)
        for word in _words(pattern):
            if (count := self.data.count(word, start, stop)) < least:
                rarest, least = word, count
            if not count:
                return [], None
        if not rarest:
            return [within] if within else [node for chunk in self._chunks for node in self._nodes(chunk)], None
        places = [self.data.index(rarest, start, stop)]
        while len(places) < least:
            places.append(self.data.index(rarest, places[-1] + len(rarest), stop))
        lines = [bisect.bisect_right(self._lines, place) for place in places]
        if within:
            return [within], lines
        chunks = dict.fromkeys(map(self._chunk_at, places))
        return [node for chunk in chunks for node in self._nodes(chunk)], lines

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
        nodes = self.all_of(kind, within, having=pattern)
        found = [node for node in nodes if _same(_parse_pattern(pattern), getattr(node, field))]
        return self._only(found, shown, within)

    def text(self, node: ast.AST) -> str:
        """The source text of a node, as in the file."""
        start, stop = self._span(node)
        return self.data[start:stop].decode()

    def imports(self, name: str) -> bool:
        """Whether an import statement at module level, outside blocks and functions, binds that name."""
        return name in self._imported

    def _imports(self) -> list[_Chunk]:
        begins = ((chunk, self.data[chunk.start : chunk.start + 8].lstrip(b"\f")) for chunk in self._chunks)
        return [chunk for chunk, begin in begins if begin.startswith((b"import ", b"from "))]

    @functools.cached_property
    def _imported(self) -> set[str]:
        """The names that the import statements bind."""
        texts = (self.data[chunk.start : chunk.stop] for chunk in self._imports())
        try:
            nodes = ast.parse(b"".join(texts)).body
        except SyntaxError:  # a statement that goes on at the beginning of a line
            raise _Inexact from None
        names = (one for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for one in node.names)
        return {one.asname or one.name.partition(".")[0] for one in names}

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

    def replace(self, node: ast.AST, text: str, *, last: ast.AST | None = None, about: str = "") -> None:
        """Replace a node, or the statements up to `last`, with an expression, or statements without indentation.

        Also replaces the comments between the statements, and the one above them from its line with the word `about`.
        Raises NoMatch unless statements are on lines of their own.
        """
        start, stop = self._span(node)[0], self._span(last or node)[1]
        if isinstance(node, ast.stmt):
            self._check_begins_line(node)
            self._end_of_line(last or node)
        if about:
            start = self._comment_above(node, about)
        self._edit(start, stop, self._indented(text, self._indent(node)))

    def _comment_above(self, statement: Any, word: str) -> int:
        """The offset of the comment above a statement from its line with this word on; else that of the statement."""
        start = self._span(statement)[0]
        line = rf"^[ \t]*(#[^\n]*{re.escape(word)}[^\n]*\n(?:[ \t]*(?:#[^\n]*)?\r?\n)*[ \t]*)\Z"
        comment = re.compile(line.encode(), re.MULTILINE).search(self.data[:start])
        return comment.start(1) if comment else start

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
        if start < stop:
            self._edit(start, stop, "")

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
        imports = self._imports()
        if not imports:
            raise NoMatch("expected an import statement, found none")
        nodes = self._nodes(imports[-1])
        if not all(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes):
            raise _Inexact
        self.insert_after(nodes[-1], text)

    def decorate(self, function: Function, text: str) -> None:
        """Insert a decorator as the outermost one."""
        self._check_begins_line(function)
        first = self._lines[_first_line(function) - 1]
        self._edit(first, first, self._indent(function) + text + self._newline)

    def insert_method_before(self, method: ast.stmt, function: Callable[..., Any]) -> None:
        """Insert the source text of a method in a fix's file before an upstream method."""
        self._insert_definition(self._chunk_at(self._span(method)[0]), function)

    def insert_function_before(self, other: "ast.AST | str", function: Callable[..., Any]) -> None:
        """Insert the source text of a function in a fix's file before the function or class of a module that is, or
        has, another node, or has a name. Raises NoMatch."""
        if isinstance(other, str):
            named = self._named.get(other, [])
            if len(named) != 1:
                self._check_known(other)
                raise NoMatch(f"expected one definition of {other}, found {len(named)}")
            self.used.add(other)
            self._insert_definition(named[0], function)
        else:
            before = self._chunks[: self._chunks.index(self._chunk_at(self._span(other)[0])) + 1]
            self._insert_definition(next(chunk for chunk in reversed(before) if not chunk.is_member), function)

    def _insert_definition(self, before: _Chunk, function: Callable[..., Any]) -> None:
        owner = str(before.name).rpartition(".")[0]
        name = f"{owner}.{function.__name__}" if owner else function.__name__
        if name in self._named:  # perhaps of another version of the fix
            raise NoMatch(f"expected no {function.__name__} yet, found one without what calls it in this fix")
        indent = self._indent_at(before.start)
        text = indent + self._indented(self.definition(function, len(indent)), indent)
        self._edit(before.start, before.start, text + self._newline * (2 if owner else 3), name)

    def definition(self, function: Callable[..., Any], indent: int = 0) -> str:
        """The text of a function in a fix's file, unindented, in the form for this module at that indentation."""
        text = with_annotations(function_text(function), self._imported.union(dir(builtins)))
        return joined_headers(text, COLUMNS - indent)

    def add_keyword(self, call: ast.Call, name: str, value: str) -> None:
        """Add a keyword argument after a call's last argument, in the call's own layout."""
        last = max([*call.args, *[k.value for k in call.keywords]], key=lambda n: self._span(n)[1])
        if last.lineno == call.lineno:
            self.insert_at(last, f", {name}={value}", end=True)
            return
        indent = self._indent(last)
        self.insert_at(last, f",{self._newline}{indent}{self._indented(f'{name}={value}', indent)}", end=True)

    def edited(self) -> bytes:
        """The text with all edits."""
        parts, position = [], 0
        for edit in sorted(self.edits, key=lambda e: (e.start, e.stop)):
            parts += [self.data[position : edit.start], edit.text]
            position = edit.stop
        return b"".join([*parts, self.data[position:]])

    # Positions

    @functools.cached_property
    def _lines(self) -> list[int]:
        """The byte offset of the start of each line, and of the end."""
        start = len(codecs.BOM_UTF8) if self.data.startswith(codecs.BOM_UTF8) else 0
        return list(itertools.accumulate(map(len, self.data[start:].splitlines(keepends=True)), initial=start))

    def _span(self, node: Any) -> tuple[int, int]:
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _indent_at(self, line_start: int) -> str:
        stop = self.data.find(b"\n", line_start)
        line = self.data[line_start : stop if stop >= 0 else None]
        return line[: len(line) - len(line.lstrip(b" \t"))].decode()

    def _indent(self, node: Any) -> str:
        return self._indent_at(self._lines[node.lineno - 1])

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
        if text[:1].isspace():
            text = textwrap.dedent(text)
        first, *rest = text.strip().splitlines()
        if indent.startswith("\t"):
            rest = [re.sub("^ +", lambda spaces: "\t" * (len(spaces[0]) // 4), line) for line in rest]
        return self._newline.join([first, *(indent + line if line.strip() else "" for line in rest)])

    def _edit(self, start: int, stop: int, text: str, function: str | None = None) -> None:
        for other in self.edits:
            if start < other.stop and other.start < stop:
                ours, theirs = _short(text), _short(other.text.decode())
                raise NoMatch(f"another fix edits the same place: `{theirs}` and `{ours}`")
        name = self._function_at(start) if function is None else function
        self.edits.append(TextEdit(start, stop, text.encode(), self.fix, name))

    def _function_at(self, offset: int) -> str:
        """The name of the function or method with a byte of the file; empty if there is none."""
        chunk = self._chunk_at(offset)
        for node in self._nodes(chunk)[:1] if chunk.name else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return str(chunk.name) if offset <= self._lines[node.end_lineno or 0] else ""
        return ""


def _logic(function: Any) -> str:
    """A function's syntax, without its docstring."""
    documented = ast.get_docstring(function, clean=False) is not None
    return "\n".join(map(ast.dump, [*function.decorator_list, function.args, *function.body[documented:]]))


def _shown(part: Part) -> str:
    """A part of a fix in a message."""
    shown = part[0] if isinstance(part, tuple) else getattr(part, "__name__", part)
    return f"`{_short(shown)}`" if isinstance(shown, str) else "another part"


def _short(text: str) -> str:
    """The first line of a text, for a message."""
    first, *rest = text.strip().splitlines() or [""]
    return f"{first[:SHOWN]}…" if rest or len(first) > SHOWN else first


def function_text(function: Callable[..., Any]) -> str:
    """The source text of a function in a fix's file, with decorators and comments, without indentation.

    It is found by indentation, which works as the files are formatted; parsing would take longer than all edits.
    """
    lines = _lines_of(function.__code__.co_filename)
    first = function.__code__.co_firstlineno - 1
    indent = len(lines[first]) - len(lines[first].lstrip())

    def is_outside(line: str) -> bool:
        return bool(line.strip()) and not line[: indent + 1].isspace()

    header = next(n for n in range(first, len(lines)) if lines[n].rstrip().endswith(":") and is_outside(lines[n]))
    stop = next((n for n in range(header + 1, len(lines)) if is_outside(lines[n])), len(lines))
    return "\n".join(line[indent:] for line in lines[first:stop]).rstrip()


def with_annotations(text: str, names: Collection[str]) -> str:
    """The text of a function with unquoted annotations, as upstream writes them; a fix's file quotes them.

    An annotation with a name that is not in `names` is omitted, as the import of the module would look up that name.
    """

    def bare(found: re.Match[str]) -> str:
        before, annotation, default = found.groups("")
        if all(name in names for name in re.findall(r"(?<![\w.])[^\W\d]\w*", annotation)):
            return f"{before}{annotation}{default}"
        return before.removesuffix(" -> ").removesuffix(": ") + default.strip()

    lines, in_header = text.split("\n"), False
    for number, line in enumerate(lines):
        in_header = in_header or line.lstrip().startswith("def ")
        if in_header:
            line = re.sub(r'(\w: | -> )"([^"]+)"( = )?', bare, line)
            in_header = not line.endswith(":")
        elif '"' in line:
            line = re.sub(r'^(\s+[\w.]+: )"([^"]+)"()(?= = )', bare, line)
        lines[number] = line
    return "\n".join(lines)


def joined_headers(text: str, columns: int) -> str:
    """The text with function headers joined into one line where they fit, as formatters write them."""

    def joined(found: re.Match[str]) -> str:
        line = f"{found[1]}{found[2]}{found[3]}"
        return line if len(line) <= columns else found[0]

    return re.sub(r"(?m)^( *def \w+\()\n +(.*[^,\n])\n *(\).*:)$", joined, text)


@functools.cache
def _lines_of(path: str) -> list[str]:
    """The lines of a fix's file; cached because a fix inserts several functions."""
    with open(path, encoding="utf-8") as file:
        return file.read().splitlines()
