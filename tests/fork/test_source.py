"""The engine's edits: anchors come from the syntax tree, edits change the text, all other bytes stay."""

import ast
import builtins
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_patches.engine.source import (
    NoMatch,
    NotNeeded,
    Source,
    UnreadableSource,
    joined_headers,
    with_annotations,
)

TEXT = '''"""Doc."""
# call(1) in a comment


def outer(x):
    """call(1) in a docstring"""
    first = call(x,  # keep this comment
                 y=2)
    return "call(1)"


class Box:
    def get(self):
        return other(1)
'''


def source(text: str = TEXT) -> Source:
    return Source(text.encode(), "module.py")


def edited(text: str, edit: Callable[[Source], None]) -> str:
    made = source(text)
    edit(made)
    return made.edited().decode()


ANNOTATED = """@staticmethod
def of(
    part: "dict[str, Part]", more: "Any" = None, *, other: "int | None" = 1
) -> "list[Other.kind]":
    found: "list[Part]" = []
    lost: "Any" = 'for a: "str" of it'
    def inner(one: "Part") -> "Any":
        return f'{one}: "Part"'
"""
BARE = """@staticmethod
def of(
    part: dict[str, Part], more=None, *, other: int | None = 1
) -> list[Other.kind]:
    found: list[Part] = []
    lost = 'for a: "str" of it'
    def inner(one: Part):
        return f'{one}: "Part"'
"""


def test_annotations_are_bare_where_the_module_has_their_names_and_else_left_out() -> None:
    assert with_annotations(ANNOTATED, {"Part", "Other", *dir(builtins)}) == BARE


def test_a_head_that_fits_into_a_line_is_in_one() -> None:
    split, joined = "def of(\n    part: Part, more=None\n) -> int:\n    pass", "def of(part: Part, more=None) -> int:"
    assert joined_headers(split, len(joined)) == f"{joined}\n    pass"
    assert joined_headers(split, len(joined) - 1) == split
    trailing = split.replace("None", "None,")
    assert joined_headers(trailing, 100) == trailing


def test_no_edit_is_no_change() -> None:
    assert edited(TEXT, lambda s: None) == TEXT


def test_comments_strings_and_docstrings_are_not_anchors() -> None:
    found = source().all("call(...)")
    assert [node.lineno for node in found] == [7]


CALL = "if ready:\n    a.b(c, 'd', e=1)\n"
CHANGED = [("ready", "x"), ("a.", "x."), (".b", ".x"), ("c,", "x,"), ("'d'", "'x'"), ("e=", "x="), ("1", "2")]


@pytest.mark.parametrize(("old", "new"), CHANGED)
def test_an_anchor_with_another_name_or_literal_is_none(old: str, new: str) -> None:
    def anchors(text: str) -> str:
        made = source(text)
        return made.text(made.one("a.b(c, 'd', e=1)", made.branch("ready")))

    assert CALL.count(old) == 1
    assert anchors(CALL) == "a.b(c, 'd', e=1)"
    with pytest.raises(NoMatch, match="found it 0 times"):
        anchors(CALL.replace(old, new))
    # As it was, it is in a comment and in a string: these are no anchors.
    with pytest.raises(NoMatch):
        anchors(f"{CALL.replace(old, new)}# {CALL.splitlines()[1]}\nNOTE = {CALL!r}\n")


def test_quotes_and_layout_do_not_matter() -> None:
    made = source("f('a',\n  [1,2])\n")
    assert made.text(made.one('f("a", [1, 2])')) == "f('a',\n  [1,2])"


def test_an_anchor_is_found_in_an_f_string_of_several_lines_and_in_a_decorator() -> None:
    source = Source(
        b'log(f"""a\n{x}\n  {wanted(x)!r:{width}}\n""")\n\n\n@decorate(wanted)\ndef f():\n    pass\n', "module.py"
    )
    assert [len(source.all(pattern)) for pattern in ("wanted", "wanted(...)", "width")] == [2, 1, 1]


def test_three_dots_stand_for_any_expression() -> None:
    assert len(source("g(1)\ng(a + b)\ng(1, 2)\n").all("g(...)")) == 3
    assert len(source("x = d[1]\nx = d[k]\n").all("d[...]")) == 2


def test_a_statement_of_one_word_is_an_anchor() -> None:
    assert len(source("for x in y:\n    if x:\n        continue\n    if z:\n        break\n").all("continue")) == 1
    assert len(source("def f():\n    pass\n").all("pass")) == 1


def test_an_anchor_matches_as_often_as_the_fix_says() -> None:
    with pytest.raises(NoMatch, match="expected `call\\(1\\)` once, found it 0 times"):
        source().one("call(1)")
    with pytest.raises(NoMatch, match="found it 2 times"):
        source("f()\nf()\n").one("f()")
    with pytest.raises(NoMatch, match="expected one definition of missing, found 0"):
        source().function("missing")
    with pytest.raises(NoMatch, match="found 2"):
        source("def f(): pass\ndef f(): pass\n").function("f")


def test_a_method_is_found_in_its_class() -> None:
    assert source().function("Box.get").name == "get"
    assert not source().has_function("get")


def test_a_loop_is_found_by_its_target() -> None:
    found = source("for a, (b, _) in c: pass\nfor a in c: pass\n")
    assert found.loop("a, (b, ...)").lineno == 1
    assert found.loop("a").lineno == 2
    with pytest.raises(NoMatch, match=r"expected `for b in \.\.\.` once, found it 0 times"):
        found.loop("b")


def test_a_class_is_found_by_its_name() -> None:
    assert source().class_named("Box").name == "Box"
    for name in ("outer", "missing"):
        with pytest.raises(NoMatch, match=f"expected `class {name}` once, found it 0 times"):
            source().class_named(name)


def test_a_statement_is_removed_with_the_line_breaks_in_front_of_it() -> None:
    text = "def f():\n    a = 1\n\n    # why\n    b = 2\n\n    c = 3\n"
    assert edited(text, lambda s: s.remove(s.one("b = 2"))) == "def f():\n    a = 1\n\n    # why\n\n    c = 3\n"
    assert edited(text, lambda s: s.remove(s.one("c = 3"))) == "def f():\n    a = 1\n\n    # why\n    b = 2\n"


def test_a_removal_leaves_room_for_insertions_on_both_sides() -> None:
    def edit(made: Source) -> None:
        made.remove(made.one("b = 2"))
        made.insert_after(made.one("a = 1"), "x = 1")
        made.insert_after(made.one("b = 2"), "y = 2")

    assert edited("a = 1\n\nb = 2\n", edit) == "a = 1\nx = 1\ny = 2\n"


def test_several_statements_are_replaced_with_the_comments_between_them() -> None:
    text = (
        "def f():\n    # above\n    a = 1\n    # between\n    for b in a:\n        c()  # in it\n    # below\n    g()\n"
    )
    made = source(text)
    first, last, _ = made.function("f").body
    made.replace(first, "c = 2\nd = 3", last=last)
    assert made.edited().decode() == "def f():\n    # above\n    c = 2\n    d = 3  # in it\n    # below\n    g()\n"


def test_several_statements_are_not_replaced_where_a_neighbour_shares_their_line() -> None:
    for text in ("if x: a = 1\n", "def f():\n    b = 0; a = 1\n", "def f():\n    a = 1; b = 0\n"):
        made = source(text)
        statement = made.one("a = 1")
        with pytest.raises(NoMatch):
            made.replace(statement, "c = 2", last=statement)


def test_tabs_and_crlf_stay() -> None:
    text = "def f():\r\n\tif x:\r\n\t\treturn 1\r\n"
    changed = edited(text, lambda s: s.insert_before(s.one("return 1"), "if a:\n    b()"))
    assert changed == "def f():\r\n\tif x:\r\n\t\tif a:\r\n\t\t\tb()\r\n\t\treturn 1\r\n"


# A statement that shares its line with another one. An insertion there could compile with another meaning.
SHARED = [
    ("def f(a):\n    if a: return\n    go()\n", "return"),
    ("def f(a):\n    if a: x = 1; return\n", "return"),
    ("def f(a):\n    x = 1; return\n", "return"),
    ("def f(a):\n    x = 1; return\n", "x = 1"),
    ("def f(a): return\n", "return"),
    ("if a: \\\n    x = 1\n", "x = 1"),
    ("class A: x = 1\n", "x = 1"),
]


@pytest.mark.parametrize(("text", "statement"), SHARED)
def test_nothing_is_inserted_behind_a_statement_that_shares_its_line(text: str, statement: str) -> None:
    made = source(text)
    with pytest.raises(NoMatch, match=r"line \d: expected `.+` to (begin|end) its line"):
        made.insert_after(made.one(statement), "inserted()")
    with pytest.raises(NoMatch, match="its line"):
        made.replace(made.one(statement), "if b:\n    other()")
    with pytest.raises(NoMatch, match="its line"):
        made.remove(made.one(statement))
    assert made.edits == []


@pytest.mark.parametrize(("text", "statement"), [row for row in SHARED if row != (SHARED[3])])
def test_nothing_is_inserted_in_front_of_a_statement_that_does_not_begin_its_line(text: str, statement: str) -> None:
    made = source(text)
    with pytest.raises(NoMatch, match=r"line \d: expected `.+` to begin its line"):
        made.insert_before(made.one(statement), "inserted()")
    assert made.edits == []


def test_a_body_on_the_line_of_its_function_gets_nothing_at_its_start() -> None:
    made = source("def f(a): return a\n")
    with pytest.raises(NoMatch, match="to begin its line"):
        made.insert_at_start(made.function("f"), "inserted()")


def test_a_comment_goes_from_the_line_on_that_it_is_about() -> None:
    text = "if a:\n    # One.\n    # Two: why.\n    # More.\n    b = 1\n    c = 1\n"
    made = Source(text.encode(), "x.py")
    made.remove_comment_above(made.one("b = 1"), "Two")
    made.remove_comment_above(made.one("c = 1"), "Two")
    assert made.edited().decode() == "if a:\n    # One.\n    b = 1\n    c = 1\n"
    made = Source(text.encode(), "x.py")
    made.remove_comment_above(made.one("b = 1"), "Three")
    assert made.edited().decode() == text
    beside = b"a = 1  # Two: why.\nb = 1\n"
    made = Source(beside, "x.py")
    made.remove_comment_above(made.one("b = 1"), "Two")
    assert made.edited() == beside
    made = Source(b"a = 1; b = 1\n", "x.py")
    with pytest.raises(NoMatch, match="to begin its line"):
        made.remove_comment_above(made.one("b = 1"), "Two")


def test_a_comment_behind_a_statement_stays_with_it() -> None:
    assert edited("a = 1  # one\nb = 2\n", lambda s: s.insert_after(s.one("a = 1"), "x()")) == (
        "a = 1  # one\nx()\nb = 2\n"
    )
    assert edited("a = 1\nb = 2  # two\nc = 3\n", lambda s: s.remove(s.one("b = 2"))) == "a = 1\nc = 3\n"
    assert edited("a = 1  # end", lambda s: s.insert_after(s.one("a = 1"), "x()")) == "a = 1  # end\nx()"


def test_only_an_import_of_the_module_itself_counts() -> None:
    made = source(
        "import math\nimport os.path\nfrom x import replace as r\nif TYPE_CHECKING:\n    import shutil\n"
        "def f():\n    import itertools\n"
    )
    assert [n for n in ("math", "os", "r", "replace", "shutil", "itertools") if made.imports(n)] == ["math", "os", "r"]


def test_code_that_is_there_is_not_needed() -> None:
    made = source("f(1)\n")
    made.skip_if("f(2)")
    with pytest.raises(NotNeeded):
        made.skip_if("f(...)")


def brought() -> int:
    return 1


def test_a_function_of_another_version_of_the_fix_is_unknown_code() -> None:
    source("f()\ndef brought():\n    return 1\n").skip_if("f(2)", "f(3)")
    with pytest.raises(NotNeeded):
        source("f()\ndef brought():\n    return 1\n").skip_if("f(...)", brought)
    with pytest.raises(NoMatch, match="expected brought as this fix has it, or none; found another one"):
        source("f()\ndef brought():\n    return 2\n").skip_if("f(...)", brought)


def test_a_function_is_not_defined_twice() -> None:
    made = source("def brought():\n    return 2\n")
    with pytest.raises(NoMatch, match="expected no brought yet, found one without what calls it in this fix"):
        made.insert_function_before(made.function("brought"), brought)


def test_two_edits_of_one_place_are_refused() -> None:
    made = source("f(g(1))\n")
    made.replace(made.one("g(1)"), "h()")
    with pytest.raises(NoMatch, match="another fix edits the same place"):
        made.replace(made.one("f(g(1))"), "k()")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x = '\xe9'\n", "expected UTF-8"),
        (b"# -*- coding: latin-1 -*-\nx = 1\n", "declared as iso-8859-1"),
        (b"def f(:\n", "does not parse with this Python"),
        (b"x = 1\0\n", "does not parse with this Python"),
    ],
)
def test_what_cannot_be_read_is_said(data: bytes, message: str) -> None:
    made = Source(data, "module.py")
    made.parse_whole()
    with pytest.raises(UnreadableSource, match=message):
        made.function("f")


METHOD = "    def get(self):\n        return old(1)\n"
# Files whose lines have a definition or a statement where the syntax has none, or none where it has one.
MISLEADING = {
    "docstring of a module": f'"""A.\n\nclass Box:\n{METHOD}"""\n\n\nclass Box:\n{METHOD}',
    "docstring of a class": f'class Box:\n    """A.\n\n{METHOD}    """\n\n{METHOD}',
    "quotes in a comment": f'# """\nx = 1\n\n\nclass Box:\n{METHOD}',
    "a string at the margin": f'class Box:\n    def other(self):\n        return """\nend"""\n\n{METHOD}',
    "a continued line at the margin": f"class Box:\n    x = 1 + \\\n2\n\n{METHOD}",
    "two spaces": "class Box:\n  def get(self):\n    def inner():\n      pass\n\n    return old(1)\n",
    "a tab": "class Box:\n\tdef get(self):\n\t\treturn old(1)\n",
    "nested functions": f"def make():\n    def get(self):\n        return 2\n\n\nclass Box:\n{METHOD}",
    "decorators of several lines": f"class Box:\n    @a(\n        1,\n    )\n    # why\n{METHOD}",
    "an else at the margin": f"if x:\n    y = 1\nelse:\n    y = 2\n\n\nclass Box:\n{METHOD}",
}


@pytest.mark.parametrize("text", MISLEADING.values(), ids=MISLEADING.keys())
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_function_is_found_as_the_parser_finds_it(text: str, newline: str) -> None:
    text = text.replace("\n", newline)

    def edit(made: Source) -> None:
        made.replace(made.one("old(1)", within=made.function("Box.get")), "new(1)")

    made = source(text)
    made.request(edit)
    before, _, after = text.rpartition("old(1)")
    assert made.edited().decode() == f"{before}new(1){after}"


def one_more() -> None:
    """A function to insert."""


HEAD = "import os\n\n\n"
ODD: dict[str, tuple[str, Callable[[Source], object]]] = {
    "a decorator of several lines": (
        f"{HEAD}@deco(\n1,\n)\ndef first():\n    pass\n",
        lambda made: made.insert_function_before("first", one_more),
    ),
    "a decorator that goes on at the indentation of methods": (
        f"{HEAD}class Box:\n    @deco \\\n    (1)\n{METHOD}",
        lambda made: made.insert_method_before(made.function("Box.get"), one_more),
    ),
    "quotes in the comment of an import": (
        "import os  # '''\nimport sys\n\n\ndef first():\n    pass\n",
        lambda made: made.insert_import("import one"),
    ),
    "an import that goes on at the margin": (
        "from os import (\npath,\n)\nimport sys\n\n\ndef first():\n    pass\n",
        lambda made: made.insert_import("import one") if made.imports("path") else None,
    ),
    "a form feed": (
        "import os\n\x0cimport numpy as np\n",
        lambda made: made.insert_import("import one") if made.imports("np") else None,
    ),
    "a lone CR": ("# a\rdef g(): old(1)\n", lambda made: made.replace(made.one("old(1)"), "new(1)")),
}


@pytest.mark.parametrize(("text", "edit"), ODD.values(), ids=ODD.keys())
def test_an_edit_is_where_it_is_when_the_whole_file_is_parsed(text: str, edit: Callable[[Source], object]) -> None:
    outlined, whole = source(text), source(text)
    whole.parse_whole()
    for made in (outlined, whole):
        made.request(lambda made: (edit(made), None)[1])
    assert outlined.edited() == whole.edited() != text.encode()


def test_a_file_of_comments_has_no_anchor() -> None:
    assert source("# old(1) moved\n").all("old(1)") == []


def test_attributes_that_others_give_to_shared_nodes_are_not_followed() -> None:
    """Python has one `Load` for all trees; pyflakes, for one, gives it an attribute that leads to its own tree."""
    name = ast.parse("x = y").body[0]
    assert isinstance(name, ast.Assign)
    assert isinstance(name.value, ast.Name)
    context = name.value.ctx
    vars(context)["parent"] = name
    try:
        assert len(source().all_of(ast.Return)) == 2
    finally:
        del vars(context)["parent"]


names = st.sampled_from(["a", "b", "ä", "名"])
calls = st.builds(lambda f, x: f"{f}({x!r})", names, st.one_of(st.integers(), st.text("aä名 ", max_size=4)))


@given(st.lists(calls, min_size=1, max_size=8), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_replacing_a_node_changes_nothing_around_it(lines: list[str], newline: str, mark: bool) -> None:
    text = newline.join(f"def f_{i}():{newline}    return [{line}, 1]" for i, line in enumerate(lines))
    data = (b"\xef\xbb\xbf" if mark else b"") + text.encode()
    made = Source(data, "module.py")
    for node in made.all_of(ast.Call):
        made.replace(node, "X")
    expected = newline.join(f"def f_{i}():{newline}    return [X, 1]" for i in range(len(lines)))
    assert made.edited() == (b"\xef\xbb\xbf" if mark else b"") + expected.encode()


def test_without_imports_none_is_inserted() -> None:
    with pytest.raises(NoMatch, match="expected an import statement"):
        source("x = 1\n").insert_import("import os")
