"""Every exact resume is verified; with a fix switched off, the damage of its bug to a state is detected.

Only the record of the save detects it: the programs are those that show the bugs. This file and
docs/reference/limits.md name what is not detected. Bugs that raise errors are in their own fixes' tests.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpt_patches.cli import command_line
from registered import FIXES
from test_resume_param_groups import SAME
from upstream import (
    all_releases,
    checkpoint_formats,
    newest,
    newest_affected,
    newest_by_default,
    numbers,
    releases,
    run,
    tree,
)
from zero_checkpoints import convert
from zero_resumes import PROGRAM

pytestmark = pytest.mark.slow

CAUGHT = "FingerprintError: resume differs: "


def output(package: str, release: str, program: str, *arguments: object, skip: str = "", check: bool = False) -> str:
    """The log and output of a program with fingerprints, and with all fixes but those to skip."""
    env = {"CKPT_PATCHES_FINGERPRINT": "1", "CKPT_PATCHES_SKIP": skip}
    root = tree(package, release)
    done = run(program, *map(str, arguments), tree=root, delivery="hook", env=env, check=check)
    return done.stderr + done.stdout


def megatron(release: str, program: str, *arguments: object, skip: str = "", check: bool = True) -> str:
    return output("megatron-core", release, program, *arguments, skip=skip, check=check)


def deepspeed(release: str, program: str, *arguments: object, skip: str = "", check: bool = False) -> str:
    return output("deepspeed", release, program, *arguments, skip=skip, check=check)


# Megatron: every optimizer in every format

HYBRID = [
    "-".join(word for word in ("hybrid", fraction, *words) if word)
    for fraction, *words in itertools.product(("0.0", "0.5", "1.0"), ("", "precision-aware"), ("", "overlap"))
]
# In the default run; `pytest --every-release` runs all.
SOME_HYBRID = ["hybrid-0.0", "hybrid-0.5", "hybrid-0.5-precision-aware-overlap", "hybrid-1.0-precision-aware"]
OPTIMIZERS = ["plain", "precision-aware", *(HYBRID if all_releases() else SOME_HYBRID)]
ROUNDING = 1e-6
# These load the saved state, in some sharded formats, and step differently from the second step on: the loaded groups
# of the hybrid optimizer have a step, which it copies to its inner optimizers before each step.
NOT_CAUGHT = {f"hybrid-0.5-precision-aware{word}" for word in ("", "-overlap")}


def is_exact(row: Mapping[str, Any]) -> bool:
    """Whether a resume restored the saved state and took the same steps, up to rounding if their arithmetic changes.

    On other ranks the hybrid optimizer at 0.5 divides the parameters otherwise between two optimizers, which round
    differently.
    """
    if row["result"] == "bit-equal":
        return True
    is_divided = (row["inner"], row["optimizer"][:10], row["ranks"]) == ("fused", "hybrid-0.5", 4)
    size, _, loaded = row["result"].removeprefix("differs by ").partition(",")
    return is_divided and loaded == " the loaded state is bit-equal" and float(size) < ROUNDING


def resumes(version: str, inner: str, ranks: int, folder: Path, skip: str = "") -> tuple[list[dict[str, Any]], str]:
    """The results by optimizer and format of resumes on that many ranks from a save on two, and the log."""
    formats = checkpoint_formats(version)
    options = {
        "--formats": ",".join(formats),
        "--inner": inner,
        "--optimizers": ",".join(OPTIMIZERS),
        "--resume-ranks": ranks,
    }
    said = megatron(version, "exact_resume", folder / "out", *itertools.chain(*options.items()), skip=skip)
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert len(rows) == len(formats) * len(OPTIMIZERS)
    return rows, said


def cases(*default: tuple[Any, ...], more: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
    """Cases on the newest release, or on every release, with more of them."""
    return [
        pytest.param(*release.values, *case, id="-".join(map(str, (release.id, *case))))
        for release in newest_by_default(releases("megatron-core"))
        for case in (*default, *(more if all_releases() else ()))
    ]


@pytest.mark.parametrize(
    ("version", "inner", "ranks"), cases(("fused", 4), more=[("fused", 2), ("torch", 2), ("torch", 4)])
)
def test_every_exact_resume_is_verified_whole(version: str, inner: str, ranks: int, tmp_path: Path) -> None:
    rows, log = resumes(version, inner, ranks, tmp_path)
    # Upstream cannot build a precision-aware optimizer of torch's.
    resumed = [row for row in rows if (inner, row["optimizer"]) != ("torch", "precision-aware")]
    assert [row for row in resumed if not is_exact(row)] == []
    assert log.count("resume verified: ") == len([row for row in resumed if row["format"] != "torch"])
    not_returned = "not verified: the optimizer's state: this state dict is not one that"
    assert log.count(not_returned) == log.count("resume not v")


@pytest.mark.parametrize(
    ("version", "inner", "fix"),
    cases(
        ("fused", "hybrid_offload_resume"),
        ("torch", "torch_adam_step"),
        more=[("torch", "hybrid_offload_resume"), ("fused", "torch_adam_step")],
    ),
)
def test_no_optimizer_goes_on_with_a_state_that_is_not_the_saved_one(
    version: str, inner: str, fix: str, tmp_path: Path
) -> None:
    rows, _ = resumes(version, inner, 2, tmp_path, skip=fix)
    recorded = [row for row in rows if row["format"] != "torch"]
    silent = [row for row in recorded if row["result"].startswith("differs") and not is_exact(row)]
    assert {row["optimizer"] for row in silent} <= (NOT_CAUGHT if fix == "hybrid_offload_resume" else set())
    assert all(row["result"].endswith("the loaded state is bit-equal") for row in silent)
    caught = [row for row in rows if row["result"].startswith(f"load died: {CAUGHT[:60]}")]
    assert caught or (inner, fix) == ("fused", "torch_adam_step")  # which all fail with KeyError


# Megatron: other bugs

SHIFTED = releases("megatron-core", oldest="0.15.0", newest=newest_affected("fully_reshardable_shift")[1])


@pytest.mark.parametrize("version", newest_by_default(SHIFTED))
def test_a_shifted_save(version: str, tmp_path: Path) -> None:
    skip = "fully_reshardable_shift,fully_reshardable_restore"
    megatron(version, "shifted_saving", tmp_path, skip=skip)
    load = ("--load", tmp_path / "shifted")
    assert CAUGHT in megatron(version, "shifted_saving", tmp_path, *load, skip=skip, check=False)
    assert command_line.main(["fingerprint", str(tmp_path / "shifted")]) == 1


@pytest.mark.parametrize(
    ("release", "kind", "fix"),
    [
        ("0.12.0", "race", "zarr_create_synchronizer"),
        ("0.14.0", "race", "zarr_create_synchronizer"),
        ("0.16.1", "step", "async_save_staging"),
        (newest("megatron-core"), "step", "async_save_staging"),
    ],
)
def test_a_save_that_was_damaged_while_it_was_written(release: str, kind: str, fix: str, tmp_path: Path) -> None:
    said = {}
    for skip in ("", fix):
        folder = tmp_path / f"without {skip}" / "out"
        folder.parent.mkdir()
        megatron(release, "damaged_saving", folder, kind, skip=skip)
        said[skip] = megatron(release, "damaged_saving", folder, f"load-{kind}", skip=skip, check=False)
    assert "resume verified: " in said[""]
    assert CAUGHT in said[fix]
    assert "other values" in said[fix]
    assert command_line.main(["fingerprint", str(tmp_path / f"without {fix}" / "out")]) == 1


GROUPS = [
    ("0.12.0", "plain", ["--stages"], ["stage1.b.weight: weight_decay 0.0, saved as 0.1"]),
    ("0.18.2", "mup", [], ["stage0.a.weight: eps 2.5e-09, saved as 1e-08"]),
    # Only one parameter's rate differs: a schedule may change it, so it is a warning, not an error.
    ("0.18.2", "decoupled", [], ["WARNING: resume verified: ", "rate: 9.756", "when saved: 1 parameters"]),
]


@pytest.mark.parametrize(("release", "name", "options", "expected"), GROUPS)
def test_a_group_with_the_settings_of_another_one(
    release: str, name: str, options: Sequence[str], expected: Sequence[str], tmp_path: Path
) -> None:
    saved, loaded = SAME[name]
    runs = [{"do": "save", "name": name, **saved}, {"do": "load", "name": name, **loaded}]
    format_ = "fully_reshardable" if numbers(release) >= (0, 15) else "fully_sharded_model_space"
    arguments = (*map(json.dumps, runs), "--format", format_, *options)
    said = {}
    for skip in ("", "resume_param_groups"):
        folder = tmp_path / f"without {skip}"
        folder.mkdir()
        said[skip] = megatron(release, "param_groups", folder, *arguments, skip=skip)
    assert "INFO: resume verified: " in said[""]
    assert [part for part in expected if part not in said["resume_param_groups"]] == []


# DeepSpeed

PROOFS = Path(__file__).parent.with_name("fixes")
DEEPSPEED = newest("deepspeed")


class Bug(NamedTuple):
    """A fix, and where its bug shows."""

    fix: str
    release: str
    case: str
    is_universal: bool
    said: str
    ranks: int = 2
    nodes: int = 1


BUGS = [
    Bug("zero3_universal_rank", "0.16.2", "stage3-1", True, "other values", ranks=4, nodes=2),
    Bug("zero3_universal_groups", DEEPSPEED, "stage3-2", True, "a step changes it twice"),
    Bug("bf16_stage0_state", "0.18.4", "stage0-1", False, "15 zeros"),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.fix)
def test_a_load_without_the_fix_is_caught(bug: Bug, tmp_path: Path) -> None:
    options = ("--ranks", bug.ranks, "--node", bug.ranks // bug.nodes)
    deepspeed(bug.release, PROGRAM, "train", tmp_path, bug.case, *options, skip=bug.fix, check=True)
    case, tag = tmp_path / bug.case, ("--tag", "universal") if bug.is_universal else ()
    if bug.is_universal:
        others = tuple(fix for fix in FIXES if fix != bug.fix)
        made = tmp_path / "made"
        errors = convert(made, case / "global_step2", version=bug.release, delivery="hook", fixes=others)
        assert errors == {bug.case: ""}
        (made / bug.case).rename(case / "universal")
    said = deepspeed(bug.release, PROGRAM, "resume", case, *tag, *options, skip=bug.fix, check=True)
    assert CAUGHT in said
    assert bug.said in said


def test_a_second_universal_load_that_leaves_the_masters_as_they_are() -> None:
    """The second load is detected. The result of `safe_get_full_fp32_param` is not part of the state."""
    proof = ("0.19.2", "proof", PROOFS / "test_universal_fragment_rebind.py", "two_loads")
    assert deepspeed(*proof).count("resume verified: ") == 4  # of two cases
    wrong = deepspeed(*proof, skip="universal_fragment_rebind")
    assert (wrong.count("resume verified: "), CAUGHT in wrong) == (1, True)


def test_experts_of_another_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Another rank's experts are detected if one rank saved and two load."""
    deepspeed(DEEPSPEED, "experts", tmp_path, 1, "--ep", 1)
    universal = tmp_path / "universal"
    assert command_line.main(["to-universal", str(tmp_path / "global_step8"), "--output", str(universal)]) == 0
    captured = capfd.readouterr()
    assert "verified: 39 states" in captured.out + captured.err
    for ep in (1, 2, 4):
        load = ("experts", tmp_path, 1, "--ep", ep, "--universal", universal)
        assert "resume verified: 39 states, " in deepspeed(DEEPSPEED, *load)
    load = ("experts", tmp_path / "wrong", 1, "--ep", 2, "--universal", universal)
    wrong = deepspeed(DEEPSPEED, *load, skip="universal_experts")
    assert CAUGHT in wrong
    assert "12 another's" in wrong


def test_frozen_parameters_and_buffers_are_verified_and_missed() -> None:
    """With the fix, both are verified at stages 1 and 3 on another number of ranks; upstream loads neither."""
    proof = (DEEPSPEED, "proof", PROOFS / "test_universal_frozen_and_buffers.py", "bug_of_two")
    what = "resume verified: 17 states, 1 buffer, settings, counters, loss scale"
    assert deepspeed(*proof, check=True).count(what) == 2
    missed = deepspeed(*proof, skip="universal_frozen_and_buffers")
    for line in ("  w1.weight frozen: other values", "  w1.bias frozen: other values", "  buffer seen: value "):
        assert line in missed
