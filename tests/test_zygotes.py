"""Programs as forks of a process that has imported: nothing of one reaches another, or who asked, but its result."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import upstream
import zygotes
from zygotes import NotStarted, Zygote


@pytest.fixture(params=["started", "forked"])
def zygote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Zygote]:
    """One that has imported a module of the test's own, which says so, and `json`; started, or forked from a base."""
    (tmp_path / "imported.py").write_text("print('imported')\nkept = []\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CKPT_PATCHES": "off"}
    base = None
    if request.param == "forked":
        base = Zygote({**zygotes.environment_of_base(environment), "BASE": str(tmp_path)}, ["json"])
    found = Zygote(environment, ["imported", "json"], base)
    yield found
    found.end()
    if base is not None:
        base.end()


def run(
    zygote: Zygote, folder: Path, text: str, *arguments: str, timeout: float = 30, **variables: str | None
) -> "subprocess.CompletedProcess[str]":
    """Run a program of this text, in the folder."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(text))
    return zygote.run([str(program), *arguments], cwd=str(folder), environment=variables, timeout=timeout)


def test_a_program_finds_what_it_would_in_an_interpreter_of_its_own(zygote: Zygote, tmp_path: Path) -> None:
    text = """
        import json, os, sys
        main = sys.modules["__main__"]
        found = [sys.argv, sys.path, os.getcwd(), __name__, __file__, main.__file__, main is sys.modules[__name__]]
        variables = {name: os.environ.get(name) for name in ("MINE", "BASE", "PYTHONPATH", "CKPT_PATCHES")}
        print(json.dumps([*found, sorted(globals()), variables, sys.stdin.read()]))
    """
    done = run(zygote, tmp_path, text, "a", "b c", MINE="1")
    (tmp_path / "imported.py").unlink()  # an interpreter would say so again
    fresh = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), "a", "b c"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "CKPT_PATCHES": "off", "MINE": "1"},
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
    )
    assert done.stdout.splitlines()[0] == "imported"
    found, expected = (json.loads(line.splitlines()[-1]) for line in (done.stdout, fresh.stdout))
    names = set(expected.pop(7)) - {"__annotations__", "__cached__"}
    assert names == set(found.pop(7)) - {"__annotations__"}
    assert found == expected
    assert (done.returncode, done.stderr) == (0, "")


def test_what_was_imported_is_not_imported_again(zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "imported.py").unlink()
    assert run(zygote, tmp_path, "import imported; print(imported.kept)").stdout == "imported\n[]\n"


def test_nothing_of_one_program_reaches_the_next(zygote: Zygote, tmp_path: Path) -> None:
    """Neither what it changed in a module, nor its variables, arguments, folder or main module."""
    text = """
        import imported, os, sys
        os.environ["LEFT"] = "behind"
        os.chdir("/")
        sys.path.append("/left")
        imported.kept.append(1)
        left = 1
    """
    assert run(zygote, tmp_path, text, "left", GIVEN="1").returncode == 0
    text = """
        import imported, os, sys
        assert "left" not in globals()
        variables = [os.environ.get(name) for name in ("LEFT", "GIVEN")]
        print(imported.kept, variables, sys.argv[1:], "/left" in sys.path, os.getcwd())
    """
    done = run(zygote, tmp_path, text, GIVEN=None)
    assert done.stdout.splitlines()[1:] == [f"[] [None, None] [] False {tmp_path}"], done.stderr


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no"),
        ("raise ValueError('this')", 1, "ValueError: this"),
        ("def f(:\n", 1, "SyntaxError"),
        ("import os; os._exit(7)", 7, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
    ],
)
def test_how_a_program_ends_is_said_and_the_next_one_runs(
    zygote: Zygote, tmp_path: Path, text: str, status: int, said: str
) -> None:
    done = run(zygote, tmp_path, text)
    assert done.returncode == status
    assert said in (done.stderr.splitlines() or [""])[-1]
    assert run(zygote, tmp_path, "print('next')").stdout.splitlines()[1:] == ["next"]


def test_a_program_ends_as_an_interpreter_does(zygote: Zygote, tmp_path: Path) -> None:
    """What is registered for the end is called, a thread is waited for, and what is printed arrives."""
    text = """
        import atexit, threading, time
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    """
    assert run(zygote, tmp_path, text).stdout.split("\n") == ["imported", "thread", "at exit", ""]


def test_all_that_a_program_and_its_children_print_is_captured(zygote: Zygote, tmp_path: Path) -> None:
    text = """
        import os, subprocess, sys
        print("x" * 1_000_000)
        print("error", file=sys.stderr)
        os.write(1, b"past Python\\n")
        subprocess.run(["sh", "-c", "echo child; echo its error >&2"])
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        else:
            print("fork")
    """
    done = run(zygote, tmp_path, text)
    assert {len(line) for line in done.stdout.splitlines() if line[0] == "x"} == {1_000_000}
    assert {"past Python", "child", "fork"} < set(done.stdout.splitlines())
    assert done.stderr.splitlines() == ["error", "its error"]


ENDLESS = """
    import os, subprocess, time
    child = subprocess.Popen(["sleep", "1000"])
    print(os.getpid(), child.pid, flush=True)
    open("started", "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(1000)
"""


def gone(*processes: int) -> bool:
    """Whether they end within some seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(running(process) for process in processes):
            return True
        time.sleep(0.02)
    return False


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_program_that_takes_too_long_is_killed_with_its_children(zygote: Zygote, tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        run(zygote, tmp_path, ENDLESS, timeout=1)
    assert raised.value.stdout is not None
    assert gone(*map(int, raised.value.stdout.split()[1:]))
    assert run(zygote, tmp_path, "print('next')").stdout.splitlines()[1:] == ["next"]


def test_what_a_program_leaves_behind_is_killed(zygote: Zygote, tmp_path: Path) -> None:
    done = run(zygote, tmp_path, "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)")
    assert gone(int(done.stdout.split()[1]))


# Asks for the process with these imports; then runs the program that is named.
WHO_ASKS = """
import os, sys, zygotes
zygote = zygotes.Zygote({**os.environ, "TEST": sys.argv[3]}, ["json"])
print(zygote.pid, zygote.ancestor, flush=True)
sys.stdin.readline()
done = zygote.run([sys.argv[1]], cwd=sys.argv[2], environment={}, timeout=1000)
print(done.stdout, flush=True)
"""


class WhoAsks:
    """Another process of this run of the tests, which asks for a program to be run."""

    def __init__(self, folder: Path, text: str) -> None:
        program = folder / "program.py"
        program.write_text(textwrap.dedent(text))
        path = str(Path(zygotes.__file__).parent)
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        self.process = subprocess.Popen(
            [sys.executable, "-c", WHO_ASKS, str(program), str(folder), folder.name],
            env={**os.environ, "PYTHONPATH": path, "PYTEST_XDIST_TESTRUNUID": run},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.zygote, self.ancestor = map(int, self.process.stdout.readline().split())


@pytest.mark.parametrize("killed", ["who asked", "zygote"])
def test_nothing_outlives_who_asked_also_when_that_is_killed(killed: str, tmp_path: Path) -> None:
    asks = WhoAsks(tmp_path, ENDLESS)
    assert asks.process.stdin is not None
    asks.process.stdin.write("\n")
    asks.process.stdin.flush()
    started = tmp_path / "started"
    deadline = time.monotonic() + 10
    while not started.exists() or not started.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    program, child = map(int, started.read_text().split())
    os.kill(asks.process.pid if killed == "who asked" else asks.zygote, signal.SIGKILL)
    if killed == "zygote":  # which alone knew of the program's children
        os.kill(child, signal.SIGKILL)
    assert gone(asks.zygote, program, child)
    asks.process.kill()
    asks.process.communicate()
    assert gone(asks.ancestor)


def test_all_processes_of_a_run_share_the_imports_and_none_depends_on_another(tmp_path: Path) -> None:
    first = WhoAsks(tmp_path, "print('ran')")
    second = WhoAsks(tmp_path, "print('ran')")
    assert first.ancestor == second.ancestor
    assert first.process.communicate("\n")[0].strip() == "ran"
    assert gone(first.zygote, first.ancestor)
    third = WhoAsks(tmp_path, "print('ran')")
    assert third.ancestor != first.ancestor
    for process in (second.process, third.process):
        assert process.communicate("\n")[0].strip() == "ran"
    assert gone(second.zygote, third.zygote, third.ancestor)


def test_it_is_no_child_of_who_asked(zygote: Zygote, tmp_path: Path) -> None:
    """Who may have to know that there is none left of some other kind."""
    assert run(zygote, tmp_path, "").returncode == 0
    assert {parent_of(zygote.pid), parent_of(zygote.ancestor)} == {zygote.ancestor, parent_of(zygote.ancestor)}
    assert parent_of(zygote.ancestor) != os.getpid()


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_process_that_is_gone_is_said(zygote: Zygote, tmp_path: Path) -> None:
    os.kill(zygote.pid, signal.SIGKILL)
    assert gone(zygote.pid)
    with pytest.raises((RuntimeError, ConnectionError)):
        run(zygote, tmp_path, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ImportError('not here')", "ImportError: not here"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(5,), daemon=True).start()", "no thread"),
    ],
)
def test_imports_that_fail_or_start_threads_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "imported.py").write_text(text)
    with pytest.raises(NotStarted, match=said):
        Zygote({**os.environ, "PYTHONPATH": str(tmp_path)}, ["imported"])


# Which process runs a program

PROGRAM = "import os; print(os.getppid(), os.environ.get('MINE'), os.environ.get('MASTER_PORT'))"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """One that says who its parent is and what is set."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def parent(program: Path, imports: tuple[str, ...] = ("json",), **variables: str) -> int:
    environment = {**os.environ, **variables, "TEST": str(program)}
    done = zygotes.run(program, (), environment=environment, timeout=30, imports=imports)
    found, *values = done.stdout.split()
    assert values == [variables.get(name, "None") for name in ("MINE", "MASTER_PORT")]
    return int(found)


def test_one_process_serves_all_with_its_imports_and_environment(program: Path) -> None:
    """But for what no import reads."""
    first = parent(program, MASTER_PORT="1")
    assert parent(program) == parent(program, MASTER_PORT="2", PYTEST_XDIST_WORKER="gw7") == first
    other = parent(program, MINE="1")
    assert other != first
    assert parent(program, MINE="1") == other
    assert parent(program, imports=("json", "ast")) not in (first, other)


def test_without_imports_and_where_they_fail_a_program_has_an_interpreter_of_its_own(program: Path) -> None:
    assert parent(program) != os.getpid()
    assert parent(program, imports=()) == os.getpid()
    assert parent(program, imports=("no_such_module",)) == os.getpid()


def test_no_more_than_a_few_are_kept(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was not asked for longest goes."""
    monkeypatch.setattr(zygotes, "AT_ONCE", 2)
    monkeypatch.setattr(zygotes, "_zygotes", type(zygotes._zygotes)())
    first, second = parent(program, MINE="1"), parent(program, MINE="2")
    assert parent(program, MINE="1") == first
    parent(program, MINE="3")
    assert gone(second)
    assert parent(program, MINE="1") == first
    zygotes.end_all()
    assert gone(first)


WHO_LOADED = """
import json, sys
import deepspeed.checkpoint.ds_to_universal as converter, deepspeed.utils as other
assert "ckpt_patches.demo.deepspeed_training" in sys.modules  # imported before
finders = [type(finder).__name__ for finder in sys.meta_path]
loaders = [type(module.__loader__).__name__ for module in (converter, other)]
print(json.dumps({"finder": "PatchFinder" in finders, "loaders": loaders, "file": converter.__file__}))
"""


@pytest.mark.parametrize(
    ("delivery", "finder", "loader"),
    [("none", False, "SourceFileLoader"), ("hook", True, "PatchedLoader"), ("in place", False, "SourceFileLoader")],
)
def test_the_real_hook_has_loaded_what_a_program_finds_and_nothing_without_it(
    delivery: str, finder: bool, loader: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(WHO_LOADED)
    tree = upstream.tree("deepspeed", "0.16.2")
    found = upstream.run_json(program, tree=tree, delivery=delivery, imports=zygotes.DEEPSPEED)
    root = upstream.in_place(tree) if delivery == "in place" else tree
    expected = str(root / "deepspeed" / "checkpoint" / "ds_to_universal.py")
    assert found == {"finder": finder, "loaders": [loader, "SourceFileLoader"], "file": expected}


def test_every_program_of_the_table_is_there() -> None:
    assert [name for name in zygotes.IMPORTS if not (zygotes.PROGRAMS / f"{name}.py").exists()] == []
