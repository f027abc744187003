"""The command's help, pages, and suggestions for unknown names."""

import argparse
import re
from pathlib import Path

import pytest

from ckpt_patches import __version__
from ckpt_patches.cli import command_line, explain
from ckpt_patches.convert import convert_command
from ckpt_patches.engine.format_patch import pages
from registered import FIXES, SWITCHED
from small_tree import MODULE, command, make, on_terminal, one_line, python
from upstream import REPOSITORY

PROGRAM = f"ckpt-patches {command_line.TO_UNIVERSAL}"
COMMANDS = {**command_line.parsers()[1], command_line.TO_UNIVERSAL: convert_command.parser(PROGRAM)}


# --help


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_description_and_an_example(name: str) -> None:
    parser = COMMANDS[name]
    assert parser.description
    assert parser.epilog
    assert re.search(rf"examples?:\n(  .*\n)*  .*ckpt[-_]patches {name}\b", parser.epilog)


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_is_wrapped_at_the_terminals_width(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    parser: argparse.ArgumentParser = COMMANDS[name] if name else command_line.parsers()[0]
    text = parser.format_help()
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    paragraph = next(part for part in text.split("\n\n") if part.startswith(str(parser.description)[:20]))
    assert " ".join(paragraph.split()) == parser.description
    first, *others = paragraph.splitlines()
    assert not others or len(first) + len(others[0].split()[0]) + 1 > columns - 2  # no word of the next line fits


def test_the_fixes_are_not_the_help_of_an_argument() -> None:
    for name in ("diff", "apply", "revert"):
        help_text = COMMANDS[name].format_help()
        assert sum(fix in help_text for fix in FIXES) <= 1  # the example's
        assert "ckpt-patches list" in help_text


def test_the_version_has_the_name() -> None:
    assert command("--version").stdout == f"training-checkpoint-patches {__version__}\n"


# Unknown names


@pytest.mark.parametrize("verb", ["diff", "apply", "revert"])
def test_an_unknown_fix(verb: str, tmp_path: Path) -> None:
    make(tmp_path)
    line = one_line(command(verb, "zarr_create_sync", "--tree", str(tmp_path)))
    assert line == "ckpt-patches: no fix zarr_create_sync; did you mean zarr_create_synchronizer?"
    line = one_line(command(verb, "xyz", "--tree", str(tmp_path)))
    assert line == "ckpt-patches: no fix xyz; ckpt-patches list has all names"


def test_an_unknown_fix_to_skip(tmp_path: Path) -> None:
    """Python's start says nothing of it: to list the fixes would take longer than the start."""
    env = {"CKPT_PATCHES_SKIP": "numpy_product,numpy2_product"}
    assert python("-c", "", tree=REPOSITORY, env=env).stderr == ""
    make(tmp_path)
    done = python("-c", f"import {MODULE}", tree=tmp_path, env=env)
    assert "CKPT_PATCHES_SKIP=numpy_product: skips nothing: no fix numpy_product; did you mean numpy2_product?\n" in (
        done.stderr
    )


def test_suggestions_cost_nothing_where_all_names_are_known() -> None:
    code = "import sys; assert 'ckpt_patches' in sys.modules; print('difflib' in sys.modules)"
    assert python("-c", code, tree=REPOSITORY, env={"CKPT_PATCHES_SKIP": "numpy2_product"}).stdout == "False\n"


USAGE = [
    ("statsu", "no command statsu; did you mean status?", "ckpt-patches"),
    ("", "the following arguments are required: COMMAND", "ckpt-patches"),
    ("status --jsn", "no option --jsn; did you mean --json?", "ckpt-patches status"),
    ("list --qqqqq", "no option --qqqqq", "ckpt-patches list"),
    ("status more", "unrecognized arguments: more", "ckpt-patches status"),
    ("list --for", "argument --for: expected one argument", "ckpt-patches list"),
    ("repair x", "the following arguments are required: --output", "ckpt-patches repair"),
    ("audit x --workers 0", "argument --workers: expected a number of processes, found '0'", "ckpt-patches audit"),
    (
        "to-universal x",
        "the following arguments are required: --output/--output-folder",
        "ckpt-patches to-universal",
    ),
    (
        "to-universal x --output y --workers 0",
        "argument --workers/--num-extract-workers: expected a number of processes, found '0'",
        "ckpt-patches to-universal",
    ),
    ("apply --split x", "no option --split", "ckpt-patches apply"),
]


@pytest.mark.parametrize(("arguments", "error", "program"), USAGE, ids=[case[0] or "nothing" for case in USAGE])
def test_a_usage_error_is_one_line(arguments: str, error: str, program: str) -> None:
    assert one_line(command(*arguments.split())) == f"ckpt-patches: {error} ({program} --help)"


def test_a_package_that_is_not_patched() -> None:
    said = "ckpt-patches: expected megatron-core or deepspeed or nvidia-resiliency-ext or apex or torch, found zarr"
    assert one_line(command("status", "--require", "zarr")) == said
    assert one_line(command("list", "--for", "zarr==2.18.7")) == said


def test_a_list_is_of_one_thing() -> None:
    said = "ckpt-patches: expected one of --for, --all and --tree, found several"
    assert one_line(command("list", "--for", "torch", "--tree", "b")) == said


def test_an_empty_path_is_not_the_current_folder() -> None:
    said = "ckpt-patches: expected an argument, found an empty one: is a variable not set? (ckpt-patches --help)"
    assert one_line(command("audit", "")) == said


# explain


@pytest.mark.parametrize("name", [*FIXES, *SWITCHED, "audit", "hook", "migrate", "ds_to_universal", "json"])
def test_explain_prints_the_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = explain.as_page(name)
    page = pages()[name].read_text()
    assert text.splitlines()[0] == page.splitlines()[0]
    assert re.findall(r"^## (.*)", text, flags=re.MULTILINE) == re.findall(r"^## (.*)", page, flags=re.MULTILINE)
    assert "<!--" not in text
    assert re.findall(r"\]\([^)]*\)", re.sub(r"(?s)```.*?```|`[^`]*`", "", text)) == []


def test_explain_on_a_terminal_is_wrapped_and_has_bold_headings() -> None:
    shown = on_terminal("explain", "round_robin_links", columns=60, TERM="xterm")
    assert shown.startswith("\x1b[1mDeepSpeed: links, conversions and universal loads")
    assert "\n\n\x1b[1mSymptom\x1b[0m\n\nNo error." in shown
    page = (REPOSITORY / "docs/fixes/round_robin_links.md").read_text()
    plain = re.sub(r"\x1b\[\d+m|^#+ ", "", shown, flags=re.MULTILINE)
    assert max(len(line) for line in plain.splitlines() if "https://" not in line) <= 60  # an address is not broken
    expected = re.sub(r"^#+ ", "", explain.without_links(page), flags=re.MULTILINE)
    assert plain.split() == expected.split()


def test_explain_without_a_name_lists_the_topics_with_their_titles() -> None:
    done = command("explain")
    assert (done.returncode, done.stderr) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in done.stdout.partition("\n\n")[0].splitlines())
    assert rows.keys() == set(explain.names()) - {*FIXES}
    assert rows["audit"] == (REPOSITORY / "docs/guides/audit.md").read_text().splitlines()[0].lstrip("# ")


def test_no_message_names_a_page_of_docs() -> None:
    """Messages name no docs/ page, which pip users lack; `explain` prints the pages."""
    folders = ("ckpt_patches", "deepspeed_patches", "megatron/patches", "nvrx_patches", "apex_patches", "torch_patches")
    found = []
    for path in (path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")):
        if "upstream_tests" in path.parts:
            continue
        code = re.sub(r'(?s)""".*?"""|^\s*#.*?$', "", path.read_text(), flags=re.MULTILINE)
        found += [f"{path}: {line}" for line in code.splitlines() if re.search(r"docs/[\w{}/]+\.md", line)]
    assert found == []
