"""How a demonstration is read and run; tests/contract/test_fix_contract.py runs that of each fix."""

from pathlib import Path

import pytest

from ckpt_patches.demo.run import DemonstrationFailed, Outcome, environment, read, run
from installs import copy_working_tree, failed_tests


@pytest.mark.quick
def test_a_fix_without_a_demonstration_fails_the_quick_tests(tmp_path: Path) -> None:
    clone = copy_working_tree(tmp_path / "clone")
    (clone / "deepspeed_patches" / "demos" / "rank_order.py").unlink()
    options = ("-m", "quick", "tests/contract/test_fix_contract.py", "-k", "has_a")
    assert failed_tests(clone, *options) == [
        "tests/contract/test_fix_contract.py::test_a_fix_has_a_demonstration[rank_order]"
    ]


# How one is read and run


def program(folder: Path, text: str) -> Path:
    path = folder / "some_fix.py"
    path.write_text(text)
    return path


@pytest.mark.quick
def test_what_it_needs_is_read_and_not_imported(tmp_path: Path) -> None:
    found = read(program(tmp_path, '"""save, 4 ranks\n\nMore."""\nBESIDE = {"numpy": "2.2.6"}\nraise OSError\n'))
    assert (found.fix, found.title, found.beside) == ("some_fix", "save, 4 ranks", (("numpy", "2.2.6"),))


@pytest.mark.quick
def test_one_without_a_title_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"some_fix\.py: expected a docstring whose first line is"):
        read(program(tmp_path, "print()\n"))


SWITCHED = """'''Whether the hook is installed'''
import json, os, sys
hook = any(type(finder).__name__ == "PatchFinder" for finder in sys.meta_path)
print("more")
print(json.dumps({"bug": not hook, "found": os.environ.get("RANK", "no rank")}))
"""


@pytest.mark.quick
@pytest.mark.parametrize("patched", [True, False])
def test_it_runs_with_the_hook_on_or_off(patched: bool, tmp_path: Path) -> None:
    """And with nothing of a launcher in its environment."""
    environ = environment({"PATH": "/usr/bin", "RANK": "1", "CKPT_PATCHES": "off"}, patched=patched)
    assert run(read(program(tmp_path, SWITCHED)), environ) == Outcome(not patched, "no rank")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("raise OSError('full')", "exit status 1:\n.*OSError: full"),
        ("print('no outcome')", "exit status 0:\nno outcome"),
        ("print('[]')", r"exit status 0:\n\[\]"),
        ("", "exit status 0:"),
    ],
)
def test_one_that_cannot_run_is_an_error_with_its_output(ends: str, said: str, tmp_path: Path) -> None:
    environ = environment({"PATH": "/usr/bin"}, patched=False)
    with pytest.raises(DemonstrationFailed, match=rf"(?s)some_fix\.py: expected exit status 0.*found {said}"):
        run(read(program(tmp_path, f"'''End otherwise'''\n{ends}\n")), environ)
