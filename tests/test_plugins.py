"""Fixes from another installed distribution are planned, reported, applied and proven like the project's own fixes."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ckpt_patches.engine.registry import FIXES
from ckpt_patches.engine.requirements import _holds, parse
from small_tree import IS_PATCHED, MODULE, make, python
from upstream import REPOSITORY, needed, newest, tree

pytestmark = pytest.mark.long

EXAMPLE = REPOSITORY / "tests" / "plugin" / "example_fixes"
EXAMPLES = ("skyrl_fp32_params", "skyrl_loaded_step", "torch_save_format")
OURS_SKIPPED = {"CKPT_PATCHES_SKIP": ",".join(FIXES)}
# A module that none of the project's own fixes edits.
OTHER = "megatron.core.their_module"
FIX = """\"\"\"Answer with two.\"\"\"
from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import AlreadyThere

fix = Fix(__name__, symptom="the answer is one"{more})


@fix.edit("{module}")
def answer(source):
    if source.all("return 2"):
        raise AlreadyThere
    source.replace(source.one("return 1").value, "2")
"""
ANSWER = f"import {OTHER} as m; print(m.answer())"


def distribution(folder: Path, name: str, points: Mapping[str, str], files: Mapping[str, str] | None = None) -> Path:
    """Install a distribution into a folder: its modules, and its metadata with one entry point per fix."""
    info = folder / f"{name.replace('-', '_')}-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    lines = [f"{fix} = {place}" for fix, place in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[ckpt_patches.fixes]", *lines, ""]))
    for file, text in (files or {}).items():
        (folder / file).write_text(text)
    return folder


def theirs(folder: Path, module: str = OTHER, more: str = "") -> Path:
    """A small tree with a module that only a plugin edits, and a distribution with a fix for it."""
    make(folder)
    path = folder.joinpath(*OTHER.split(".")).with_suffix(".py")
    path.write_text("def answer():\n    return 1\n")
    return distribution(folder, "their-fixes", {"two": "two:fix"}, {"two.py": FIX.format(module=module, more=more)})


def example(folder: Path) -> Path:
    shutil.copytree(EXAMPLE, folder / "example_fixes", ignore=shutil.ignore_patterns("__pycache__"))
    return distribution(folder, "example-fixes", {name: f"example_fixes.{name}:fix" for name in EXAMPLES})


def status(root: Path, *arguments: str, **env: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit status, and the state and the reason of each fix."""
    done = python("-m", "ckpt_patches", "status", "--json", *arguments, tree=root, env=env, check=False)
    assert done.stdout, done.stderr
    fixes = {fix["name"]: (fix["state"], fix["reason"]) for fix in json.loads(done.stdout)["fixes"]}
    return done.returncode, fixes


def on_release(version: str, folder: Path) -> dict[str, str]:
    """The environment with the path for a release of megatron-core and the example plugin."""
    root = tree("megatron-core", version)
    return {"PYTHONPATH": ":".join(map(str, (root, example(folder), *needed(root))))}


# The hook


@pytest.mark.quick
def test_a_module_that_only_a_plugin_knows_is_edited(tmp_path: Path) -> None:
    done = python("-c", ANSWER, tree=theirs(tmp_path))
    assert done.stdout == "2\n"
    (line,) = done.stderr.splitlines()
    assert line.endswith(": numpy2_product, two")
    assert python("-c", ANSWER, tree=tmp_path, env={"CKPT_PATCHES": "off"}).stdout == "1\n"
    skipped = python("-c", ANSWER, tree=tmp_path, env={"CKPT_PATCHES": "strict", "CKPT_PATCHES_SKIP": "two"})
    assert (skipped.stdout, "WARNING" in skipped.stderr) == ("1\n", False)


@pytest.mark.quick
def test_one_that_is_off_by_default_is_used_where_it_is_enabled(tmp_path: Path) -> None:
    root = theirs(tmp_path, more=', off_because="it is new"')
    enabled = {"CKPT_PATCHES_ENABLE": "two"}
    assert python("-c", ANSWER, tree=root).stdout == "1\n"
    assert python("-c", ANSWER, tree=root, env=enabled).stdout == "2\n"
    assert status(root)[1]["two"] == ("available", "it is new; CKPT_PATCHES_ENABLE=two switches it on")
    assert status(root, **enabled)[1]["two"][0] == "active"


@pytest.mark.quick
@pytest.mark.parametrize("version", ["0.12.3", newest("megatron-core")])
def test_a_module_of_a_release_is_edited_though_our_fixes_leave_it_alone(tmp_path: Path, version: str) -> None:
    """A plugin edits a module that no other fix edits. Only that module's file is needed; torch is not imported."""
    module = "megatron.core.package_info"
    (source,) = tree("megatron-core", version).glob("megatron/core/package_info.py")
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/__init__.py").touch()
    shutil.copy(source, tmp_path / "megatron/core")
    text = FIX.format(module=module, more="").replace('source.one("return 1").value', 'source.one("MAJOR = 0").value')
    distribution(tmp_path, "their-fixes", {"two": "two:fix"}, {"two.py": text})
    assert python("-c", f"import {module} as m; print(m.MAJOR)", tree=tmp_path, env=OURS_SKIPPED).stdout == "2\n"


@pytest.mark.quick
def test_nothing_of_plugins_is_read_at_start_up(tmp_path: Path) -> None:
    code = "import sys; print({'two', 'ckpt_patches.engine', 'importlib.metadata'} & {*sys.modules})"
    assert python("-c", code, tree=theirs(tmp_path)).stdout == "set()\n"


@pytest.mark.quick
def test_a_root_of_a_plugins_own_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "their_package").mkdir()
    (tmp_path / "their_package/__init__.py").touch()
    (tmp_path / "their_package/inner.py").write_text("def answer():\n    return 1\n")
    (tmp_path / "their_fixes.pth").write_text("import ckpt_patches; ckpt_patches.add_root('their_package', 'theirs')\n")
    text = FIX.format(module="their_package.inner", more="")
    distribution(tmp_path, "their-fixes", {"two": "two:fix"}, {"two.py": text})
    start = f"import site; site.addsitedir({str(tmp_path)!r})\n"
    code = "import their_package.inner as m; print(m.answer())"
    assert python("-c", start + code, tree=tmp_path).stdout == "2\n"
    assert python("-c", code, tree=tmp_path).stdout == "1\n"
    shown = python("-c", f"{start}from ckpt_patches.cli import main\nmain(['status'])", tree=tmp_path).stdout
    assert [line.split() for line in shown.splitlines() if line.startswith("two ")] == [["two", "active"]]


@pytest.mark.quick
def test_the_file_of_a_root_itself_is_edited(tmp_path: Path) -> None:
    """A plugin can edit the `__init__` of a root for which the project has no fix. Its import makes plugins load."""
    (tmp_path / "nvidia_resiliency_ext").mkdir()
    (tmp_path / "nvidia_resiliency_ext/__init__.py").write_text("def answer():\n    return 1\n")
    (tmp_path / "nvidia_resiliency_ext-0.4.1.dist-info").mkdir()
    text = FIX.format(module="nvidia_resiliency_ext", more="")
    distribution(tmp_path, "their-fixes", {"two": "two:fix"}, {"two.py": text})
    done = python("-c", "import nvidia_resiliency_ext as m; print(m.answer())", tree=tmp_path)
    assert done.stdout == "2\n"
    assert f"on nvidia-resiliency-ext 0.4.1 ({tmp_path}): two" in done.stderr


BROKEN = {
    "raises": ("broken:fix", "raise OSError('no licence')", "OSError: no licence"),
    "exits": ("broken:fix", "raise SystemExit(3)", "SystemExit: 3"),
    "no file": ("absent:fix", "", "No module named 'absent'"),
    "no fix": ("broken:fix", "fix = print", "found a builtin_function_or_method"),
    "name": (
        "broken:fix",
        FIX.format(module=OTHER, more="").replace("__name__", "'two'"),
        "the name of the fix's module",
    ),
    "no edits": ("broken:fix", "from ckpt_patches.engine.fix import Fix\nfix = Fix(__name__)", "with edits"),
    "root": ("broken:fix", FIX.format(module="numpy.core", more=""), "found numpy.core"),
    "requirement": ("broken:fix", FIX.format(module=OTHER, more=", requires=('torch~=2.8',)"), "found 'torch~=2.8'"),
    "dependency": ("broken:fix", FIX.format(module=OTHER, more=", depends_on=('three',)"), "depends on three"),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_said_and_stops_nobody(tmp_path: Path, case: str) -> None:
    place, text, reason = BROKEN[case]
    theirs(tmp_path)
    distribution(tmp_path, "broken-fixes", {"broken": place}, {"broken.py": text})
    done = python("-c", f"{ANSWER}\n{IS_PATCHED}", tree=tmp_path)
    assert done.stdout == "2\nTrue\n"
    (line,) = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert "the fix broken of broken-fixes 1.5 is NOT active" in line
    assert reason in line
    assert python("-c", ANSWER, tree=tmp_path, env={"RANK": "3"}).stderr == ""
    for rank in ("0", "3"):
        env = {"CKPT_PATCHES": "strict", "RANK": rank}
        stopped = python("-c", ANSWER, tree=tmp_path, env=env, check=False)
        assert (stopped.returncode, stopped.stdout) == (1, "")
        assert stopped.stderr.splitlines()[-1].startswith("ckpt_patches.errors.StrictModeError: the fix broken of")
    env = {"CKPT_PATCHES": "strict", "CKPT_PATCHES_SKIP": "broken"}
    assert python("-c", ANSWER, tree=tmp_path, env=env).stdout == "2\n"


@pytest.mark.quick
def test_a_name_that_is_taken_is_said(tmp_path: Path) -> None:
    theirs(tmp_path)
    (tmp_path / "theirs").mkdir()
    for file in ("theirs/two.py", "theirs/numpy2_product.py"):
        (tmp_path / file).write_text(FIX.format(module=OTHER, more=""))
    points = {"two": "theirs.two:fix", "numpy2_product": "theirs.numpy2_product:fix"}
    distribution(tmp_path, "z-fixes", points)
    done = python("-c", f"{ANSWER}\n{IS_PATCHED}", tree=tmp_path)
    assert done.stdout == "2\nTrue\n"
    first, second = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert "numpy2_product of z-fixes 1.5 is NOT active: training-checkpoint-patches has a fix of that name" in first
    assert "two of z-fixes 1.5 is NOT active: their-fixes 1.5 has a fix of that name" in second


@pytest.mark.quick
def test_a_plugin_that_imports_what_it_edits_is_reported(tmp_path: Path) -> None:
    theirs(tmp_path)
    (tmp_path / "two.py").write_text(f"import {OTHER}\n" + (tmp_path / "two.py").read_text())
    done = python("-c", ANSWER, tree=tmp_path)
    assert done.stdout == "1\n"
    (line,) = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert "the fix two is NOT active" in line


# Fixes that do not match


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "more", "state"),
    [
        ("def answer():\n    return 3\n", "", "NO MATCH"),
        (None, "", "NO MATCH"),
        (None, f", concerns='{OTHER}'", "not present"),
        ("def answer():\n    return 1\n", "", "active"),
        ("def answer():\n    return 1\n", ", requires=('torch>=2.8,<99', 'megatron-core<0.15')", "active"),
        ("def answer():\n    return 3\n", ", requires=('megatron-core<0.13',)", "not needed"),
        ("def answer():\n    return 1\n", ", requires=('no-such-distribution>=1',)", "not needed"),
        ("def answer():\n    return 1\n", ", requires=('odd>=1',)", "NO MATCH"),
        ("def answer():\n    return 1\n", ", requires=('unversioned>=1',)", "NO MATCH"),
    ],
)
def test_the_state_of_a_plugins_fix(tmp_path: Path, text: str | None, more: str, state: str) -> None:
    theirs(tmp_path, more=more)
    path = tmp_path.joinpath(*OTHER.split(".")).with_suffix(".py")
    path.unlink() if text is None else path.write_text(text)
    (tmp_path / "odd-1.dist-info").mkdir()
    (tmp_path / "odd-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: of-today\n")
    (tmp_path / "unversioned.py").touch()
    returncode, fixes = status(tmp_path)
    assert fixes["two"][0] == state
    assert returncode == (state == "NO MATCH")
    code = f"import {MODULE}; from ckpt_patches.startup import report; print(report())"
    running = python("-c", code, tree=tmp_path)
    assert ("WARNING" in running.stderr) is (state == "NO MATCH")
    assert ("two: not needed: it is for " in running.stdout) is (state == "not needed")


VERSIONS = st.builds(
    lambda release, *parts: ".".join(map(str, release)) + "".join(parts),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.sampled_from(["", "a0", "a1", "b0", "rc1"]),
    st.sampled_from(["", ".post1"]),
    st.sampled_from(["", ".dev2"]),
)


@pytest.mark.quick
@given(
    version=VERSIONS,
    local=st.sampled_from(["", "+cpu", "+gitab12.nv25.6"]),
    limit=VERSIONS.filter(lambda text: ".post" not in text),
)
def test_versions_are_compared_as_pip_does(version: str, local: str, limit: str) -> None:
    for sign in (">=", "<", "==", "!=", "<="):
        expected = SpecifierSet(f"{sign}{limit}").contains(Version(version + local), prereleases=True)
        assert _holds(version + local, sign, limit) is expected, (version, sign, limit)


@pytest.mark.quick
@pytest.mark.parametrize(
    "text",
    [
        "",
        "torch",
        "torch>=",
        "torch>=2.8,",
        "torch>=2.*",
        "torch>2.8",
        "torch>=2.8.post1",
        "torch 2.8",
        "Torch>=2",
        "a>=1;b",
    ],
)
def test_a_requirement_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected a requirement such as"):
        parse(text)


# The commands


@pytest.mark.quick
def test_the_commands_have_a_plugins_fix(tmp_path: Path) -> None:
    theirs(tmp_path)
    path = tmp_path.joinpath(*OTHER.split(".")).with_suffix(".py")
    before = path.read_bytes()

    def command(*arguments: str) -> str:
        return python("-m", "ckpt_patches", *arguments, tree=tmp_path).stdout

    assert "the answer is one" in command("list")
    assert command("explain", "two") == "Answer with two.\n"
    assert "-    return 1\n+    return 2\n" in command("diff", "two")
    assert "return 2" in command("show", OTHER)
    git = {f"GIT_{who}_{what}": "me@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    split = ("diff", "--split", str(tmp_path / "patches"), "--tree", str(tmp_path))
    python("-m", "ckpt_patches", *split, tree=tmp_path, env=git)
    (patch,) = tmp_path.glob("patches/*-two.patch")
    assert "Subject: [PATCH 2/2] Answer with two\n" in patch.read_text()
    command("apply", "two")
    assert path.read_text().endswith("return 2\n")
    assert python("-c", ANSWER, tree=tmp_path, env={"CKPT_PATCHES": "off"}).stdout == "2\n"
    assert python("-m", "ckpt_patches", "status", tree=tmp_path).stdout.count("applied in place") == 2
    command("revert", "two")
    assert path.read_bytes() == before
    (tmp_path / "two.md").write_text("# Two\n\nWhy it is two.\n")
    assert command("explain", "two").endswith("Why it is two.\n")


@pytest.mark.quick
def test_a_broken_plugin_is_an_error_of_status_and_a_warning_of_the_others(tmp_path: Path) -> None:
    theirs(tmp_path)
    distribution(tmp_path, "broken-fixes", {"broken": "absent:fix"})
    done = python("-m", "ckpt_patches", "status", tree=tmp_path, check=False)
    assert done.returncode == 1
    assert "error: the fix broken of broken-fixes 1.5 is NOT active" in done.stdout
    listed = python("-m", "ckpt_patches", "list", tree=tmp_path)
    assert listed.stderr.startswith("warning: the fix broken of broken-fixes 1.5 is NOT active")
    strict = python("-m", "ckpt_patches", "list", tree=tmp_path, env={"CKPT_PATCHES": "strict"}, check=False)
    assert strict.returncode == 2


# The example of docs/plugins.md, on real releases


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.12.3", {"skyrl_fp32_params": "active", "skyrl_loaded_step": "not present", "torch_save_format": "active"}),
        (
            newest("megatron-core"),
            {"skyrl_fp32_params": "active", "skyrl_loaded_step": "active", "torch_save_format": "not needed"},
        ),
    ],
)
def test_the_example_works(tmp_path: Path, version: str, expected: dict[str, str]) -> None:
    """The fixes for SkyRL and verl work without the project's own fixes, and their bugs appear without them."""
    env = {**on_release(version, tmp_path), **OURS_SKIPPED}
    done = python("-m", "ckpt_patches", "status", "--json", "--prove", tree=tmp_path, env=env, check=False)
    found = json.loads(done.stdout)
    assert {fix["name"]: fix["state"] for fix in found["fixes"] if fix["name"] in EXAMPLES} == expected
    proofs = {proof["name"]: proof["result"] for proof in found["proofs"]}
    assert proofs == {name: "works" for name, state in expected.items() if state == "active"}, found["proofs"]
    for name in proofs:
        program = tmp_path / "example_fixes" / "demos" / f"{name}.py"
        without = python(str(program), tree=tmp_path, env={**env, "CKPT_PATCHES": "off"}).stdout
        assert json.loads(without.splitlines()[-1])["bug"] is True


@pytest.mark.quick
def test_the_example_is_whole_on_the_page() -> None:
    page = (REPOSITORY / "docs" / "plugins.md").read_text()
    assert (EXAMPLE / "torch_save_format.py").read_text() in page
    assert all(f'{name} = "example_fixes.{name}:fix"' in page for name in EXAMPLES)
