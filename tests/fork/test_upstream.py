"""The helpers in upstream.py select, install once, run, and report failures."""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import upstream
from trainers import ranks

NEWEST = upstream.newest("megatron-core")


def versions(parameters: list[Any]) -> list[str]:
    return [parameter.id for parameter in parameters]


@pytest.fixture(autouse=True)
def no_main_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*upstream.MAIN_VARIABLES.values(), *upstream.CHECKOUT_VARIABLES.values()):
        monkeypatch.delenv(variable, raising=False)


def test_default_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "every_release", False)
    assert versions(upstream.releases("megatron-core")) == ["0.12.0", NEWEST]
    assert versions(upstream.releases("megatron-core", newest="0.14.0")) == ["0.12.0", "0.14.0"]
    assert versions(upstream.releases("deepspeed", newest="0.16.2")) == ["0.15.0", "0.16.2"]


def test_all_releases_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "every_release", True)
    found = upstream.releases("torch", oldest="2.12.0", newest=upstream.INSTALLED_TORCH)
    assert versions(found) == ["2.12.0", upstream.INSTALLED_TORCH]
    reasons = {parameter.id: [mark.kwargs["reason"] for mark in parameter.marks] for parameter in found}
    assert reasons == {"2.12.0": ["not the installed torch; `make stacks` runs it"], upstream.INSTALLED_TORCH: []}


def test_only_the_fixes_for_an_unsupported_release_are_tested_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "every_release", False)
    assert versions(upstream.affected("zarr_create_synchronizer"))[0] == upstream.OLDEST_REPORTED
    assert versions(upstream.affected("torch_adam_step"))[0] == "0.12.0"


def test_generated_cases_are_the_same_in_every_default_run() -> None:
    assert hypothesis.settings().derandomize is not upstream.all_releases()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, configured as megatron-core's main branch."""
    folder = tmp_path / "any name"
    folder.mkdir()
    monkeypatch.setenv("CKPT_PATCHES_TEST_MEGATRON_MAIN", str(folder))
    return folder


def test_a_main_branch_is_the_last_of_a_range_without_end(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "every_release", False)
    assert versions(upstream.releases("megatron-core")) == ["0.12.0", NEWEST, "main"]
    assert versions(upstream.releases("megatron-core", oldest=NEWEST)) == [NEWEST, "main"]
    assert versions(upstream.releases("megatron-core", newest="0.14.0")) == ["0.12.0", "0.14.0"]
    assert "main" not in versions(upstream.releases("deepspeed"))
    assert all(upstream.numbers(release.version) < upstream.numbers("main") for release in upstream.RELEASES)
    assert upstream.tree("megatron-core", "main") == checkout
    assert upstream.main_branch("megatron-core") == checkout


def test_a_main_branch_that_is_not_named_has_no_tree() -> None:
    with pytest.raises(ValueError, match="found deepspeed main"):
        upstream.tree("deepspeed", "main")


def test_a_checkout_that_is_not_there_is_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_PATCHES_TEST_MEGATRON_MAIN", str(checkout / "none"))
    with pytest.raises(ValueError, match=r"MEGATRON_MAIN: expected a checkout, found no folder .*none;"):
        upstream.releases("megatron-core")


def test_what_is_on_no_package_index_is_a_checkout_or_skips(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions(upstream.releases("apex")) == ["0.1"]
    assert not upstream.is_available("apex")
    with pytest.raises(pytest.skip.Exception, match="CKPT_PATCHES_TEST_APEX names no checkout"):
        upstream.tree("apex", "0.1")
    monkeypatch.setenv("CKPT_PATCHES_TEST_APEX", str(checkout))
    assert versions(upstream.releases("apex")) == ["0.1"]  # and no main branch in addition
    assert upstream.is_available("apex")
    assert upstream.tree("apex", "0.1") == checkout
    with pytest.raises(ValueError, match="found apex main"):
        upstream.tree("apex", "main")


def test_no_release_stands_twice_in_the_table() -> None:
    names = [(release.distribution, release.version) for release in upstream.RELEASES]
    assert len(names) == len(set(names))
    assert not [release for release in upstream.RELEASES if release.default and release.note]


FAKE_PIP = """
import pathlib, sys, time
target = pathlib.Path(sys.argv[sys.argv.index("--target") + 1])
with open(pathlib.Path(__file__).parent / "calls", "a") as calls:
    calls.write(sys.argv[-1] + chr(10))
time.sleep(0.3)
if "0.12.1" in sys.argv[-1]:
    sys.exit("no such release")
target.mkdir()
(target / "package.py").write_text("")
"""

ASK_FOR_TREE = "import sys, upstream; print(upstream.tree(*sys.argv[1:]))"


def ask(folder: Path, *release: str) -> "subprocess.Popen[str]":
    """Ask for a tree in another process, in which pip is a program that logs its calls."""
    (folder / "pip.py").write_text(FAKE_PIP)
    path = os.pathsep.join([str(folder), str(upstream.REPOSITORY / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "CKPT_PATCHES_TREES": str(folder / "trees")}
    command = [sys.executable, "-c", ASK_FOR_TREE, *release]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_torch_for_another_python_is_installed_once_by_that_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_PATCHES_TREES", str(tmp_path / "trees"))
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{FAKE_PIP}")
    python.chmod(0o755)
    for _ in range(2):
        upstream.install_torch("3.9", str(python))
    assert [path.name for path in upstream.torch_folder("3.9").iterdir()] == ["package.py"]
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_a_torch_that_cannot_be_had_is_named_with_pips_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_PATCHES_TREES", str(tmp_path / "trees"))
    monkeypatch.setattr(upstream, "INSTALLED_TORCH", "0.0.1")
    with pytest.raises(
        RuntimeError, match=r"torch==0\.0\.1 .* could not be installed into .*python-3\.9-torch-0\.0\.1"
    ):
        upstream.install_torch("3.9", sys.executable)
    assert not upstream.torch_folder("3.9").exists()


def test_a_tree_is_installed_once_by_many(tmp_path: Path) -> None:
    askers = [ask(tmp_path, "megatron-core", "0.12.0") for _ in range(3)]
    tree = tmp_path / "trees" / "megatron-core-0.12.0"
    assert {asker.communicate()[0].strip() for asker in askers} == {str(tree)}
    assert (tmp_path / "calls").read_text().splitlines() == ["megatron-core==0.12.0"]
    assert (tree / "package.py").exists()
    assert {path.name for path in tree.parent.iterdir()} == {tree.name, f".{tree.name}.lock"}


def test_a_failed_install_leaves_no_tree_and_repeats_pip(tmp_path: Path) -> None:
    error = ask(tmp_path, "megatron-core", "0.12.1").communicate()[1]
    assert "megatron-core==0.12.1 could not be installed into" in error
    assert "no such release" in error
    assert [path.name for path in (tmp_path / "trees").iterdir()] == [".megatron-core-0.12.1.lock"]


def test_a_release_outside_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found deepspeed 0\.1\.0"):
        upstream.tree("deepspeed", "0.1.0")


PROGRAM = """
import json, os, sys
print("noise")
print(json.dumps({
    "args": sys.argv[1:],
    "path": sys.path[1:],
    "hook": any(type(finder).__name__ == "PatchFinder" for finder in sys.meta_path),
    "environment": {name: os.environ.get(name) for name in ("CKPT_PATCHES", "RANK", "MASTER_PORT", "MINE")},
}))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_run(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    tree = tmp_path / "tree"
    for delivery, switch in (("none", "off"), ("hook", "strict")):
        found = upstream.run_json(program, "a", tmp_path, tree=tree, delivery=delivery, path=["/x"], env={"MINE": "1"})
        assert found["args"] == ["a", str(tmp_path)]
        assert found["path"][:3] == [str(tree), "/x", str(upstream.PROGRAMS[0])]
        assert found["hook"] == (delivery == "hook")
        assert int(found["environment"].pop("MASTER_PORT")) > 0
        assert found["environment"] == {"CKPT_PATCHES": switch, "RANK": None, "MINE": "1"}


def test_a_port_is_free_and_no_connection_is_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports lie outside the range of outgoing connections, which others open while a program starts."""
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    taken = ranks.free_port()
    ports = iter([taken, taken, ranks.free_port()])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(ports))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", taken))
        listener.listen()
        port = ranks.free_port()
    assert port != taken
    assert max(port, taken) < first


def test_run_says_what_failed(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import sys; print('out'); sys.exit('err')")
    with pytest.raises(AssertionError, match=r"(?s)exit status 1.*out.*err"):
        upstream.run(tmp_path / "fails.py", tree=tmp_path)
    assert upstream.run(tmp_path / "fails.py", tree=tmp_path, check=False).returncode == 1
    with pytest.raises(AssertionError, match="expected JSON in the last line"):
        upstream.run_json(tmp_path / "fails.py", tree=tmp_path, check=False)
    with pytest.raises(ValueError, match="found 'hooked'"):
        upstream.run(tmp_path / "fails.py", tree=tmp_path, delivery="hooked")
