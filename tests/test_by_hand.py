"""A failing test prints the command that runs its program again; `--no-forks` runs each in a new interpreter."""

import re
import subprocess

import pytest

import by_hand

pytest_plugins = ["pytester"]

TESTS = """
import os
import upstream

def test_passes(tmp_path):
    upstream.run("a_program", "not this", tree=tmp_path)

def test_fails(tmp_path):
    upstream.run("a_program", "it's", tree=tmp_path / "a tree", delivery="hook", env={"MINE": "1 2"}, imports=["json"])

def test_runs_nothing():
    assert False
"""
PROGRAM = """
import json, os, sys
names = ("MINE", "CKPT_PATCHES", "RANK", "PYTHONPATH")
print(json.dumps([sys.argv[1:], os.path.isabs(sys.executable), *map(os.environ.get, names)]), os.getppid())
sys.exit("it failed" if "it's" in sys.argv else 0)
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(by_hand.REPOSITORY / "tests"))
    monkeypatch.setenv("RANK", "3")
    conftest = (by_hand.REPOSITORY / "tests" / "conftest.py").read_text()
    pytester.makeconftest(f"{conftest}\n\nimport upstream\nupstream.PROGRAMS = Path({str(pytester.path)!r})\n")
    (pytester.path / "a_program.py").write_text(PROGRAM)
    pytester.makepyfile(TESTS)
    return pytester


def printed(text: str) -> str:
    """The program's output without its parent's process ID."""
    (line,) = set(re.findall(r"^(?:E\s+)?(\[.*\]) \d+$", text, re.MULTILINE))
    return str(line)


def test_the_command_of_a_failing_test_runs_its_program(project: pytest.Pytester) -> None:
    report = project.runpytest_subprocess("--tb=short").stdout.str()
    (command,) = re.findall(r"^env .*$", report, re.MULTILINE)
    assert report.count("the last program of this test, from the repository root") == 1
    assert str(by_hand.REPOSITORY) + "/" not in command.replace(str(project.path), "")
    assert not re.search(r"PYTEST|XDG_|HOME=|HOSTNAME", command)
    again = subprocess.run(command, shell=True, cwd=by_hand.REPOSITORY, text=True, capture_output=True)
    assert (again.returncode, again.stderr.strip()) == (1, "it failed")
    assert again.stdout.split("] ")[0].replace(str(by_hand.REPOSITORY) + "/", "") + "]" == printed(report).replace(
        str(by_hand.REPOSITORY) + "/", ""
    )


@pytest.mark.parametrize("options", [(), ("--no-forks",)])
def test_no_forks(options: tuple[str, ...], project: pytest.Pytester) -> None:
    text = """
        import os, upstream

        def test_parent(tmp_path, request):
            found = upstream.run("a_program", tree=tmp_path, imports=["json"]).stdout.split()[-1]
            assert (int(found) == os.getpid()) is request.config.getoption("--no-forks")
    """
    project.makepyfile(test_parent=text)
    project.runpytest_subprocess("test_parent.py", *options).assert_outcomes(passed=1)
