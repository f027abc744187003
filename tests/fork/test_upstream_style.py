"""The series for upstream has upstream's style: its own formatters and linters find nothing that was not there before.

The configurations are those of the main branches in August 2026: `pyproject.toml`, `.pylintrc` and
`.pre-commit-config.yaml` of Megatron-LM, `.style.yapf`, `.flake8` and `.pre-commit-config.yaml` of DeepSpeed. As in
upstream's checks, each file is formatted as a whole.
"""

import difflib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ckpt_patches.engine.diffs import upstream_test
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.plan import Outcome, plan_tree
from ckpt_patches.engine.registry import CORE, DEEPSPEED
from upstream import newest, tree

pytestmark = pytest.mark.exhaustive

BLACK = ["-q", "--line-length=100", "--skip-string-normalization", "--skip-magic-trailing-comma", "-"]
ISORT = ["--profile=black", "--line-length=100", "--project=megatron", "--thirdparty=transformer_engine", "-"]
PYLINT = [
    "--disable=all",
    # Docstrings of public classes and functions, unused imports, long lines, possibly unbound names, print.
    "--enable=missing-class-docstring,missing-function-docstring,unused-import,line-too-long,"
    "possibly-used-before-assignment,bad-builtin",
    "--load-plugins=pylint.extensions.bad_builtin",
    "--bad-functions=print",
    "--max-line-length=100",
    "--msg-template={path} {symbol} {obj} {msg}",
]
YAPF = ["--style={based_on_style: pep8, split_all_comma_separated_values: false, column_limit: 119}"]
FLAKE8 = ["--isolated", "--ignore=E,F403,F405,F541,F841,W", "--select=E9,F,W6", "--format=%(path)s %(code)s %(text)s"]


@pytest.mark.parametrize("package", [CORE, DEEPSPEED])
def test_upstreams_tools_find_nothing_new_in_the_series(package: str, tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    made = plan_tree(str(tree(DISTRIBUTIONS[package], newest(DISTRIBUTIONS[package]))), package, for_upstream=True)
    assert len(made.named(Outcome.APPLIES)) > 10
    for module, file in made.files.items():
        for folder, text in ((before, file.original), (after, file.patched)):
            folder.mkdir(exist_ok=True)
            (folder / f"{module.replace('.', '_')}.py").write_bytes(text)
    assert complaints(package, after) - complaints(package, before) == Counter()
    tests = tmp_path / "tests"
    tests.mkdir()
    for path, text in map(upstream_test, made.named(Outcome.APPLIES)):
        (tests / Path(path).name).write_bytes(text)
    assert complaints(package, tests, are_tests=True) == Counter()


def complaints(package: str, folder: Path, *, are_tests: bool = False) -> Counter[str]:
    """What upstream's tools would change, and what they find, in the files of a folder."""
    if package == DEEPSPEED:
        return formatted(folder, "yapf", YAPF) + linted(folder, "flake8", FLAKE8) + whitespace(folder)
    found = formatted(folder, "black", BLACK) + formatted(folder, "isort", ISORT) + whitespace(folder)
    return found if are_tests else found + linted(folder, "pylint", PYLINT)  # Megatron's pylint skips tests


def formatted(folder: Path, name: str, options: list[str]) -> Counter[str]:
    """The lines that a formatter would remove and add, each after the file's name."""
    found: Counter[str] = Counter()
    for path in sorted(folder.iterdir()):
        text = path.read_text()
        done = subprocess.run([sys.executable, "-m", name, *options], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = difflib.unified_diff(text.splitlines(), done.stdout.splitlines(), n=0, lineterm="")
        found.update(f"{path.name} {name} {line}" for line in lines if re.match(r"[+-](?![+-]{2})", line))
    return found


def linted(folder: Path, name: str, options: list[str]) -> Counter[str]:
    """What a linter says, without line numbers."""
    paths = sorted(path.name for path in folder.iterdir())
    command = [sys.executable, "-m", name, *options, *paths]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    return Counter(re.sub(r"line \d+", "line", line) for line in said.splitlines() if line.startswith(tuple(paths)))


def whitespace(folder: Path) -> Counter[str]:
    """Lines that end in spaces, and files that do not end in a line break."""
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    lines = (f"{name} {line}" for name, text in texts.items() for line in text.splitlines() if line != line.rstrip())
    return Counter([*lines, *(name for name, text in texts.items() if not text.endswith("\n"))])
