"""What DeepSpeed's own converter does is told by its syntax; one that is not known is named in a warning."""

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from deepspeed_patches.ds_to_universal import known_converters, syntax, traits
from deepspeed_patches.ds_to_universal.traits import CONVERTER, Traits
from universal import ours, parallel
from upstream import PROGRAMS, all_releases, environment_for, in_place, releases, tree

NEWEST = "0.19.8"
RELEASES = [pytest.param(v, id=v) for v in ("0.12.6", "0.15.4", "0.16.2", "0.19.2", NEWEST)]
if all_releases():
    RELEASES = releases("deepspeed")


def converter(version: str) -> Path:
    return tree("deepspeed", version) / CONVERTER


@pytest.mark.parametrize(
    ("version", "lacking"),
    [
        ("0.12.6", set(traits.SINCE) - {"vocab_tensor", "two_sub_params"}),
        ("0.16.2", {name for name, since in traits.SINCE.items() if since.startswith("0.19")}),
        (NEWEST, set()),
    ],
)
def test_what_a_release_does(version: str, lacking: set[str]) -> None:
    found, warning = traits.of_file(converter(version))
    assert ({name for name, has in vars(found).items() if not has}, warning) == (lacking, "")


@pytest.mark.parametrize("version", RELEASES)
def test_the_table_says_of_a_release_what_its_syntax_says(version: str) -> None:
    """As it is, and with this project's fixes in it; see `known.py` for how to make the table anew."""
    facts = syntax.read(converter(version).read_bytes())
    edited = syntax.read((in_place(tree("deepspeed", version)) / CONVERTER).read_bytes())
    assert traits.of_file(converter(version)) == (traits.of_syntax(facts), "")
    (digests,) = (row for row in known_converters.CONVERTERS.values() if facts.digest in row)
    assert digests == (syntax.shortened(converter(version).read_bytes()), facts.digest, edited.digest)
    assert traits.of_syntax(edited) == traits.of_syntax(facts)


def test_every_trait_has_a_release() -> None:
    assert set(traits.SINCE) == {field.name for field in fields(Traits)}


@pytest.mark.parametrize("version", ["0.16.2", NEWEST])
@pytest.mark.parametrize("formatted", ["quotes", "unparsed"])
def test_a_reformatted_converter_is_the_same(version: str, formatted: str, tmp_path: Path) -> None:
    """Other quotes, or all comments gone and every line broken elsewhere: neither its traits nor a warning change."""
    text = converter(version).read_text()
    changed = text.replace('step.pt"', "step.pt'").replace('"step.pt', "'step.pt")
    if formatted == "unparsed":
        changed = ast.unparse(ast.parse(text))
    path = tmp_path / "ds_to_universal.py"
    path.write_text(changed)
    assert changed != text
    assert traits.of_file(path) == traits.of_file(converter(version))


def test_a_converter_that_is_edited_in_place_is_known() -> None:
    assert traits.of_file(in_place(tree("deepspeed", "0.16.2")) / CONVERTER) == traits.of_file(converter("0.16.2"))


def test_a_name_in_a_comment_or_an_import_is_not_what_it_does(tmp_path: Path) -> None:
    path = tmp_path / "ds_to_universal.py"
    path.write_text('"""step.pt"""\nfrom constants import AFFINE_MAP  # SUB_PARAM_SHARD_WIDTHS\n')
    found, warning = traits.of_file(path)
    assert not any(vars(found).values())
    assert warning.startswith(f"{path} is none of the converters of DeepSpeed 0.12.0 to 0.19.8")
    assert "but for: affine_maps, autoep, module_weights" in warning


def test_a_converter_that_does_not_parse(tmp_path: Path) -> None:
    path = tmp_path / "ds_to_universal.py"
    path.write_text("print 1\n")
    found, warning = traits.of_file(path)
    assert found == Traits()
    assert re.search(
        r"none of the converters .* and no module for this Python .*: the output is as of 0\.19\.8", warning
    )


def test_an_unknown_converter_is_named_and_its_output_is_without_what_it_does_not_do(tmp_path: Path) -> None:
    text = converter(NEWEST).read_text()
    fork = tmp_path / "fork" / CONVERTER
    fork.parent.mkdir(parents=True)
    fork.write_text(text.replace('"step.pt"', '"steps.pt"'))
    for folder in (fork.parent, fork.parent.parent):
        (folder / "__init__.py").touch()
    done = ours(parallel("megatron")["megatron"], tmp_path / "universal", env={"PYTHONPATH": str(tmp_path / "fork")})
    assert done.stderr == (
        f"ds_to_universal: {fork} is none of the converters of DeepSpeed 0.12.0 to 0.19.8; by its syntax it does what "
        "that of 0.19.8 does, but for: steps, and so does the output; compare one conversion with its own before you "
        "rely on it\n"
    )
    assert not list(tmp_path.glob("universal/zero/*/step.pt"))
    assert list(tmp_path.glob("universal/zero/*/fp32.pt"))


def test_the_program_that_makes_the_table_prints_its_rows() -> None:
    root = tree("deepspeed", NEWEST)
    command = [sys.executable, str(PROGRAMS / "known_converters.py"), str(root)]
    done = subprocess.run(command, env=environment_for(root, "none"), capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [NEWEST, *known_converters.CONVERTERS[NEWEST]], done.stderr
