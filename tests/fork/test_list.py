"""`ckpt-patches list`: the bugs of a release, or of a tree."""

import json
import re

import pytest

from ckpt_patches.cli import fix_commands
from ckpt_patches.engine import fix as fixes
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.plan import Outcome, fixes_for, plan_tree
from ckpt_patches.engine.registry import CORE, DEEPSPEED, TORCH
from registered import FIXES
from small_tree import command, one_line
from upstream import OLDEST_REPORTED, RELEASES, REPOSITORY, all_releases, newest, tree

NEWEST = newest("megatron-core")


# All releases of the default matrix in each run, not only the newest, since ranges begin and end at older ones.
TESTED = [
    (one.distribution, one.version)
    for one in RELEASES
    if one.distribution in DISTRIBUTIONS.values() and one.version != OLDEST_REPORTED and (one.default or all_releases())
]


@pytest.mark.parametrize("release", TESTED, ids="==".join)
def test_list_for_a_release_agrees_with_list_of_its_tree(release: tuple[str, str]) -> None:
    """Both options agree: `--for` reads `Fix.releases`; `--tree` plans the edits of the source."""
    of_release = names("--for", "==".join(release))
    assert of_release
    assert of_release == names("--tree", str(tree(*release)))


def names(*arguments: str) -> list[str]:
    done = command("list", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return [fix["name"] for fix in json.loads(done.stdout)["fixes"]]


def test_list_has_two_lines_for_every_fix() -> None:
    assert names("--all") == list(FIXES)
    lines = command("list", "--all", COLUMNS="400").stdout.splitlines()
    assert lines[0] == fix_commands.SILENT
    assert sorted(line.partition(":")[0] for line in lines if line.partition(":")[0] in FIXES) == sorted(FIXES)
    assert lines.index(fix_commands.VISIBLE) == 2 + 2 * sum(fixes.load(name).silent for name in FIXES)


@pytest.mark.parametrize("columns", ["60", "80", "119", ""])
def test_list_is_wrapped_between_words_in_a_pipe_as_well(columns: str) -> None:
    text = command("list", "--all", COLUMNS=columns).stdout
    assert max(map(len, text.splitlines())) <= int(columns or 80)
    for name in FIXES:
        fix = fixes.load(name)
        _, after = text.split(f"\n{name}: ")
        entry = " ".join(re.split(r"\n(?=\w)", after)[0].split())
        assert entry.endswith(" ".join(fix.symptom.split()))
        assert fix.releases[0][0] in entry


def test_list_without_an_option_has_the_bugs_of_what_is_installed() -> None:
    release = newest("deepspeed")
    found = command("list", "--json", on=tree("deepspeed", release))
    own = [fix["name"] for fix in json.loads(found.stdout)["fixes"]]
    assert set(names("--for", f"deepspeed=={release}")) <= set(own)
    assert {fixes.load(name).package for name in own} <= {DEEPSPEED, TORCH}  # torch is the tests' own


def test_list_of_an_installed_package() -> None:
    release = newest("deepspeed")
    done = command("list", "--json", "--for", "deepspeed", on=tree("deepspeed", release))
    assert [fix["name"] for fix in json.loads(done.stdout)["fixes"]] == names("--for", f"deepspeed=={release}")
    line = one_line(command("list", "--for", "nvidia-resiliency-ext"))
    assert line.endswith("expected the package to be installed, found none; name a release with ==")


@pytest.mark.parametrize("package", ["megatron-core", "megatron_core", "Megatron-Core"])
def test_list_for_a_release_has_the_fixes_whose_releases_include_it(package: str) -> None:
    affected = names("--for", f"{package}==0.16.1")
    assert affected == active_in(CORE, "0.16.1")
    assert "resume_param_groups" in affected
    assert "zarr_create_synchronizer" not in affected
    assert names("--for", "deepspeed==0.15.4") == active_in(DEEPSPEED, "0.15.4")


def active_in(package: str, version: str) -> list[str]:
    """The fixes of a release, without those that are only in patches for upstream."""
    every = {name: fixes.load(name) for name in fixes_for(package)}
    return [name for name, fix in every.items() if fix.affects(version) and not fix.is_for_upstream_alone]


@pytest.mark.parametrize("version", ["0.20.0", "0.14.1", f"{NEWEST}rc1", f"{NEWEST}+cu12", "newest", ""])
def test_list_guesses_nothing_of_a_release_that_was_not_tested(version: str) -> None:
    line = one_line(command("list", "--for", f"megatron-core=={version}"))
    assert f"0.12.0 to {NEWEST}" in line
    assert "list --tree PATH" in line


def test_list_for_an_unsupported_release_names_the_version_that_supports_it() -> None:
    assert "0.12.0 and later): fixes may be missing; version 0.2 (git revision ee6adc7) supports it" in one_line(
        command("list", "--for", "megatron-core==0.11.0")
    )


def test_list_for_a_build_of_torch_is_that_for_its_release() -> None:
    found = names("--for", "torch==2.6.0")
    assert names("--for", "torch==2.6.0+cu124") == found
    assert "dcp_async_copy" in found
    assert "dcp_empty_group" not in found  # a bug of 2.7 and later


def test_list_for_something_else() -> None:
    line = one_line(command("list", "--for", "megatron-core>=0.16"))
    assert (
        line == f"ckpt-patches: expected PACKAGE==VERSION, such as megatron-core=={NEWEST}, found megatron-core>=0.16"
    )


def test_list_of_a_tree_has_the_fixes_that_apply_to_it() -> None:
    root = tree("deepspeed", newest("deepspeed"))
    assert names("--tree", str(root)) == plan_tree(str(root), DEEPSPEED).named(Outcome.APPLIES)
    assert "expected megatron/core/ or deepspeed/" in one_line(command("list", "--tree", str(REPOSITORY / "docs")))
