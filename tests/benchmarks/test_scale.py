"""What fixes and tools do for each rank, parameter, byte and chunk, counted, and upstream's beside it.

`make bench` records it anew, and writes the tables and the picture of docs/scale.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import scale_page
from every_checkpoint import put, tensors
from scale_page import OF_A_RUN, RANKS, Size
from upstream import run_json, tree
from zero_checkpoints import PERMISSIVE

DELIVERIES = {"upstream": "none", "ours": "hook"}


CHUNKS = [Size(chunks=chunks) for chunks in (16, 64, 1024, 10000)]
OF_ZARR = list(dict.fromkeys([*RANKS, Size(ranks=16), *CHUNKS]))

MEGATRON = {
    "0.19.2": ("torch", "dp_reshardable", "fully_reshardable"),
    "0.14.0": ("torch", "fully_sharded_bucket_space", "fully_sharded_model_space"),
}
DEEPSPEED = ("0.19.8", "0.17.6")
OLDER = ("0.14.0", "0.17.6")  # by ranks alone


def counted(command: str, release: tuple[str, str], out: Path, *arguments: str, side: str) -> dict[str, Any]:
    """The counts of each rank, by part."""
    on = {"tree": tree(*release), "delivery": DELIVERIES[side], "env": PERMISSIVE if side == "upstream" else {}}
    found: dict[str, Any] = run_json("counting", command, out, *arguments, timeout=900, **on)
    return found


def rows(command: str, release: tuple[str, str], size: Size, to: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """Of both sides, which begin with folders of the same length: names are in what is written."""
    for side in DELIVERIES:
        found = counted(command, release, to / f"{side:8}", "--ranks", str(size.ranks), *arguments, side=side)
        for part, of_ranks in found.items():
            yield scale_page.row(named(release), part, size, side, of_ranks)


def test_the_zarr_strategy(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for size in OF_ZARR:
        out = tmp_path / f"{size.ranks}-{size.chunks}"
        found += rows("zarr", ("megatron-core", "0.15.3"), size, out, "--chunks", str(size.chunks))
    scale_page.record("zarr strategy", found)


@pytest.mark.parametrize("on", MEGATRON)
def test_checkpoints_of_megatron_core(on: str, tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for number, size in enumerate(RANKS if on in OLDER else OF_A_RUN):
        options = ("--layers", str(size.layers), "--hidden", str(size.hidden), "--formats", ",".join(MEGATRON[on]))
        out = tmp_path / str(number)
        found += rows("megatron", ("megatron-core", on), size, out, *options)
        found += migrations(on, size, out / f"{'ours':8}")
    scale_page.record(f"megatron-core {on}", found)


@pytest.mark.parametrize("on", DEEPSPEED)
def test_checkpoints_of_deepspeed_and_the_tools_on_them(on: str, tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for number, size in enumerate(RANKS if on in OLDER else OF_A_RUN):
        out = tmp_path / str(number)
        options = ("--layers", str(size.layers), "--hidden", str(size.hidden), "--stages", "1,3")
        found += rows("zero", ("deepspeed", on), size, out, *options)
        found += tools(on, size, out / f"{'ours':8}")
    scale_page.record(f"DeepSpeed {on}", found)


def tools(version: str, size: Size, folder: Path) -> Iterator[dict[str, Any]]:
    """Upstream has a converter alone."""
    release, more = ("deepspeed", version), ("--num_extract_workers", "1", "--num_merge_workers", "1")
    for stage in ("1", "3"):
        source = folder / stage / "global_step1"
        sides = {"upstream": "deepspeed.checkpoint.ds_to_universal", "ours": "deepspeed_patches.ds_to_universal"}
        for side, module in sides.items():
            to = folder / f"{side:8}{stage}"
            options = ("--input_folder", str(source), "--output_folder", str(to), *more)
            of_all = counted("tool", release, folder, module, *options, side=side)["tool"]
            yield scale_page.row(named(release), f"stage {stage}, conversion", size, side, of_all)
        yield command(release, size, folder, f"stage {stage}, audit", "audit", str(source))
        moment = next(place for place in tensors(source) if place.name.endswith("exp_avg"))
        put(moment, b"\x00\x00\xc0\x7f")  # NaN
        to = folder / f"repaired{stage}"
        yield command(release, size, folder, f"stage {stage}, repair", "repair", str(source), "--output", str(to))


def migrations(version: str, size: Size, folder: Path) -> Iterator[dict[str, Any]]:
    """Of the formats with flattened ranges."""
    release = ("megatron-core", version)
    for name in (one for one in MEGATRON[version] if one.startswith("fully_sharded")):
        source, to = folder / "second" / name, folder / f"migrated-{name}"
        yield command(release, size, folder, f"{name}, audit", "audit", str(source))
        yield command(release, size, folder, f"{name}, migrate", "migrate", str(source), "--output", str(to))


def command(release: tuple[str, str], size: Size, folder: Path, part: str, *arguments: str) -> dict[str, Any]:
    """One of `ckpt-patches`, alone in a process."""
    of_all = counted("tool", release, folder, "ckpt_patches", *arguments, "--workers", "1", side="ours")["tool"]
    return scale_page.row(named(release), part, size, "ours", of_all)


def named(release: tuple[str, str]) -> str:
    return " ".join(release).replace("deepspeed", "DeepSpeed")


def test_the_page_and_its_picture() -> None:
    """The last of this file: of what the others have recorded."""
    scale_page.write()
    print(f"\nwrote {scale_page.PAGE.name} and {scale_page.PICTURE.name}")
