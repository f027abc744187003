"""Source text of an upstream module: anchors are found in its syntax tree, edits are made in its text.

Everything outside an edit stays byte-identical: line endings, quotes, comments, a byte order mark. Anchors are written
as Python (`source.one('zarr.create(...)', within=function)`) and compared as syntax, so quotes, spacing and line breaks
of a release do not matter.

Each process of a job pays for this, so only the functions that may have an anchor are parsed: an outline of the file,
from the beginnings of its lines, has their places. Where the outline and the parser disagree, the whole file is parsed.
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
# The beginning of a statement of a module or class: indentation, decorator, keyword and name.
_BEGIN = re.compile(
    rb"\n( {4}|\t|)(?:(@)|(?:async +)?(def|class) +(\w+)|(?!else\b|elif\b|except\b|finally\b)[^\s#)\]}])"
)
_STRING = re.compile(r"""[bfru]*("[^"]*"|'[^']*')""", re.IGNORECASE)
_WORD = re.compile(r"(?<!\w)[^\W\d]\w*")
_IN_WORD = frozenset(b"_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_OTHER_INDENT = re.compile(rb"\n(?: {1,3}| *\t+ +)(?:async +)?(?:def|class) ")


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


class _Block:
    """The bytes of one statement of a module or class, with its decorators, up to the next statement."""

    def __init__(self, start: int, name: str | None = None, nodes: list[ast.stmt] | None = None) -> None:
        self.start = start
        self.stop = start
        self.name = name  # of a function or class; None as long as only decorators were read
        self.members: list[_Block] | None = None  # of a class
        self.nodes = nodes  # parsed


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
    nodes = [root]
    for node in nodes:  # the list grows meanwhile
        for value in [getattr(node, field, None) for field in node._fields]:  # no attributes of other packages
            if isinstance(value, list):
                nodes += [n for n in value if isinstance(n, ast.AST) and (lines is None or _is_on(n, lines))]
            elif isinstance(value, ast.AST) and (lines is None or _is_on(value, lines)):
                nodes.append(value)
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
    return tuple(word.encode() for word in dict.fromkeys(_WORD.findall(_STRING.sub("", pattern))))


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
        self.is_exact = False  # whether the whole file is parsed

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
    def _blocks(self) -> list[_Block]:
        """The statements of the module. Raises UnreadableSource if it is not UTF-8, or does not parse."""
        self._check_encoding()
        if self.is_exact or self._has_other_layout():
            return self._parsed_blocks()
        blocks: list[_Block] = []
        begin, (single, double) = self._lines[0], (quote in self.data for quote in (b"'''", b'"""'))
        for found in _BEGIN.finditer(b"\n" + self.data[begin:]):
            among, start = (
                blocks if not found[1] else blocks[-1].members if blocks else None,
                found.start(1) + begin - 1,
            )
            if among is None:  # not in a class
                continue
            last = among[-1] if among else None
            if last and (
                (double and self.data.count(b'"""', last.start, start) % 2)
                or (single and self.data.count(b"'''", last.start, start) % 2)
            ):  # in a string of several lines
                continue
            if last and last.name is None and not (found[2] or found[3]):  # a decorator of several lines
                return self._parsed_blocks()
            if last is None or last.name is not None:
                among.append(last := _Block(start))
            last.name = None if found[2] else (found[4] or b"").decode()
            last.members = [] if found[3] == b"class" and not found[1] else None
        if not blocks:  # comments alone, or no Python
            return self._parsed_blocks()
        self._set_stops(blocks, len(self.data))
        return blocks

    def _has_other_layout(self) -> bool:
        """Whether there are form feeds, line ends that are a CR alone, or definitions at other indentations."""
        has_cr = b"\r" in self.data and self.data.count(b"\r") != self.data.count(b"\r\n")
        return b"\f" in self.data or has_cr or bool(_OTHER_INDENT.search(self.data))

    def _set_stops(self, blocks: list[_Block], stop: int) -> None:
        for block, following in itertools.zip_longest(blocks, blocks[1:]):
            block.stop = following.start if following else stop
            self._set_stops(block.members or [], block.stop)

    def _check_encoding(self) -> None:
        try:
            declared, _ = tokenize.detect_encoding(BytesIO(self.data).readline)
            self.data.decode("utf-8")
        except (SyntaxError, UnicodeDecodeError) as error:
            raise UnreadableSource(f"expected UTF-8: {error}") from error
        if declared not in ("utf-8", "utf-8-sig"):
            raise UnreadableSource(f"expected UTF-8, found a file declared as {declared}")

    def parse_whole(self) -> None:
        """Forget the outline: from now on, it is that of the parser."""
        self.is_exact = True
        self.used.clear()
        for known in ("_blocks", "_imported", "_names"):
            self.__dict__.pop(known, None)

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of the whole file.

        Raises:
            UnreadableSource: the file is not UTF-8, or does not parse with this Python.
        """
        self._check_encoding()
        try:
            return ast.parse(self.data, self.path)
        except (SyntaxError, ValueError) as error:
            line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
            raise UnreadableSource(f"it does not parse with this Python: {error.args[0]}{line}") from error

    def _parsed_blocks(self) -> list[_Block]:
        self.is_exact = True
        blocks = list(map(self._parsed_block, self.tree.body))
        self._set_stops(blocks, len(self.data))
        return blocks

    def _parsed_block(self, node: ast.stmt) -> _Block:
        is_decorated = getattr(node, "decorator_list", None)
        start = self._lines[_first_line(node) - 1] if is_decorated else self._span(node)[0]
        block = _Block(start, getattr(node, "name", ""), [node])
        if isinstance(node, ast.ClassDef):
            block.members = list(map(self._parsed_block, node.body))
        return block

    def _nodes(self, block: _Block) -> list[ast.stmt]:
        """The statements of a block, usually one. Raises _Inexact."""
        if block.nodes is None:
            line = bisect.bisect_right(self._lines, block.start) - 1
            is_member = self.data[block.start : block.start + 1].isspace()
            before = b"\n" * (line - 1) + b"if 1:\n" if is_member else b"\n" * line
            try:
                nodes = ast.parse(before + self.data[block.start : block.stop]).body
            except (SyntaxError, ValueError):
                raise _Inexact from None
            if is_member:
                nodes = nodes[0].body if len(nodes) == 1 else []  # type: ignore[attr-defined]
            if len(nodes) != 1 and (block.name or not nodes):
                raise _Inexact
            block.nodes = nodes
        return block.nodes

    def _block_at(self, offset: int, *, is_member: bool = True) -> _Block:
        """The statement of the module, or of a class, with a byte of the file."""
        block = self._blocks[max(0, bisect.bisect_right(self._blocks, offset, key=lambda block: block.start) - 1)]
        if is_member and block.members and offset >= block.members[0].start:
            return block.members[bisect.bisect_right(block.members, offset, key=lambda block: block.start) - 1]
        return block

    # Anchors

    def function(self, name: str) -> Function:
        """The only function of that name; a method is `Class.method`. Raises NoMatch."""
        found = self._definition(name)
        if not isinstance(found, ast.FunctionDef):
            raise NoMatch(f"expected {name} to be a function, found a class")
        return found

    def _definition(self, name: str) -> ast.stmt:
        """The only function or class of that name, of the module, a class or a function. Raises NoMatch."""
        blocks: list[_Block] | None = self._blocks
        body: list[ast.stmt] = []
        for part in name.split("."):
            if blocks is not None:
                named = [block for block in blocks if block.name == part]
                self._check_known(part, len(named))
                found = self._nodes(named[0]) if len(named) == 1 and named[0].members is None else []
                count, blocks = len(named), named[0].members if len(named) == 1 else None
            else:
                found = [s for s in body if isinstance(s, ast.FunctionDef | ast.ClassDef) and s.name == part]
                count = len(found)
            if count != 1:
                near = functools.partial(self._near, f"def {name.rpartition('.')[2]}(self):", None, [])
                raise NoMatch(f"expected one definition of {name}, found {count}", near)
            body = getattr(found[0], "body", []) if found else []
        self.used.add(".".join(name.split(".")[:2]))
        return found[0] if found else self._nodes(named[0])[0]

    def _check_known(self, name: str, found: int) -> None:
        """Raise _Inexact if the outline lacks a definition of a name that was not found once."""
        if found == 1 or self.is_exact:
            return
        every = (each for block in self._blocks for each in (block, *(block.members or ())))
        known, begins = sum(block.name == name for block in every), ("def %s(", "class %s(", "class %s:")
        if known != sum(self.data.count((begin % name).encode()) for begin in begins):
            raise _Inexact

    def function_of(self, name: str, *releases: tuple[str, str]) -> Function | None:
        """The function that these releases have; None in others that lack it.

        Raises:
            NoMatch: it is absent in one of them.
        """
        return self.function(name) if self.has_function(name) or self.is_expected(releases) else None

    def class_named(self, name: str) -> ast.ClassDef:
        """The only top-level class of that name. Raises NoMatch."""
        named = [block for block in self._blocks if block.name == name and block.members is not None]
        self._check_known(name, len(named))
        self.used.add(name)
        return self._only([node for block in named for node in self._nodes(block)], f"class {name}")  # type: ignore

    def has_function(self, name: str) -> bool:
        """Whether that function or method is defined exactly once."""
        try:
            self.function(name)
        except NoMatch:
            return False
        return True

    def all(self, pattern: str, within: ast.AST | None = None) -> list[Any]:
        """Every node equal to the pattern, in text order. `...` is any expression, `f(...)` any call of f."""
        roots, lines = self._where(_words(pattern), within)
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
        roots, lines = self._where(_words(having), within)
        return [node for root in roots for node in _walk(root, kind, lines)]

    def _where(self, words: Sequence[bytes], within: ast.AST | None) -> "tuple[Sequence[ast.AST], list[int] | None]":
        """The nodes, and the lines in them, that may have all of these words; None for all lines."""
        if not words:
            return [within] if within else [node for block in self._blocks for node in self._nodes(block)], None
        start, stop = self._span(within) if within else (0, len(self.data))
        counts = {word: self.data.count(word, start, stop) for word in words if word in self.data}
        if len(counts) < len(words):
            return [], None
        rarest = min(counts, key=counts.__getitem__)
        places, at = list[int](), start - 1
        for _ in range(counts[rarest]):
            at = self.data.index(rarest, at + 1, stop)
            end = at + len(rarest)
            if _IN_WORD.isdisjoint(self.data[max(0, at - 1) : at] + self.data[end : end + 1]):
                places.append(at)
        lines = [bisect.bisect_right(self._lines, place) for place in places]
        if within:
            return [within] if lines else [], lines
        blocks = dict.fromkeys(map(self._block_at, places if self._blocks else ()))
        return [node for block in blocks for node in self._nodes(block)], lines

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

    def import_statements(self) -> list[ast.Import | ast.ImportFrom]:
        """The import statements at module level."""
        nodes = (node for block in self._imports() for node in self._nodes(block))
        return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]

    def _imports(self) -> list[_Block]:
        return [block for block in self._blocks if self.data.startswith((b"import ", b"from "), block.start)]

    @functools.cached_property
    def _imported(self) -> set[str]:
        """The names that the import statements bind."""
        texts = (self.data[block.start : block.stop] for block in self._imports())
        try:
            return set(imported_names(ast.parse(b"".join(texts)).body))
        except SyntaxError:  # a statement that goes on at the beginning of a line
            raise _Inexact from None

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
        start = self._span(method)[0]
        owner = self._block_at(start, is_member=False)
        self._insert_definition(owner.members or [], self._block_at(start), function, blank_lines=1)

    def insert_function_before(self, other: "ast.AST | str", function: Callable[..., Any]) -> None:
        """Insert the source text of a function in a fix's file before the function or class of a module that is, or
        has, another node, or has a name. Raises NoMatch."""
        if isinstance(other, str):
            named = [block for block in self._blocks if block.name == other]
            self._check_known(other, len(named))
            if len(named) != 1:
                raise NoMatch(f"expected one definition of {other}, found {len(named)}")
            self.used.add(other)
        else:
            named = [self._block_at(self._span(other)[0], is_member=False)]
        self._insert_definition(self._blocks, named[0], function, blank_lines=2)

    def _insert_definition(
        self, among: Iterable[_Block], before: _Block, function: Callable[..., Any], blank_lines: int
    ) -> None:
        name = function.__name__
        if any(block.name == name for block in among):  # perhaps of another version of the fix
            raise NoMatch(f"expected no {name} yet, found one without what calls it in this fix")
        line = bisect.bisect_right(self._lines, before.start)
        indent = self._line_indent(line)
        text = indent + self._indented(self.definition(function, len(indent)), indent)
        self._edit(self._lines[line - 1], self._lines[line - 1], text + self._newline * (1 + blank_lines))

    def definition(self, function: Callable[..., Any], indent: int = 0) -> str:
        """The text of a function in a fix's file, unindented, in the form for this module at that indentation."""
        return joined_headers(with_annotations(function_text(function), self._names), COLUMNS - indent)

    @functools.cached_property
    def _names(self) -> set[str]:
        """The names that annotations of inserted functions can use."""
        return self._imported.union(dir(builtins))

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

    def places(self) -> Iterator[tuple[int, str]]:
        """The offset of each edit's first character in the text with all edits, and its fix."""
        longer = 0
        for edit in sorted(self.edits, key=lambda e: (e.start, e.stop)):
            yield edit.start + longer + len(edit.text) - len(edit.text.lstrip()), edit.fix
            longer += len(edit.text) - (edit.stop - edit.start)

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
