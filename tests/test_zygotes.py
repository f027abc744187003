"""Programs run as forks of a process with their imports; only the result of a program leaves it."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import upstream
import zygotes
from upstream import TIMEOUT

Run = Callable[..., "subprocess.CompletedProcess[str]"]
IMPORTED = ("imported", "json")


@pytest.fixture(params=["started", "forked"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a program with this text in a fork of a process that has imported a test module, which prints `imported`.

    That process is started, or forked from another one.
    """
    monkeypatch.setattr(zygotes, "_lifelines", OrderedDict())
    monkeypatch.setattr(zygotes, "TORCH", ("json",))
    monkeypatch.setattr(zygotes, "WITH_TORCH", (IMPORTED,) if request.param == "forked" else ())
    monkeypatch.setattr(zygotes, "PER_RUN", ("MINE", "GIVEN"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imported.py").write_text("print('imported')\nkept = []\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CKPT_PATCHES": "off", "BASE": str(tmp_path)}

    def run(text: str, *arguments: str, timeout: float = TIMEOUT, **variables: str) -> Any:
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(text))
        return zygotes.run(
            program, arguments, environment={**environment, **variables}, timeout=timeout, imports=IMPORTED
        )

    yield run
    zygotes.end_all()


def test_a_program_finds_what_it_would_in_an_interpreter_of_its_own(run: Run, tmp_path: Path) -> None:
    text = """
        import json, os, sys
        main = sys.modules["__main__"]
        found = [sys.argv, sys.path, os.getcwd(), __name__, __file__, main.__file__, main is sys.modules[__name__]]
        variables = {name: os.environ.get(name) for name in ("MINE", "BASE", "PYTHONPATH", "CKPT_PATCHES")}
        print(json.dumps([*found, sorted(globals()), variables, sys.stdin.read()]))
    """
    done = run(text, "a", "b c", MINE="1")
    (tmp_path / "imported.py").unlink()  # a new interpreter would print "imported" again
    fresh = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), "a", "b c"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "CKPT_PATCHES": "off", "BASE": str(tmp_path), "MINE": "1"},
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


def test_what_was_imported_is_not_imported_again(run: Run, tmp_path: Path) -> None:
    run("")
    (tmp_path / "imported.py").unlink()
    assert run("import imported; print(imported.kept)").stdout == "imported\n[]\n"


def test_nothing_of_one_program_reaches_the_next(run: Run, tmp_path: Path) -> None:
    """Changes to modules, variables, arguments, the folder and the main module stay in their program."""
    text = """
        import imported, os, sys
        os.environ["LEFT"] = "behind"
        os.chdir("/")
        sys.path.append("/left")
        imported.kept.append(1)
        left = 1
    """
    assert run(text, "left", GIVEN="1").returncode == 0
    text = """
        import imported, os, sys
        assert "left" not in globals()
        variables = [os.environ.get(name) for name in ("LEFT", "GIVEN")]
        print(imported.kept, variables, sys.argv[1:], "/left" in sys.path, os.getcwd())
    """
    done = run(text)
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
    run: Run, tmp_path: Path, text: str, status: int, said: str
) -> None:
    done = run(text)
    assert done.returncode == status
    assert said in (done.stderr.splitlines() or [""])[-1]
    assert run("print('next')").stdout.splitlines()[1:] == ["next"]


def test_a_program_ends_as_an_interpreter_does(run: Run, tmp_path: Path) -> None:
    """Exit functions are called, threads are joined, and all output arrives."""
    text = """
        import atexit, threading, time
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    """
    assert run(text).stdout.split("\n") == ["imported", "thread", "at exit", ""]


def test_all_that_a_program_and_its_children_print_is_captured(run: Run, tmp_path: Path) -> None:
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
    done = run(text)
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
    """Whether they end in time."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if not any(running(process) for process in processes):
            return True
        time.sleep(0.02)
    return False


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends between open and read
        return False


def test_a_program_that_takes_too_long_is_killed_with_its_children(run: Run) -> None:
    run("")  # the limit then covers only the program
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        run(ENDLESS, timeout=3)
    assert raised.value.stdout is not None
    assert gone(*map(int, raised.value.stdout.split()))
    assert run("print('next')").stdout.splitlines()[1:] == ["next"]


def test_what_a_program_leaves_behind_is_killed(run: Run) -> None:
    done = run("import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)")
    assert gone(int(done.stdout.split()[1]))


PARENTS = "import os; print(os.getppid(), open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])"


def test_one_process_serves_all_with_its_imports_and_environment(run: Run) -> None:
    """One process serves equal imports and environments, except for variables that no import reads."""
    one, same, other = (run(PARENTS, **more).stdout.split()[-1] for more in ({}, {"MINE": "1"}, {"OTHER": "1"}))
    assert one == same != other
    assert parent_of(int(one)) != os.getpid()  # a test process may need to know all of its children
    zygotes.end_all()
    assert gone(int(one), int(other))
    assert run(PARENTS).stdout.split()[-1] != one


def test_no_more_than_a_few_are_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few processes are kept: the least recently used one ends."""
    monkeypatch.setattr(zygotes, "AT_ONCE", 3)  # one may be the base of the others
    used = [run(PARENTS, OTHER=str(number)).stdout.split()[-1] for number in range(4)]
    assert gone(int(used[0]))
    assert run(PARENTS, OTHER="3").stdout.split()[-1] == used[3]


@pytest.mark.parametrize("killed", ["who asked", "who waits"])
def test_nothing_outlives_who_asked(killed: str, tmp_path: Path) -> None:
    """No process is left, even if the caller, or the process that waits for the program, is killed."""
    (tmp_path / "program.py").write_text(textwrap.dedent(ENDLESS))
    text = """
        import os, pathlib, zygotes
        run = {"environment": {**os.environ, "OWN": os.getcwd()}, "timeout": 1000, "imports": ("json",)}
        zygotes.run(pathlib.Path("program.py").absolute(), (), **run)
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(zygotes.__file__).parent)}
    command = [sys.executable, "-c", textwrap.dedent(text)]
    asks = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    started = tmp_path / "started"
    while not started.exists() or not started.read_text():
        assert asks.poll() is None
        time.sleep(0.02)
    program, child = map(int, started.read_text().split())
    waits = parent_of(program)
    os.kill(asks.pid if killed == "who asked" else waits, signal.SIGKILL)
    if killed == "who waits":  # only it knew the program's children
        os.kill(child, signal.SIGKILL)
    assert gone(waits, program, child)
    asks.wait()


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ImportError('not here')", "ImportError: not here"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(5,), daemon=True).start()", "no thread"),
    ],
)
def test_imports_that_fail_or_start_threads_are_refused(tmp_path: Path, text: str, said: str) -> None:
    """Such imports are refused, and the program runs in its own interpreter."""
    (tmp_path / "imported.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(zygotes.NotStarted, match=said):
        zygotes.connect(environment, ["imported"])
    (tmp_path / "program.py").write_text("import os; print(os.getppid())")
    done = zygotes.run(tmp_path / "program.py", (), environment=environment, timeout=TIMEOUT, imports=("imported",))
    assert done.stdout == f"{os.getpid()}\n"


def test_without_forks_a_program_has_an_interpreter_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygotes, "forks", False)
    assert run("import os, imported; print(os.getppid())").stdout.split() == ["imported", str(os.getpid())]


WHO_LOADED = """
import json, sys
import deepspeed.checkpoint.ds_to_universal as converter, deepspeed.utils as other
assert "trainers.deepspeed_training" in sys.modules  # imported before
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
