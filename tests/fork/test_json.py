"""Every `--json` output has a schema number and its keys."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.cli import command_line
from crafted_files import copied
from megatron_checkpoints import ZARR, written
from old_checkpoints import flattened, settings
from small_tree import command, on_terminal, one_line, python
from test_audit import lose_first_moment
from upstream import REPOSITORY, tree
from zero_checkpoints import of_ranks

# The keys of a document, by command: none is renamed or removed within a schema number (docs/reference/json.md).
KEYS = {
    "status --json": "version mode hook_active hook_reason installed fixes warnings errors complete",
    "list --json": "fixes",
    "explain --json": "answers",
    "apply --json": "packages",
    "revert --json": "packages",
    "audit --json": "checkpoints runs",
    "resume-from --json": "run structure_only resume_from tag step undecided skipped left trackers",
    "repair --json": "output source repaired verdict",
    "migrate --json": "output source_type target_type bytes files files_before seconds plan_seconds workers verdict "
    "findings",
    "migrate --dry-run --json": "source_type target_type bytes files notes",
    "to-universal --json": "output_folder bytes files files_before seconds plan_seconds rate workers",
    "fingerprint --json": "fingerprints recorded",
    "compare --json": "verified differences not_verified missed",
}
SHAPES: dict[str, tuple[int, ...]] = {"layer.weight": (6, 4)}
FRAGMENTS: dict[str, tuple[int, ...]] = {"layer.weight": (1, 2)}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that `migrate` converts."""
    return flattened(tmp_path_factory.mktemp("old") / "iter_0000010", SHAPES, FRAGMENTS, ranks=3)[0].write(settings())


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert command_line.main(list(map(str, arguments))) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def check(command: str, found: dict[str, Any], schema: int = 1) -> None:
    assert found["schema"] == schema
    assert next(iter(found)) == "schema"
    assert {*KEYS[command].split(), "schema"} == found.keys()


def test_resume_from(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check("resume-from --json", printed(capsys, "resume-from", "--json", old))


def test_status(capsys: pytest.CaptureFixture[str]) -> None:
    check("status --json", printed(capsys, "status", "--json", "--tree", tree("megatron-core", "0.14.0")), schema=2)


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "explain", "--json", "KeyError: 'exp_avg'")
    check("explain --json", found)
    assert found["answers"][0].keys() == {"name", "why", "page", "matched"}
    assert found["answers"][0]["matched"] == "error text: KeyError: 'exp_avg'"


def test_apply_and_revert(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    copy = shutil.copytree(tree("megatron-core", "0.14.0"), tmp_path / "tree")
    for verb, outcome in (("apply", "applied"), ("revert", "reverted")):
        found = printed(capsys, verb, "--json", "--tree", copy)
        check(f"{verb} --json", found)
        (package,) = found["packages"]
        assert package.keys() == {"package", "path", "fixes"}
        assert {"name": "numpy2_product", "outcome": outcome, "reason": ""} in package["fixes"]


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "list", "--json", "--for", "megatron-core==0.14.0")
    check("list --json", found, schema=2)
    by_name = {fix["name"]: fix for fix in found["fixes"]}
    assert by_name["zarr_create_synchronizer"]["releases"] == [["0.9.0", "0.14.0"]]


def test_audit(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "audit", "--json", old)
    check("audit --json", found, schema=3)
    line = printed(capsys, "audit", "--json-lines", old)
    assert line == {"schema": 3, **found["checkpoints"][0]}
    (run,) = printed(capsys, "audit", "--json", old.parent)["runs"]
    step = found["checkpoints"][0]["step"]
    newest = {"resume_from": str(old), "step": step, "undecided": None}
    assert run == {"path": str(old.parent), **newest, "trackers": []}


def test_migrate(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = ("--output", tmp_path / "new")
    check("migrate --dry-run --json", printed(capsys, "migrate", old, *to, "--dry-run", "--json"), schema=2)
    check("migrate --json", printed(capsys, "migrate", old, *to, "--json"), schema=2)


def test_to_universal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ("--input-folder", of_ranks(10), "--output-folder", tmp_path / "universal")
    check("to-universal --json", printed(capsys, "to-universal", *folders, "--json"), schema=2)


def test_fingerprint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = of_ranks(10)
    check("fingerprint --json", printed(capsys, "fingerprint", checkpoint, "--json"), schema=2)
    check("compare --json", printed(capsys, "compare", checkpoint, checkpoint, "--json"), schema=2)


def test_every_command_with_json_is_tested() -> None:
    commands = [name for name, parser in command_line.parsers()[1].items() if "--json" in parser.format_usage()]
    assert {f"{name} --json" for name in (*commands, command_line.TO_UNIVERSAL)} <= KEYS.keys()


def test_a_verdict_has_a_color_on_a_terminal(old: Path) -> None:
    assert ": \x1b[32mWHOLE\x1b[0m (" in on_terminal("audit", str(old), columns=200, TERM="xterm")
    assert ": WHOLE (" in command("audit", str(old), TERM="xterm").stdout


def test_repair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = copied(written(ZARR).whole[-1], tmp_path)
    lose_first_moment(damaged)
    found = printed(capsys, "repair", "--json", damaged, "--output", tmp_path / "new", "--reset-moments")
    check("repair --json", found, schema=3)


# Output that cannot be written


@pytest.mark.parametrize("arguments", ["audit", "audit --json", "fingerprint", "migrate --dry-run"])
def test_an_output_that_is_full_is_one_line(arguments: str, old: Path) -> None:
    name, *options = arguments.split()
    options += ["--output", "/nowhere"] if name == "migrate" else []
    full_disk(name, str(old), *options)


def test_the_converters_output_that_is_full_is_one_line(tmp_path: Path) -> None:
    folders = ("--input-folder", of_ranks(10), "--output-folder", tmp_path / "universal")
    full_disk("to-universal", *map(str, folders))


def full_disk(*arguments: str) -> None:
    with open("/dev/full", "w") as full:
        done = python("-m", "ckpt_patches", *arguments, tree=REPOSITORY, check=False, stdout=full.fileno())
    assert done.returncode == 2
    *notes, last = done.stderr.splitlines()
    assert last == "ckpt-patches: cannot write the output: No space left on device"
    assert notes in ([], [f"ckpt-patches: {arguments[1]}: no recorded fingerprints, nothing was compared"])


def test_a_page_that_cannot_be_written_is_one_line(old: Path) -> None:
    done = command("audit", str(old), "--html", "/proc/x.html")
    assert done.returncode == 2
    assert done.stderr == "ckpt-patches: /proc/x.html: cannot be written: No such file or directory\n"


def test_a_folder_of_the_converter_that_cannot_be_made_is_one_line() -> None:
    line = one_line(command("to-universal", "--input-folder", str(of_ranks(10)), "--output-folder", "/proc/x"))
    assert "/proc/x" in line
