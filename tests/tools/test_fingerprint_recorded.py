"""The record of a run equals its files, survives a migration, and is verified in the run that loads."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from changed_elements import Bits, change_elements
from ckpt_patches.cli import command_line
from ckpt_patches.formats import torch_dist_reader
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT
from ckpt_patches.migrate import migrate
from ckpt_patches.migrate.output import OutputFile
from ckpt_patches.runtime.progress import shown_in_order
from every_checkpoint import EVERY
from upstream import all_releases, newest, once, releases, run, tree

pytestmark = pytest.mark.slow

ON = {"CKPT_PATCHES_FINGERPRINT": "1"}
NEWEST = newest("megatron-core")


@dataclass(frozen=True)
class Gpt:
    """How tests/programs/gpt_resume.py saves."""

    version: str
    options: str
    parameters: int = 11
    format: str = ""
    default: bool = False

    @property
    def arguments(self) -> list[str]:
        usual = "fully_reshardable" if self.version > "0.15" else "fully_sharded_model_space"
        return ["--format", self.format or usual, *self.options.split()]


HYBRID = Gpt(NEWEST, "--dp 2 --offload 0.5", format="dp_reshardable", default=True)
GPTS = [
    Gpt(NEWEST, "--tp 2 --dp 2", default=True),
    Gpt(NEWEST, "--ep 2 --dp 2 --experts", parameters=12, default=True),  # two optimizers
    Gpt(NEWEST, "--tp 2 --dp 2 --optimizer whole", default=True),
    Gpt(NEWEST, "--tp 2 --dp 2", format="dp_reshardable", default=True),
    Gpt(NEWEST, "--ep 2 --dp 2 --experts", parameters=12, format="dp_reshardable", default=True),
    HYBRID,
    Gpt(NEWEST, "--pp 2 --dp 2", format="dp_zero_gather_scatter", default=True),
    Gpt("0.14.0", "--ep 2 --dp 2 --experts", parameters=12, format="dp_zero_gather_scatter"),
    Gpt("0.14.0", "--tp 2 --dp 2 --backend zarr", format="fully_sharded_bucket_space"),
    Gpt("0.12.0", "--tp 2 --dp 2 --backend zarr", format="fully_sharded_bucket_space"),
    Gpt("0.12.0", "--tp 2 --dp 2 --backend zarr", format="dp_zero_gather_scatter"),
    Gpt(NEWEST, "--tp 2 --dp 2 --optimizer whole --fp32"),
    Gpt(NEWEST, "--tp 1 --dp 2 --fp32"),
    Gpt("0.16.1", "--pp 2 --dp 2"),
    Gpt("0.14.0", "--tp 2 --dp 2", default=True),
    Gpt("0.14.0", "--tp 2 --dp 2 --backend zarr"),
    Gpt("0.12.0", "--tp 2 --dp 2 --backend zarr"),
    Gpt("0.12.0", "--ep 2 --dp 2 --experts --backend zarr", parameters=12),
]


def some(gpts: list[Gpt]) -> list[Gpt]:
    return [gpt for gpt in gpts if gpt.default or all_releases()]


def saved(gpt: Gpt) -> Path:
    """The path of its checkpoint."""

    def save(folder: Path) -> None:
        root = tree("megatron-core", gpt.version)
        run("gpt_resume", "save", folder, *gpt.arguments, tree=root, delivery="hook", env=ON)

    name = f"recorded-{gpt.version}-{gpt.format}-{gpt.options}"
    return once(name.replace(" ", ""), save) / "checkpoint"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = command_line.main([*arguments])
    return status, capsys.readouterr().out


@pytest.mark.parametrize("gpt", some(GPTS), ids=str)
def test_the_files_are_what_the_run_has_recorded(gpt: Gpt, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = said(capsys, "fingerprint", str(saved(gpt)))
    assert status == 0
    states = 3 * gpt.parameters
    assert out.splitlines()[-1] == f"against the record of the run: verified: {states} states"
    status, out = said(capsys, "audit", "--json", str(saved(gpt)))
    (found,) = json.loads(out)["checkpoints"]
    # The padding of these buckets is uninitialized and can look like damage.
    assert status == 0 or (gpt.format == "fully_sharded_bucket_space" and found["verdict"] == "UNKNOWN")
    noted = {finding["name"] for finding in found["findings"] if f"verified: {states} states" in finding["detail"]}
    assert noted == {"recorded"}


def test_the_torch_format_has_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save = ("--formats", "torch", "--inner", "fused", "--only", "save")
    run("exact_resume", tmp_path, *save, tree=tree("megatron-core", NEWEST), delivery="hook", env=ON)
    assert command_line.main(["fingerprint", str(tmp_path / "plain" / "torch")]) == 2
    assert "have numbers in place of names" in capsys.readouterr().err


# The layouts that load a checkpoint of another layout of ranks.
OTHER = {
    "--tp 2 --dp 2": ["--pp 2 --dp 2", "--tp 1 --dp 4"],
    "--tp 2 --dp 2 --backend zarr": ["--pp 2 --dp 2 --backend zarr", "--tp 1 --dp 4 --backend zarr"],
    "--ep 2 --dp 2 --experts": ["--ep 2 --dp 4 --experts"],
    "--ep 2 --dp 2 --experts --of-each 4": ["--ep 4 --dp 4 --experts --of-each 4"],
}


def in_other_layouts() -> list[Any]:
    """The cases above and one of each other release: 0.12 in zarr, as its torch_dist needs an older torch."""
    chosen = [gpt for gpt in some(GPTS) if gpt.options in OTHER and not gpt.format]
    versions = [str(one.id) for one in releases("megatron-core", oldest="0.12.0")] if all_releases() else []
    more = [one for one in versions if one not in {gpt.version for gpt in chosen}]
    experts = [Gpt(one, "--ep 2 --dp 2 --experts --of-each 4", parameters=12) for one in versions if one >= "0.16"]
    others = [Gpt(one, "--tp 2 --dp 2" + " --backend zarr" * one.startswith("0.12.")) for one in more]
    return [*chosen, *others, *experts]


@pytest.mark.parametrize("gpt", in_other_layouts(), ids=str)
def test_a_load_in_another_layout_is_verified(gpt: Gpt, tmp_path: Path) -> None:
    for options in OTHER[gpt.options] if all_releases() else OTHER[gpt.options][:1]:
        other = Gpt(gpt.version, options)
        folder = tmp_path / options.replace(" ", "")
        folder.mkdir()
        resume: tuple[str | Path, ...] = ("resume", folder, "--checkpoint", saved(gpt), *other.arguments)
        log = run("gpt_resume", *resume, tree=tree("megatron-core", gpt.version), delivery="hook", env=ON).stderr
        assert f"resume verified: {3 * gpt.parameters} states, " in log
        assert "not verified" not in log


@pytest.mark.parametrize("gpt", [gpt for gpt in some(GPTS) if gpt.version < "0.15" and not gpt.format], ids=str)
def test_the_number_goes_through_a_migration_into_the_run_that_loads(
    gpt: Gpt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flattened ranges become n-dimensional boxes, with the same fingerprints."""
    new = tmp_path / "new"
    assert command_line.main(["migrate", str(saved(gpt)), "--output", str(new)]) == 0
    assert f"verified: {3 * gpt.parameters} states" in capsys.readouterr().out
    assert command_line.main(["compare", str(saved(gpt)), str(new)]) == 0
    options = ["--format", "fully_reshardable", *gpt.options.replace("--backend zarr", "").split()]
    resume: tuple[str | Path, ...] = ("resume", saved(gpt).parent, "--checkpoint", new, *options)
    log = run("gpt_resume", *resume, tree=tree("megatron-core", NEWEST), delivery="hook", env=ON).stderr
    assert f"resume verified: {3 * gpt.parameters} states, " in log


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved(GPTS[0]), tmp_path / "copy"))


def change(path: Path, role: str, bits: Callable[[Bits], Bits]) -> None:
    """Change a state of the word embedding from element 16 on, in its first chunk's file."""
    found = torch_dist_reader.read(path)
    shard = next(shard for shard in found.shards if "word_embeddings" in shard.parameter)
    change_elements(found, shard, role, 16, bits)


def flipped(bits: Bits) -> Bits:
    return np.concatenate([bits[:1] ^ np.uint32(1), bits[1:]])


def lost(bits: Bits) -> Bits:
    return np.concatenate([np.zeros(100, np.uint32), bits[100:]])


def test_one_flipped_bit_is_damage(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit of a moment, which only the record detects, is damage that a repair alone cannot mend."""
    change(copy, EXP_AVG, flipped)
    status, out = said(capsys, "fingerprint", str(copy))
    assert status == 1
    assert "embedding.word_embeddings.weight  exp_avg  differs: other values" in out
    status, out = said(capsys, "audit", "--json", str(copy))
    (found,) = json.loads(out)["checkpoints"]
    assert (status, found["verdict"]) == (1, "DAMAGED")
    assert {finding["name"] for finding in found["findings"] if finding["severity"] != "note"} == {"not_as_recorded"}
    assert command_line.main(["repair", str(copy), "--output", str(tmp_path / "repaired")]) == 2
    assert "not_as_recorded" in capsys.readouterr().err
    assert not (tmp_path / "repaired").exists()


def test_main_parameters_that_a_hybrid_optimizer_saves_twice_are_compared_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(saved(HYBRID), tmp_path / "copy"))
    found = torch_dist_reader.read(folder)
    copies = (shard for shard in found.shards if shard.parameter.endswith(".master_param"))
    shard = max(copies, key=lambda shard: shard.numel)  # others can be gaps between parameters
    change_elements(found, shard, WEIGHT, 16, flipped)
    status, out = said(capsys, "fingerprint", str(folder))
    assert (status, out.count("  master  differs")) == (1, 1), out


def test_a_repair_says_which_states_are_no_more_what_was_recorded(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repaired = tmp_path / "repaired"
    change(copy, MASTER, lost)
    assert command_line.main(["repair", str(copy), "--output", str(repaired)]) == 0
    capsys.readouterr()
    status, out = said(capsys, "audit", "--notes", str(repaired))
    assert (status, "REPAIRED" in out) == (0, True)
    (line,) = [line for line in out.splitlines() if "master: other values" in line]
    assert line.split()[:2] == ["repaired", "embedding.word_embeddings.weight"]


CHAINED_OR_IN_BUCKETS = [
    gpt for gpt in GPTS if gpt.default and gpt.version == NEWEST and gpt.format != "dp_reshardable"
]


@pytest.mark.parametrize("gpt", [gpt for gpt in CHAINED_OR_IN_BUCKETS if gpt.parameters > 11 or gpt.format], ids=str)
def test_lost_squares_of_chained_optimizers_and_buckets_may_differ(gpt: Gpt, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved(gpt), tmp_path / "iter_0000003"))
    found = torch_dist_reader.read(path)
    shard = max((one for one in found.shards if EXP_AVG_SQ in one.streams), key=lambda one: one.numel)
    count = shard.numel * 2 // 5
    change_elements(found, shard, EXP_AVG_SQ, shard.numel // 3, lambda bits: np.append(0 * bits[:count], bits[count:]))
    assert command_line.main(["audit", str(path)]) == 1
    assert command_line.main(["repair", str(path), "--output", str(tmp_path / "new"), "--reset-moments"]) == 0
    assert command_line.main(["audit", str(tmp_path / "new")]) == 0


def test_a_migration_of_what_was_repaired_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its list does not fit the new files: a rebuilt main parameter and reset moments would look like lost ones."""
    (old,) = [gpt for gpt in GPTS if gpt == Gpt("0.14.0", "--tp 2 --dp 2", default=True)]
    damaged, repaired, new = tmp_path / "damaged", tmp_path / "repaired", tmp_path / "new"
    shutil.copytree(saved(old), damaged)
    change(damaged, MASTER, lost)
    change(damaged, EXP_AVG_SQ, lambda bits: np.concatenate([np.full(100, 0x7FC00000, np.uint32), bits[100:]]))  # NaN
    assert command_line.main(["repair", str(damaged), "--output", str(repaired), "--reset-moments"]) == 0
    capsys.readouterr()
    assert command_line.main(["migrate", str(repaired), "--output", str(new)]) == 1
    assert "load it in megatron-core 0.15.3 with the fixes and save it as dp_reshardable" in capsys.readouterr().err
    assert not new.exists()
    assert command_line.main(["migrate", str(repaired), "--output", str(new), "--damaged-as-is"]) == 0
    assert command_line.main(["audit", str(new)]) == 1


def test_a_migration_that_writes_another_value_does_not_get_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (gpt,) = [gpt for gpt in GPTS if gpt == Gpt("0.14.0", "--tp 2 --dp 2", default=True)]

    def spoiling(write: Any, files: Sequence[OutputFile], *others: Any) -> Iterator[int]:
        yield from shown_in_order(write, files, *others)
        begin, entry = next(own for own in files[0].placed() if ".exp_avg." in own[1].key)
        with open(write.keywords["folder"] / files[0].name, "r+b") as file:
            file.seek(begin + entry.layout.places["0"])
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))

    monkeypatch.setattr(migrate, "shown_in_order", spoiling)
    assert command_line.main(["migrate", str(saved(gpt)), "--output", str(tmp_path / "new")]) == 1
    said = capsys.readouterr().err
    (left,) = tmp_path.iterdir()
    assert f"{left} is not what was recorded: not_as_recorded " in said
    assert "; remove it, and begin anew" in said
    assert re.fullmatch(r"new-\w+\.unfinished", left.name)


def test_without_a_record_nothing_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    path = EVERY["0.19, fully_reshardable"].path
    assert command_line.main(["fingerprint", str(path)]) == 0
    assert "no recorded fingerprints, nothing was compared" in capsys.readouterr().err
    assert "recorded" not in said(capsys, "audit", "--notes", str(path))[1]
