"""Show each bug on the unpatched upstream package, and its absence after the install; `make demo` runs it.

Nothing is simulated: the programs of the tests run the real releases on CPU ranks, once with the patches switched off
and once as they are for everybody who has installed the project (the import hook). Exit status 0 only if every bug
showed without them and none with them.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_patches.engine.registry import FIXES
from upstream import run, run_json, tree
from zero_checkpoints import PERMISSIVE, convert, converted, differences, dp768, element_counts, of_ranks

NUMPY = "2.2.6"
BRIDGE = "0.3.1"


@dataclass(frozen=True)
class Found:
    """What one run did."""

    bug: bool
    words: str


@dataclass(frozen=True)
class Bug:
    """One row of the table: a fix, and a program that shows what it is for."""

    fix: str
    what: str  # the line of progress
    distribution: str
    version: str
    show: Callable[["Bug", str, Path], Found]  # given the delivery, and an empty folder
    beside: tuple[tuple[str, str], ...] = ()  # releases that the program needs as well

    @property
    def release(self) -> str:
        return ", ".join(" ".join(release) for release in ((self.distribution, self.version), *self.beside))

    @property
    def tree(self) -> Path:
        return tree(self.distribution, self.version)

    @property
    def path(self) -> list[Path]:
        return [tree(*release) for release in self.beside]


def zarr(bug: Bug, delivery: str, out: Path) -> Found:
    """Three arrays of four ranks; rank 0 creates them while the others write."""
    (out / "checkpoint").mkdir()
    lost = len(run_json("zarr_race", out / "checkpoint", tree=bug.tree, delivery=delivery)["lost"])
    return Found(lost > 0, f"{lost} of 12 slices lost, and no error" if lost else "all 12 slices saved")


def zarr_without_locks(bug: Bug, delivery: str, out: Path) -> Found:
    """Eight ranks, and a file system that grants every lock to everybody."""
    options = ("--saves", "10", "--locks", "nothing")
    found = run_json("zarr_interleavings", out / "checkpoints", *options, tree=bug.tree, delivery=delivery)
    lost, slices = found["lost"], found["slices"]
    return Found(lost > 0, f"{lost} of {slices} slices lost" if lost else f"all {slices} slices saved")


def resume(*options: str) -> Callable[[Bug, str, Path], Found]:
    """Save, load, and train on beside the run that was not interrupted."""

    def show(bug: Bug, delivery: str, out: Path) -> Found:
        state = run_json("empty_state", out / "checkpoint", *options, tree=bug.tree, path=bug.path, delivery=delivery)
        if state["error"]:
            return Found(True, state["error"])
        equal = state["resume"] == "bit-equal"
        return Found(not equal, "saved; resumes bit for bit" if equal else "resumes, and trains to other weights")

    return show


def reload(bug: Bug, delivery: str, out: Path) -> Found:
    """Twelve configurations: precision-aware or not, three offload fractions, overlap on and off."""
    done = run("hybrid_reload", tree=bug.tree, delivery=delivery)
    return weights_kept(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def finetune(bug: Bug, delivery: str, out: Path) -> Found:
    """Nine: three settings with which Bridge loads a model alone, three offload fractions."""
    return weights_kept(run_json("bridge_finetune", out, tree=bug.tree, path=bug.path, delivery=delivery))


def weights_kept(cases: Iterable[dict[str, Any]]) -> Found:
    lost = [bool(case["lost"]) for case in cases]
    if any(lost):
        return Found(True, f"weights lost in {sum(lost)} of {len(lost)} set-ups")
    return Found(not lost, f"weights kept in all {len(lost)}")


def gather(bug: Bug, delivery: str, out: Path) -> Found:
    """Rank 0 of four, in buckets: what it needs beside the state that it gathers."""
    file = bug.tree / "megatron/core/optimizer/distrib_optimizer.py"
    rank = run_json("lean_gather", file, "--parts", "memory", tree=bug.tree, delivery=delivery)["ranks"][0]
    buckets = rank["gloo"] / rank["bucket"]
    return Found(buckets > 1, f"rank 0 needs the state and {max(buckets, 0):.1f} buckets of it more")


def padded(*options: str) -> Callable[[Bug, str, Path], Found]:
    """Save, load, and train on, where padding is all that a rank has, or no format is asked for."""

    def show(bug: Bug, delivery: str, out: Path) -> Found:
        result = run_json("padded_saving", out / "checkpoint", *options, tree=bug.tree, delivery=delivery)["result"]
        return Found(result != "bit-equal", "saved; resumes bit for bit" if result == "bit-equal" else result[:80])

    return show


def shifted(bug: Bug, delivery: str, out: Path) -> Found:
    """Odd sizes in many buckets, saved by two ranks; what a load brings back."""
    run("shifted_saving", out, tree=bug.tree, delivery=delivery)
    wrong = run_json("shifted_saving", out, "--load", out / "shifted", tree=bug.tree, delivery=delivery)
    count = sum(len(numbers) for states in wrong.values() for numbers in states.values())
    return Found(count > 0, f"{count} elements are others', and no error" if count else "all elements resume")


def stepped(bug: Bug, delivery: str, out: Path) -> Found:
    """A CPU tensor that a step changes while a persistent worker writes it."""
    found = run_json("async_saving", out / "checkpoint", "stepped", tree=bug.tree, delivery=delivery)
    count = found["elements of the next step"]
    return Found(count > 0, f"{count} elements of the next step" if count else "saved as it was")


def param_groups(saved: dict[str, Any], resumed: dict[str, Any], right: str) -> Callable[[Bug, str, Path], Found]:
    """Save with some options, resume with others; the rates have to be those of the run named as `right`."""

    def show(bug: Bug, delivery: str, out: Path) -> Found:
        trained_with = {key: value for key, value in resumed.items() if key != "keep"}
        runs = [{"do": "save", "name": "save", **saved}, {"do": "load", "name": "save", **resumed}]
        runs.append({"do": "train", **trained_with})
        options = ("--format", "fully_reshardable")
        found = run_json("param_groups", out, *map(json.dumps, runs), *options, tree=bug.tree, delivery=delivery)
        (of_saved,), (loaded,), (trained,) = found
        wrong = loaded.get("end") != {"save": of_saved, "train": trained}[right]["end"]
        return Found(wrong, "param groups at other rates, and no error" if wrong else "each group at its own rate")

    return show


def product(bug: Bug, delivery: str, out: Path) -> Found:
    failed = run_json("numpy2_product", tree=bug.tree, path=bug.path, delivery=delivery)["failed"]
    return Found(bool(failed), f"AttributeError: np.product, {len(failed)} of 3 calls" if failed else "all 3 calls run")


def paddings(bug: Bug, delivery: str, out: Path) -> Found:
    """The report: 768 ranks, partition 348, padding 1024."""
    source = dp768()["dp768"]
    error = convert(out, source, version=bug.version, delivery=delivery)["dp768"]
    if error:
        return Found(True, error.removeprefix("RuntimeError: "))
    different = differences(converted(out / "dp768"), source)
    return Found(
        bool(different), f"converted, {len(different)} states differ" if different else "converted bit for bit"
    )


def bounds(bug: Bug, delivery: str, out: Path) -> Found:
    """One parameter of 4096 elements, 6 a rank: the last 85 of 768 ranks hold none of it."""
    source = dp768()["dp768_stage3"]
    error = convert(out, source, version=bug.version, delivery=delivery)["dp768_stage3"]
    if error:
        return Found(True, error)
    found = converted(out / "dp768_stage3")
    (numel,) = element_counts(found).values()
    if differences(found, source):
        return Found(True, f"{numel} elements for 4096, and no error")
    return Found(False, f"{numel} elements, bit for bit")


def own_files(bug: Bug, delivery: str, out: Path) -> Found:
    """Resume; convert, and resume from there; put the fp32 weights together."""
    kinds = ("stage1", "stage2", "stage3")
    run("own_files", "write", out, *kinds, tree=bug.tree)
    found = run_json("own_files", "read", out, out, *kinds, "--universal", *kinds, tree=bug.tree, delivery=delivery)
    errors = [error for outcomes in found.values() for error in outcomes.values() if error]
    if errors:
        return Found(True, f"{errors[0].split(':')[0]}: {len(errors)} loads, of ZeRO 1, 2 and 3")
    return Found(False, "all load; they resume bit for bit")


def universal(
    wrong: Callable[[dict[str, Any], dict[str, Any]], str], *options: str
) -> Callable[[Bug, str, Path], Found]:
    """Two ranks train param groups at ZeRO-1, and another run loads them, twice, from a universal checkpoint.

    `wrong` says what is wrong with what came of both programs, "" if nothing.
    """

    def show(bug: Bug, delivery: str, out: Path) -> Found:
        on: dict[str, Any] = {"tree": bug.tree, "delivery": delivery, "env": PERMISSIVE if delivery == "none" else {}}
        trained: tuple[str | Path, ...] = (out / "run", "stage1", *options)
        written = run_json("universal_loading", "write", *trained, **on)["stage1"]
        done = run("universal_loading", "resume", *trained, check=False, **on)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith(("AttributeError", "IndexError"))]
            return Found(True, errors[0])
        words = wrong(written, json.loads(done.stdout.splitlines()[-1])["stage1"])
        return Found(bool(words), words or "all that was saved, bit for bit")

    return show


def other_states(written: dict[str, Any], resumed: dict[str, Any]) -> str:
    different = resumed["loaded again"]
    return f"{len(different)} states differ, and no error" if different else ""


def master_of_a_moment(written: dict[str, Any], resumed: dict[str, Any]) -> str:
    return "" if resumed["masters are"] == ["fp32"] else f"the fp32 parameter is said to be {resumed['masters are'][0]}"


def no_links(written: dict[str, Any], resumed: dict[str, Any]) -> str:
    errors = written["unlinked"]
    return f"ValueError for {len(errors)} of 7 parameters" if errors else ""


def order(bug: Bug, delivery: str, out: Path) -> Found:
    """One more than a hundred ranks."""
    source = of_ranks(101)
    error = convert(out, source, version=bug.version, delivery=delivery)["101"]
    different = error or differences(converted(out / "101"), source)
    words = error or f"{len(different)} states in another order, and no error"
    return Found(bool(different), words if different else "converted bit for bit")


BUGS = (
    Bug("zarr_create_synchronizer", "zarr save, 4 ranks", "megatron-core", "0.14.0", zarr),
    Bug("zarr_range_write", "zarr saves, locks that lock nothing", "megatron-core", "0.15.3", zarr_without_locks),
    Bug("dp_zero_empty_state", "save before the first step", "megatron-core", "0.19.2", resume()),
    Bug(
        "torch_adam_step",
        "resume with torch's AdamW",
        "megatron-core",
        "0.19.2",
        resume("--inner", "torch", "--steps", "3"),
    ),
    Bug(
        "reshardable_padding_flag",
        "resume with the precision-aware optimizer",
        "megatron-core",
        "0.16.1",
        resume("--precision-aware", "--steps", "2", "--formats", "dp_reshardable"),
    ),
    Bug(
        "reshardable_padding_save",
        "save where a rank has padding alone",
        "megatron-core",
        "0.19.2",
        padded("--format", "dp_reshardable", "--cases", "small bucket"),
    ),
    Bug("fully_reshardable_shift", "save in several buckets", "megatron-core", "0.19.2", shifted),
    Bug("async_save_staging", "step while a save is written", "megatron-core", "0.19.2", stepped),
    Bug(
        "sharding_type_default",
        "save, and name no format",
        "megatron-core",
        "0.19.2",
        padded("--format", "default", "--cases", "plain"),
    ),
    Bug(
        "resume_param_groups",
        "resume with --decoupled-lr",
        "megatron-core",
        "0.18.2",
        param_groups({"decoupled_lr": 1e-4}, {"decoupled_lr": 1e-4}, right="save"),
    ),
    Bug(
        "override_learning_rate",
        "resume with another --lr",
        "megatron-core",
        "0.18.2",
        param_groups({}, {"lr": 5e-4, "min_lr": 1e-5, "keep": "override"}, right="train"),
    ),
    Bug("hybrid_offload_reload", "load a model under CPU offload", "megatron-core", "0.19.2", reload),
    Bug(
        "hybrid_offload_reload",
        "finetune with Megatron-Bridge",
        "megatron-core",
        "0.16.1",
        finetune,
        (("megatron-bridge", BRIDGE),),
    ),
    Bug(
        "hybrid_offload_resume",
        "resume under CPU offload",
        "megatron-core",
        "0.19.2",
        resume("--precision-aware", "--offload-fraction", "0.5", "--steps", "3"),
    ),
    Bug("dp_zero_lean_gather", "gather the state on rank 0", "megatron-core", "0.19.2", gather),
    Bug("numpy2_product", "Megatron under NumPy 2", "megatron-core", "0.14.0", product, (("numpy", NUMPY),)),
    Bug("universal_tensor_paddings", "convert ZeRO-1, 768 ranks", "deepspeed", "0.19.8", paddings),
    Bug("zero3_fragment_bounds", "convert ZeRO-3, 768 ranks", "deepspeed", "0.19.2", bounds),
    Bug("torch_load_weights_only", "load under torch 2.6 or later", "deepspeed", "0.14.5", own_files),
    Bug("universal_fragment_rebind", "universal load", "deepspeed", "0.19.6", universal(master_of_a_moment)),
    Bug("optimizer_state_links", "ask for moments", "deepspeed", "0.19.8", universal(no_links)),
    Bug(
        "universal_empty_group",
        "universal load, small group",
        "deepspeed",
        "0.19.8",
        universal(other_states, "--small"),
    ),
    Bug("universal_all_moments", "universal load, fresh run", "deepspeed", "0.14.0", universal(other_states)),
    Bug("rank_order", "convert ZeRO-1, 101 ranks", "deepspeed", "0.12.6", order),
)


def main() -> int:
    assert {bug.fix for bug in BUGS} == set(FIXES), "expected a demonstration of every fix"
    if not set_up():
        return 2
    found = [demonstrate(bug) for bug in BUGS]
    print_table(found)
    good = sum(without.bug and not with_.bug for without, with_ in found)
    print(f"\n{good} of {len(BUGS)} shown on the unpatched package, and gone after the install.")
    return 0 if good == len(BUGS) else 1


def set_up() -> bool:
    """Install the upstream releases, each into a folder of its own."""
    for release in dict.fromkeys(pair for bug in BUGS for pair in ((bug.distribution, bug.version), *bug.beside)):
        print(f"{' '.join(release)} … ", end="", flush=True)
        try:
            tree(*release)
        except RuntimeError as error:
            print(f"\n{error}", file=sys.stderr)
            return False
        print("ready")
    return True


def demonstrate(bug: Bug) -> tuple[Found, Found]:
    """Without the patches, and with them."""
    print(f"{bug.what} … ", end="", flush=True)
    start = time.monotonic()
    without, with_ = attempt(bug, "none"), attempt(bug, "hook")
    shown = "the bug shows" if without.bug else "NO BUG without the patches"
    gone = "BUG with them" if with_.bug else "gone with the patches"
    print(f"{shown}, {gone} ({time.monotonic() - start:.0f} s)", flush=True)
    return without, with_


def attempt(bug: Bug, delivery: str) -> Found:
    """A program that dies in another way than its bug is no demonstration, and no reason to stop the others."""
    with tempfile.TemporaryDirectory(prefix="ckpt-patches-demo-") as out:
        try:
            return bug.show(bug, delivery, Path(out))
        except Exception as error:
            print(f"\n{error}", file=sys.stderr)
            return Found(delivery != "none", f"the program failed: {type(error).__name__}")


def print_table(found: list[tuple[Found, Found]]) -> None:
    head = ("fix", "upstream release", "without", "with")
    rows = [(b.fix, b.release, without.words, with_.words) for b, (without, with_) in zip(BUGS, found, strict=True)]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, tuple("-" * width for width in widths), *rows]
    print()
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
