"""With each fix of DeepSpeed switched off, the damage of its bug to a state is detected: at load, or in the files.

Only the record of the save detects it. Bugs that raise errors are in their own fixes' tests; docs/guides/fingerprint.md
has the list.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpt_patches.cli import command_line
from registered import FIXES
from upstream import newest, run, tree
from zero_checkpoints import convert
from zero_resumes import PROGRAM

pytestmark = pytest.mark.slow

FIXES_TESTED = Path(__file__).parent.with_name("fixes")
CAUGHT = "FingerprintError: resume differs: "


class Bug(NamedTuple):
    """A fix, and where its bug shows."""

    fix: str
    release: str
    case: str
    tag: str  # empty for an ordinary checkpoint
    said: str
    ranks: int = 2
    nodes: int = 1


BUGS = [
    Bug("zero3_universal_rank", "0.16.2", "stage3-1", "universal", "other values", ranks=4, nodes=2),
    Bug("zero3_universal_groups", newest("deepspeed"), "stage3-2", "universal", "a step changes it twice"),
    Bug("bf16_stage0_state", "0.18.4", "stage0-1", "", "15 zeros"),
]


def output(program: str, *arguments: str | Path, release: str, skip: str = "", check: bool = False) -> str:
    """The output of a program on a release, with fingerprints, and with all fixes but one."""
    env = {"CKPT_PATCHES_FINGERPRINT": "1", "CKPT_PATCHES_SKIP": skip}
    done = run(program, *arguments, tree=tree("deepspeed", release), delivery="hook", env=env, check=check)
    return done.stdout + done.stderr


def resumed(bug: Bug, folder: Path) -> str:
    """The output of a run that resumes another run's checkpoint, both without the fix."""
    options = ("--ranks", str(bug.ranks), "--node", str(bug.ranks // bug.nodes))
    on: dict[str, Any] = {"release": bug.release, "skip": bug.fix, "check": True}
    output(PROGRAM, "train", folder, bug.case, *options, **on)
    case = folder / bug.case
    if bug.tag:
        others = tuple(fix for fix in FIXES if fix != bug.fix)
        found = convert(folder / "made", case / "global_step2", version=bug.release, delivery="hook", fixes=others)
        assert found == {bug.case: ""}
        (folder / "made" / bug.case).rename(case / bug.tag)
    tag = ("--tag", bug.tag) if bug.tag else ()
    return output(PROGRAM, "resume", case, *tag, *options, **on)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.fix)
def test_a_load_is_caught(bug: Bug, tmp_path: Path) -> None:
    said = resumed(bug, tmp_path)
    assert CAUGHT in said
    assert bug.said in said


def test_a_second_universal_load_that_leaves_the_masters_as_they_are(tmp_path: Path) -> None:
    """The second load is detected. The result of `safe_get_full_fp32_param` is not part of the state."""
    release, proof = "0.19.2", FIXES_TESTED / "test_universal_fragment_rebind.py"
    assert output("proof", proof, "two_loads", release=release).count("resume verified: ") == 4  # of two cases
    wrong = output("proof", proof, "two_loads", release=release, skip="universal_fragment_rebind")
    assert (wrong.count("resume verified: "), CAUGHT in wrong) == (1, True)


def test_experts_of_another_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Another rank's experts are detected if one rank saved and two load."""
    release = newest("deepspeed")
    output("experts", tmp_path, "1", "--ep", "1", release=release)
    source, universal = tmp_path / "global_step8", tmp_path / "universal"
    options = ["--input_folder", str(source), "--output_folder", str(universal)]
    assert command_line.main(["to-universal", *options]) == 0
    captured = capfd.readouterr()
    assert "verified: 39 states" in captured.out + captured.err
    for ep in ("1", "2", "4"):
        load = ("experts", tmp_path, "1", "--ep", ep, "--universal", universal)
        assert "resume verified: 39 states, " in output(*load, release=release)
    load = ("experts", tmp_path / "wrong", "1", "--ep", "2", "--universal", universal)
    wrong = output(*load, release=release, skip="universal_experts")
    assert CAUGHT in wrong
    assert "12 another's" in wrong


def test_frozen_parameters_and_buffers_are_verified_and_missed() -> None:
    """With the fix, both are verified at stages 1 and 3 on another number of ranks; upstream loads neither."""
    proof = FIXES_TESTED / "test_universal_frozen_and_buffers.py"
    verified = output("proof", proof, "bug_of_two", release=newest("deepspeed"), check=True)
    what = "resume verified: 17 states, 1 buffer, settings, counters, loss scale"
    assert verified.count(what) == 2
    missed = output("proof", proof, "bug_of_two", release=newest("deepspeed"), skip="universal_frozen_and_buffers")
    for line in ("  w1.weight frozen: other values", "  w1.bias frozen: other values", "  buffer seen: value "):
        assert line in missed
