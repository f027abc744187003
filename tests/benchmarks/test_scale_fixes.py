"""What each fix alone makes ranks do in a save, a load and a conversion, counted, and upstream's beside it.

`make bench` records it anew, in tests/recorded/scale_fixes.json. All fixes that a release can be given are counted at
four ranks; those of which a count is another than upstream's also at two and eight.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import scale_page
from ckpt_patches.engine.plan import Outcome, plan_tree
from ckpt_patches.engine.registry import FIXES
from upstream import run_json, tree
from zero_checkpoints import PERMISSIVE

FEW, USUAL, MANY = 2, scale_page.USUAL["ranks"], 8
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
# Of which saves are counted that go on behind the training, too.
IN_BACKGROUND = {("megatron-core", "0.14.0"), ("megatron-core", "0.19.2")}
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


def counts(release: tuple[str, str], ranks: int, fix: str, out: Path) -> Counts:
    """The counts of each rank, by part; of upstream as it is where no fix is named."""
    what = RELEASES[release]
    on: dict[str, Any] = {"tree": tree(*release), "delivery": "hook" if fix else "none", "timeout": 900}
    on |= {"fixes": [fix] if fix else [], "env": PERMISSIVE}
    folder = out / f"{fix:26}{ranks}"  # names are in what is written
    size = ["--ranks", str(ranks)]
    if what == "zarr":
        return dict(run_json("counting", "zarr", folder, *size, "--chunks", str(scale_page.USUAL["chunks"]), **on))
    layers = [*size, "--layers", str(scale_page.USUAL["layers"]), "--hidden", str(scale_page.USUAL["hidden"])]
    if release[0] == "megatron-core":
        found = dict(run_json("counting", "megatron", folder, *layers, "--formats", what, **on))
        if release in IN_BACKGROUND and fix in ("", "async_save_staging"):
            formats = ",".join(name for name in what.split(",") if name != "torch")
            behind = folder.with_name(f"{folder.name} behind")
            found |= run_json("counting", "megatron", behind, *layers, "--formats", formats, "--background", **on)
        return found
    found = dict(run_json("counting", "zero", folder, *layers, "--stages", what, **on))
    if release in CONVERTERS_WITH_PROCESSES:
        return found
    stages = [stage for stage in what.split(",") if stage != "0"]  # without ZeRO there is nothing to convert
    return found | {f"stage {stage}, conversion": converted(folder, stage, on) for stage in stages}


def converted(folder: Path, stage: str, on: Mapping[str, Any]) -> list[dict[str, int]]:
    """By upstream's converter."""
    workers = ("--num_extract_workers", "1", "--num_merge_workers", "1")
    folders = ("--input_folder", folder / stage / "global_step1", "--output_folder", folder / f"universal{stage}")
    module = "deepspeed.checkpoint.ds_to_universal"
    found: Counts = run_json("counting", "tool", folder, module, *folders, *workers, **on)
    return found["tool"]


def rows(release: tuple[str, str], ranks: int, fix: str, out: Path) -> Iterator[dict[str, Any]]:
    name = " ".join(release).replace("deepspeed", "DeepSpeed")
    for part, of_ranks in counts(release, ranks, fix, out).items():
        size = {"ranks": ranks, "layers": scale_page.USUAL["layers"], "hidden": scale_page.USUAL["hidden"]}
        size |= {"chunks": scale_page.USUAL["chunks"]}
        yield {"fix": fix, **scale_page.row(name, part, size, "ours" if fix else "upstream", of_ranks)}


@pytest.mark.parametrize("release", RELEASES, ids=" ".join)
def test_each_fix_alone(release: tuple[str, str], tmp_path: Path) -> None:
    found = [row for fix in ("", *applied(release)) for row in rows(release, USUAL, fix, tmp_path)]
    others = scale_page.others(found)
    for ranks in (FEW, MANY) if others else ():
        found += [row for fix in ("", *others) for row in rows(release, ranks, fix, tmp_path)]
    scale_page.record(" ".join(release), found, scale_page.OF_FIXES)


def test_the_page() -> None:
    """The last of this file: of what the others have recorded."""
    scale_page.write()
