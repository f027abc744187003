"""The traits of DeepSpeed's converter are read from its syntax; a warning names an untested release."""

import ast
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from ckpt_patches.convert import traits
from ckpt_patches.convert.traits import CONVERTER, Traits
from universal import ours, parallel
from upstream import all_releases, in_place, newest, newest_affected, numbers, releases, tree

# The first release whose converter has each trait.
SINCE = {
    "zero3_tensor_parallel": "0.19.4",
    "shard_widths": "0.19.6",
    "affine_maps": "0.19.7",
    "module_weights": "0.19.8",
    "autoep": "0.19.8",
}
NEWEST, BEFORE_TRAITS = newest("deepspeed"), newest_affected("zero3_fragment_bounds")[1]
RELEASES = [pytest.param(v, id=v) for v in ("0.15.4", "0.16.2", BEFORE_TRAITS, NEWEST)]
if all_releases():
    RELEASES = releases("deepspeed")


@pytest.mark.parametrize("version", RELEASES)
def test_what_the_converter_of_a_release_does(version: str) -> None:
    """A release's converter has the expected traits, with our fixes and without."""
    expected = Traits(**{name: numbers(version) >= numbers(since) for name, since in SINCE.items()})
    assert traits.in_tree(tree("deepspeed", version)) == (expected, "")
    assert traits.in_tree(in_place(tree("deepspeed", version))) == (expected, "")


def test_every_trait_has_a_release() -> None:
    assert set(SINCE) == {field.name for field in fields(Traits)}


def changed(folder: Path, text: str, version: str = NEWEST) -> Path:
    """A tree with this converter and version."""
    package = tree("deepspeed", NEWEST) / "deepspeed"
    (folder / CONVERTER).parent.mkdir(parents=True)
    (folder / CONVERTER).write_text(text)
    for name in ("__init__.py", "git_version_info_installed.py"):
        shutil.copy(package / name, folder / "deepspeed" / name)
    installed = folder / "deepspeed" / "git_version_info_installed.py"
    installed.write_text(installed.read_text().replace(NEWEST, version))
    return folder


def converter(version: str) -> str:
    return (tree("deepspeed", version) / CONVERTER).read_text()


def test_a_reformatted_converter_is_the_same(tmp_path: Path) -> None:
    """Removed comments and other line breaks do not change the traits."""
    text = converter(NEWEST)
    other = ast.unparse(ast.parse(text))
    assert other != text
    assert traits.in_tree(changed(tmp_path, other)) == traits.in_tree(tree("deepspeed", NEWEST))


def test_a_name_in_a_comment_or_an_import_is_not_what_it_does(tmp_path: Path) -> None:
    text = '"""module_state"""\nfrom constants import AFFINE_MAP  # SUB_PARAM_SHARD_WIDTHS\n'
    found, _ = traits.in_tree(changed(tmp_path, text))
    assert not any(vars(found).values())


def test_a_converter_that_does_not_parse_is_named(tmp_path: Path) -> None:
    found, warning = traits.in_tree(changed(tmp_path, "print 1\n"))
    assert found == Traits()
    assert "its converter does not parse" in warning
    assert f"the output is for {NEWEST}" in warning


def test_a_release_that_was_not_tested_is_named_and_its_output_is_without_what_it_does_not_do(tmp_path: Path) -> None:
    text = converter(NEWEST).replace("SUB_PARAM_SHARD_WIDTHS", "WIDTHS")
    fork = changed(tmp_path / "fork", text, "0.99.0")
    done = ours(parallel("megatron")["megatron"], tmp_path / "universal", env={"PYTHONPATH": str(fork)})
    assert done.stderr == (
        f"ds_to_universal: DeepSpeed 0.99.0 ({fork}) was not tested, the last that was is {NEWEST}: the output is as "
        f"for {NEWEST} but for shard_widths, as its own converter; compare one with its own before you rely on it\n"
    )
    assert list(tmp_path.glob("universal/zero/*/fp32.pt"))
