"""What each fix alone makes ranks do in a save, a load and a conversion, counted, and upstream's beside it.

`make bench` records it anew, in tests/recorded/scale_fixes.json and scale_cases.json. All fixes that a release can be
given are counted at two sizes; those of which a count is another than upstream's also by ranks, parameters and bytes.
What needs a fix to come to its end is counted so beside the nearest that upstream can do.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import scale_page
from ckpt_patches.engine.plan import Outcome, plan_tree
from ckpt_patches.engine.registry import FIXES
from scale_page import LARGE, OF_A_RUN, OF_CHUNKS, Size
from upstream import run_json, tree
from zero_checkpoints import PERMISSIVE

# By release: what is saved and loaded.
RELEASES = {
    ("megatron-core", "0.15.3"): "zarr",
    ("megatron-core", "0.14.0"): "torch,fully_sharded_bucket_space,fully_sharded_model_space",
    ("megatron-core", "0.19.2"): "torch,dp_reshardable,fully_reshardable",
    ("deepspeed", "0.12.2"): "1",
    ("deepspeed", "0.14.0"): "1",
    ("deepspeed", "0.16.2"): "1,3",
    ("deepspeed", "0.18.4"): "0,1",
    ("deepspeed", "0.19.8"): "1,3",
}
# Of which saves are counted that go on behind the training, too: those in torch_dist.
IN_BACKGROUND = {
    ("megatron-core", "0.14.0"): "fully_sharded_model_space",
    ("megatron-core", "0.19.2"): "dp_reshardable,fully_reshardable",
}
# Whose converter does nothing in the process that is counted, with one worker either.
CONVERTERS_WITH_PROCESSES = {("deepspeed", "0.12.2"), ("deepspeed", "0.14.0")}
Counts = dict[str, list[dict[str, int]]]


def applied(release: tuple[str, str]) -> list[str]:
    """The fixes of which a release has the code that they change; of optimizers', not for the zarr strategy alone."""
    package = release[0].replace("megatron-core", "megatron.core")
    names = plan_tree(str(tree(*release)), package).named(Outcome.APPLIES)
    if RELEASES[release] != "zarr":
        return names
    return [name for name in names if any(".dist_checkpointing." in module for module in FIXES[name])]


def counts(release: tuple[str, str], size: Size, fix: str, out: Path) -> Counts:
    """The counts of each rank, by part; of upstream as it is where no fix is named."""
    what = RELEASES[release]
    on: dict[str, Any] = {"tree": tree(*release), "delivery": "hook" if fix else "none", "timeout": 900}
    on |= {"fixes": [fix] if fix else [], "env": PERMISSIVE}
    folder = out / f"{fix:26}{named(size)}"  # names are in what is written
    if what == "zarr":
        sizes = ("--ranks", str(size.ranks), "--chunks", str(size.chunks))
        return dict(run_json("counting", "zarr", folder, *sizes, **on))
    if release[0] == "megatron-core":
        found = dict(run_json("counting", "megatron", folder, *options(size), "--formats", what, **on))
        if release in IN_BACKGROUND and fix in ("", "async_save_staging"):
            background = ("--formats", IN_BACKGROUND[release], "--background")
            behind = folder.with_name(f"{folder.name} behind")
            found |= run_json("counting", "megatron", behind, *options(size), *background, **on)
        return found
    found = dict(run_json("counting", "zero", folder, *options(size), "--stages", what, **on))
    if release in CONVERTERS_WITH_PROCESSES:
        return found
    stages = [stage for stage in what.split(",") if stage != "0"]  # without ZeRO there is nothing to convert
    return found | {f"stage {stage}, conversion": converted(folder, stage, on) for stage in stages}


def named(size: Size) -> str:
    """In as many letters for each."""
    return "-".join(f"{number:04}" for number in vars(size).values())


def options(size: Size) -> list[str]:
    return ["--ranks", str(size.ranks), "--layers", str(size.layers), "--hidden", str(size.hidden)]


def converted(folder: Path, stage: str, on: Mapping[str, Any]) -> list[dict[str, int]]:
    """By upstream's converter."""
    workers = ("--num_extract_workers", "1", "--num_merge_workers", "1")
    folders = ("--input_folder", folder / stage / "global_step1", "--output_folder", folder / f"universal{stage}")
    module = "deepspeed.checkpoint.ds_to_universal"
    found: Counts = run_json("counting", "tool", folder, module, *folders, *workers, **on)
    return found["tool"]


def rows(release: tuple[str, str], size: Size, fix: str, out: Path) -> Iterator[dict[str, Any]]:
    name = " ".join(release).replace("deepspeed", "DeepSpeed")
    for part, of_ranks in counts(release, size, fix, out).items():
        yield {"fix": fix, **scale_page.row(name, part, size, "ours" if fix else "upstream", of_ranks)}


@pytest.mark.parametrize("release", RELEASES, ids=" ".join)
def test_each_fix_alone(release: tuple[str, str], tmp_path: Path) -> None:
    sizes = [Size(), LARGE]
    found = [row for size in sizes for fix in ("", *applied(release)) for row in rows(release, size, fix, tmp_path)]
    others = scale_page.others(found)
    more = OF_CHUNKS if RELEASES[release] == "zarr" else OF_A_RUN
    for size in more if others else ():
        if size not in sizes:
            found += [row for fix in ("", *others) for row in rows(release, size, fix, tmp_path)]
    scale_page.record(" ".join(release), found, scale_page.OF_FIXES)


@dataclass(frozen=True)
class Case:
    """What the counts of a whole release do not reach, as upstream would die of it, and the nearest to that."""

    fixes: tuple[str, ...]  # the first is the one that is counted; without the others it comes to no end
    said: str
    command: str
    ours: tuple[str, ...]
    upstream: tuple[str, ...]
    nearest: str = ""  # what upstream's is; nothing where it is the same
    numpy: str = ""  # version, where ours is under another one


def of_megatron(formats: str) -> list[Case]:
    """For the formats of a release, of which the last is in torch_dist."""
    whole, last = ("--formats", formats), ("--formats", formats.rpartition(",")[2])
    early, offload = ("--steps", "0"), ("--offload", "0.5")
    override = (*last, "--schedule", "override")
    with_adam = ("hybrid_offload_resume", "torch_adam_step")
    return [
        Case(("dp_zero_empty_state",), "before the first step", "megatron", (*whole, *early), whole, "after it"),
        Case(with_adam, "CPU offload", "megatron", (*whole, *offload), whole, "without offload"),
        Case(("hybrid_offload_reload",), "CPU offload, of the weights alone", "reload", offload, offload),
        Case(("override_learning_rate",), "another learning rate", "megatron", override, override),
    ]


MODEL_SPACE = ("--formats", "fully_sharded_model_space")
DEFAULT, RESHARDABLE = ("--formats", "default"), ("--formats", "dp_reshardable")
EXPERTS = ("--stages", "1", "--experts", "4")
CASES = {
    ("megatron-core", "0.14.0"): [
        *of_megatron(RELEASES["megatron-core", "0.14.0"]),
        Case(("numpy2_product",), "NumPy 2", "megatron", MODEL_SPACE, MODEL_SPACE, "NumPy 1", numpy="2.2.6"),
    ],
    ("megatron-core", "0.19.2"): [
        *of_megatron(RELEASES["megatron-core", "0.19.2"]),
        Case(("sharding_type_default",), "no format named", "megatron", DEFAULT, RESHARDABLE, "dp_reshardable named"),
    ],
    ("deepspeed", "0.19.8"): [
        Case(
            ("universal_experts",),
            "experts on two expert-parallel ranks",
            "zero",
            EXPERTS,
            (*EXPERTS, "--expert-parallel", "1"),
            "on one",
        )
    ],
}


def counts_of(case: Case, release: tuple[str, str], size: Size, side: str, out: Path) -> Counts:
    """The counts of each rank, by part."""
    on: dict[str, Any] = {"tree": tree(*release), "delivery": "none", "timeout": 900, "env": PERMISSIVE}
    arguments = case.upstream
    if side == "ours":
        on |= {"delivery": "hook", "fixes": list(case.fixes)}
        on |= {"path": [tree("numpy", case.numpy)]} if case.numpy else {}
        arguments = case.ours
    folder = out / f"{case.fixes[0]:26}{side:8}{named(size)}"  # names are in what is written
    return dict(run_json("counting", case.command, folder, *options(size), *arguments, **on))


def rows_of(case: Case, release: tuple[str, str], size: Size, out: Path) -> Iterator[dict[str, Any]]:
    """Both sides do the same in the same order, if not by the same names."""
    name = " ".join(release).replace("deepspeed", "DeepSpeed")
    ours, upstream = (counts_of(case, release, size, side, out) for side in ("ours", "upstream"))
    said = f"{case.said}; upstream's {case.nearest}" if case.nearest else case.said
    for (part, of_ranks), of_upstream in zip(ours.items(), upstream.values(), strict=True):
        for side, found in (("ours", of_ranks), ("upstream", of_upstream)):
            yield {"fix": case.fixes[0], **scale_page.row(name, f"{part} ({said})", size, side, found)}


@pytest.mark.parametrize("release", CASES, ids=" ".join)
def test_what_needs_a_fix(release: tuple[str, str], tmp_path: Path) -> None:
    found = [row for case in CASES[release] for size in OF_A_RUN for row in rows_of(case, release, size, tmp_path)]
    scale_page.record(" ".join(release), found, scale_page.OF_CASES)


def test_the_page() -> None:
    """The last of this file: of what the others have recorded."""
    scale_page.write()
