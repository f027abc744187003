"""A fix's diff has upstream's style: upstream's formatters and linters, with upstream's configuration, change nothing.

The configurations are those of the main branches in August 2026: `pyproject.toml`, `.pylintrc` and
`.pre-commit-config.yaml` of Megatron-LM, `.style.yapf`, `.flake8` and `.pre-commit-config.yaml` of DeepSpeed,
`pyproject.toml` of nvidia-resiliency-ext and of apex, and torch's line length.
"""

import difflib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from ckpt_patches.engine import fix as fixes
from ckpt_patches.engine.diffs import upstream_test
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.plan import FilePlan, Outcome, TreePlan, plan_tree
from ckpt_patches.engine.registry import APEX, CORE, DEEPSPEED, FIXES, FOLDERS, NVRX, TORCH
from upstream import newest_affected, tree

pytestmark = pytest.mark.slow

BLACK = ["--line-length=100", "--skip-string-normalization", "--skip-magic-trailing-comma"]
ISORT = ["--profile=black", "--line-length=100", "--project=megatron", "--thirdparty=transformer_engine"]
NVRX_BLACK = ["--line-length=100", "--skip-string-normalization"]
# usort, which is what torch has, sorts as isort does without regard to case.
TORCH_BLACK = ["--line-length=88"]
TORCH_ISORT = ["--profile=black", "--dont-order-by-type", "--lines-after-imports=2", "--project=torch"]
NVRX_ISORT = ["--profile=black", "--line-length=100", "--project=nvidia_resiliency_ext"]
APEX_IGNORES = "E731,E741,E712,F403,E701,E711,F821,E722,E402,F401,F841,F405"
PYLINT = [
    "--disable=all",
    # Docstrings of public classes and functions, unused imports, long lines, possibly unbound names, print.
    "--enable=missing-class-docstring,missing-function-docstring,unused-import,line-too-long,"
    "possibly-used-before-assignment,bad-builtin",
    "--load-plugins=pylint.extensions.bad_builtin",
    "--bad-functions=print",
    "--max-line-length=100",
]
YAPF = ["--style={based_on_style: pep8, split_all_comma_separated_values: false, column_limit: 119}"]
FLAKE8 = ["--isolated", "--ignore=E,F403,F405,F541,F841,W", "--select=E9,F,W6"]

BLACK_AND_ISORT = {CORE: (BLACK, ISORT), NVRX: (NVRX_BLACK, NVRX_ISORT), TORCH: (TORCH_BLACK, TORCH_ISORT)}

# An import that a fix leaves unused: fixes for other releases use it.
LEFT_BY = ("torch_load_weights_only", "deepspeed.runtime.base_optimizer")
LEFT = Counter({"F401 'torch' imported but unused": 1})
# It adds to a statement that another fix also extends: each patch is formatted, but the series is not.
ALONE = "zero3_module_only"


def tool(name: str, *arguments: str | Path, status: Iterable[int] = (0,)) -> str:
    done = subprocess.run([sys.executable, "-m", name, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode in status, done.stderr
    return done.stdout


def added_lines(before: bytes, after: bytes) -> list[tuple[int, int]]:
    """The first and last line of each added or changed range; lines count from 1."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    return [(low + 1, high) for tag, _, _, low, high in matcher.get_opcodes() if tag in ("insert", "replace")]


def changes(before: str, after: str) -> Counter[str]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return Counter(line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))


def by_release() -> dict[tuple[str, str], list[str]]:
    """The fixes by the newest release with their bug. Formatting takes seconds, so each file is formatted once."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in FIXES:
        found.setdefault((fixes.package_of(name), newest_affected(name)[1]), []).append(name)
    return found


RELEASES = [pytest.param(*release, id="-".join(release)) for release in by_release()]


def planned(package: str, version: str, names: list[str]) -> TreePlan:
    """The plan with the files after a series of patches."""
    made = plan_tree(str(tree(DISTRIBUTIONS[package], version)), package, names, for_upstream=True)
    assert made.named(Outcome.APPLIES) == names
    return made


@pytest.mark.parametrize(("package", "version"), RELEASES)
def test_what_the_fixes_add_is_as_upstreams_tools_would_have_it(package: str, version: str, tmp_path: Path) -> None:
    names = by_release()[package, version]
    for together in ([name for name in names if name != ALONE], [name for name in names if name == ALONE]):
        for file in planned(package, version, together).files.values():
            check(package, file, tmp_path)


def check(package: str, file: FilePlan, folder: Path) -> None:
    original, patched = folder / "original.py", folder / f"{file.module.rpartition('.')[2]}.py"
    original.write_bytes(file.original)
    patched.write_bytes(file.patched)
    added = added_lines(file.original, file.patched)
    if package == APEX:
        check_as_apex(patched)
    elif package == DEEPSPEED:
        check_as_deepspeed(original, patched, added, LEFT if (*file.fixes, file.module) == LEFT_BY else Counter())
    else:
        check_by_black_and_isort(original, patched, added, *BLACK_AND_ISORT[package])


def test_megatrons_linter_finds_nothing_in_what_the_fixes_add(tmp_path: Path) -> None:
    """pylint finds nothing in the added lines. It runs once: most of its time goes into these files' imports."""
    added = {}
    for (_, version), names in (entry for entry in by_release().items() if entry[0][0] == CORE):
        for module, file in planned(CORE, version, names).files.items():
            path = tmp_path / f"{module.rpartition('.')[2]}_{version.replace('.', '_')}.py"
            path.write_bytes(file.patched)
            added[path.stem] = added_lines(file.original, file.patched)
    found = json.loads(tool("pylint", *PYLINT, "--output-format=json", *sorted(tmp_path.iterdir()), status=range(32)))
    assert found, "upstream's own code has some"
    assert [one for one in found if any(low <= one["line"] <= high for low, high in added[one["module"]])] == []


@pytest.mark.parametrize("package", FOLDERS)
def test_the_tests_that_go_with_them_are_too(package: str, tmp_path: Path) -> None:
    texts = dict(upstream_test(name) for name in FIXES if fixes.package_of(name) == package)
    files = {tmp_path / Path(path).name: text for path, text in texts.items()}
    for file, text in files.items():
        file.write_bytes(text)
        assert text.endswith(b"\n")
        assert [line for line in text.splitlines() if line != line.rstrip()] == []
    if package == APEX:
        check_as_apex(*files)
    elif package == DEEPSPEED:
        assert said_by_flake8(*files) == Counter()
        tool("yapf", "-i", *YAPF, *files)
    else:  # Megatron's pylint skips tests
        for name, options in zip(("black", "isort"), BLACK_AND_ISORT[package], strict=True):
            tool(name, "-q", *options, *files)
    assert {file: file.read_bytes() for file in files} == files


def check_as_apex(*paths: Path) -> None:
    """Apex formats all of its files, and ignores the rules that they break."""
    tool("ruff", "format", "--isolated", "--line-length=100", "--check", *paths)
    tool("ruff", "check", "--isolated", "--line-length=100", "--select=E4,E7,E9,F", f"--ignore={APEX_IGNORES}", *paths)


def check_by_black_and_isort(
    original: Path, patched: Path, added: list[tuple[int, int]], black: list[str], isort: list[str]
) -> None:
    assert formatted("black", black, patched, added) == []
    before, after = (changes(p.read_text(), tool("isort", *isort, "--stdout", p)) for p in (original, patched))
    assert after - before == Counter()


def check_as_deepspeed(original: Path, patched: Path, added: list[tuple[int, int]], left: Counter[str]) -> None:
    assert formatted("yapf", YAPF, patched, added) == []
    before, after = (said_by_flake8(path) for path in (original, patched))
    assert after - before == left
    text = patched.read_text()
    assert [line for line in text.splitlines() if line != line.rstrip() and line not in original.read_text()] == []
    assert text.endswith("\n")


def formatted(name: str, options: list[str], path: Path, added: list[tuple[int, int]]) -> list[str]:
    """What a formatter would change in these lines. Its changes to other lines concern existing code."""
    copy = Path(shutil.copy(path, path.with_name("formatted.py")))
    if name == "black":
        tool(name, "-q", *options, *(f"--line-ranges={low}-{high}" for low, high in added), copy)
    else:
        tool(name, "-i", *options, *(f"--lines={low}-{high}" for low, high in added), copy)
    lines, wanted = path.read_text().splitlines(), copy.read_text().splitlines()
    opcodes = difflib.SequenceMatcher(None, lines, wanted, autojunk=False).get_opcodes()
    return [
        f"{begin + 1}: {lines[begin:end]} -> {wanted[low:high]}"
        for tag, begin, end, low, high in opcodes
        if tag != "equal" and any(begin < last and end >= first for first, last in added)
    ]


def said_by_flake8(*paths: Path) -> Counter[str]:
    lines = tool("flake8", *FLAKE8, "--format=%(code)s %(text)s", *paths, status=(0, 1)).splitlines()
    return Counter(re.sub(r"line \d+", "line", line) for line in lines)
