"""The kinds of damage, and how each is made in a healthy checkpoint.

Those of Trainer's and Accelerate's own files are in test_audit_trainer.py.
"""

import fnmatch
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from ckpt_patches.audit.audit import audit
from ckpt_patches.audit.judging import record_checksums
from ckpt_patches.formats.checkpoint import Checkpoint, Shard
from upstream import newest, tree

MOMENTS = ("exp_avg", "exp_avg_sq")

# Damages of a healthy checkpoint


class Source(NamedTuple):
    """Other checkpoints that a damage takes files of."""

    earlier: Path  # the save before, of the same run
    other: Path  # of another run


Change = Callable[[Path, random.Random, Source], bool]  # False: it does not apply


class Damage(NamedTuple):
    what: str
    of: tuple[str, ...]  # the healthy kinds, patterns
    change: Change


# Kinds that no rule can find, with the reason: docs/reference/findings.md has the same table.
UNDETECTABLE = {
    "*: whole rows of both moments": "an unseen token, a dead unit or an unused expert has the same",
    "*: a parameter without moments": "an unused expert or branch has the same",
    "ranks: [!f]*: a rank's file of *": "each step is in one rank's file only, and none names the save",
    "ranks: fsdp*: a rank's file of *": "the same",
    "ranks: files of ranks: a rank's file of another run": "nothing in the file contradicts the others",
    "deepspeed: zero 3: a rank's file of another run": "the same",
    "*: all optimizer files of another run, zero 3": "the same",
    "*: moments moved by one element": "any other number of the same size is possible",
    "*: moments of another parameter": "the same",
    "dcp: *: a weight initialized again": "no main parameter is beside the weight",
    "trainer: *: the model of an earlier step": "safetensors name no step",
    "*: both moments in a part of a bucket": "frozen and unused parameters have the same",
}


def is_undetectable(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in UNDETECTABLE)


def values_of(shard: Shard, role: str) -> list["np.memmap[Any, np.dtype[Any]]"]:
    kind = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}[shard.streams[role].dtype]
    return [
        np.memmap(e.path, kind, "r+", e.offset, (e.nbytes // np.dtype(kind).itemsize,))
        for e in shard.streams[role].extents
        if e.nbytes
    ]


def changed(found: Checkpoint, shard: Shard, role: str, begin: int, end: int, change: Callable[[Any], Any]) -> None:
    """Change the elements of a state, and the checksums."""
    at = 0
    for part in values_of(shard, role):
        own = slice(max(begin - at, 0), max(min(end - at, len(part)), 0))
        part[own] = change(part[own])
        part.flush()
        at += len(part)
    for extent in shard.streams[role].extents:
        for record in found.records:
            if record.path == extent.path and record.offset <= extent.offset < record.offset + record.nbytes:
                record_checksums.update_checksum(record)


def zeros(values: Any) -> Any:
    return np.zeros_like(values)


def with_moments(found: Checkpoint, least: int, *roles: str) -> list[Shard]:
    """The shards that have moments that are not all zero, and these states."""
    needed = {*MOMENTS, *roles, *(["weight"] if "master" in roles else [])}
    own = [s for s in found.shards if not s.is_padding and needed <= s.streams.keys() and s.numel >= least]
    return [shard for shard in own if all(np.any(part) for part in values_of(shard, "exp_avg_sq"))]


Picked = Iterator[tuple[Shard, str, int, int, Callable[[Any], Any]]]  # a shard, a state, a range, and its new elements


def elements(pick: Callable[[Checkpoint, random.Random], Picked]) -> Change:
    def change(folder: Path, choose: random.Random, _: Source) -> bool:
        found = audit(folder).checkpoint
        picked = list(pick(found, choose))
        for own in picked:
            changed(found, *own)
        return bool(picked)

    return change


def one_of(shards: list[Shard], choose: random.Random) -> list[Shard]:
    return choose.sample(shards, min(1, len(shards)))


def _drawn_rows(shard: Shard, choose: random.Random) -> tuple[int, int]:
    """A row that is not zero."""
    squares = np.concatenate(values_of(shard, "exp_avg_sq")).reshape(-1, shard.row)
    begin = choose.choice(np.flatnonzero(squares.any(1)).tolist()) * shard.row
    return begin, begin + shard.row


def _drawn_slice(shard: Shard, choose: random.Random) -> tuple[int, int]:
    """At least eight elements, and not all of the rows at its edges, or what is zero there anyway."""
    squares = np.concatenate(values_of(shard, "exp_avg_sq"))
    while True:
        begin = choose.randrange(shard.numel - 7)
        end = choose.randrange(begin + 8, shard.numel + 1)
        before = squares[begin // shard.row * shard.row : begin]
        behind = squares[end : -(-end // shard.row) * shard.row]
        if before.any() or behind.any():
            return begin, end


def slice_of(*roles: str, rows: bool = False) -> Change:
    """Lose a slice, that is not whole rows, or one of whole rows."""

    def pick(found: Checkpoint, choose: random.Random) -> Picked:
        shards = [s for s in with_moments(found, 64, *roles) if len(s.shape) > 1 and s.has_rows]
        for shard in one_of(shards, choose):
            begin, end = _drawn_rows(shard, choose) if rows else _drawn_slice(shard, choose)
            for role in roles:
                yield shard, role, begin, end, zeros

    return elements(pick)


def a_parameter_without_moments(found: Checkpoint, choose: random.Random) -> Picked:
    name = choose.choice([shard.parameter for shard in with_moments(found, 1)])
    for shard in (shard for shard in found.shards if shard.parameter == name):
        for role in MOMENTS:
            yield shard, role, 0, shard.numel, zeros


def no_moments(found: Checkpoint, _: random.Random) -> Picked:
    for shard in found.shards if found.step != 0 else ():
        for role in {*MOMENTS} & shard.streams.keys():
            yield shard, role, 0, shard.numel, zeros


def of_a_rank(*roles: str) -> Change:
    """Zero these states in all that one rank has written."""

    def pick(found: Checkpoint, choose: random.Random) -> Picked:
        rank = choose.randrange(2)
        files = (f"__{rank}_0.distcp", f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        for shard in found.shards:
            for role in {*roles} & shard.streams.keys():
                at = 0
                extents = [extent for extent in shard.streams[role].extents if extent.nbytes]
                for part, extent in zip(values_of(shard, role), extents, strict=True):
                    if extent.path.endswith(files):
                        yield shard, role, at, at + len(part), zeros
                    at += len(part)

    return elements(pick)


def one_element(role: str, value: Callable[[Any], Any]) -> Change:
    def pick(found: Checkpoint, choose: random.Random) -> Picked:
        for shard in one_of([s for s in with_moments(found, 1) if role in s.streams], choose):
            at = choose.randrange(shard.numel)
            yield shard, role, at, at + 1, value

    return elements(pick)


def not_rounding(how: str) -> Change:
    """Main parameters that are not those of the weights: other numbers, or those of some steps earlier."""

    def pick(found: Checkpoint, choose: random.Random) -> Picked:
        noise = np.random.default_rng(choose.randrange(1 << 30))
        scale = 0.03 if how == "all" else 1.0

        def moved(values: Any) -> Any:
            return (values * (1 + scale * noise.normal(size=len(values)))).astype(np.float32)

        shards = with_moments(found, 1, "master")
        for shard in shards if how == "all" else one_of(shards, choose):
            yield shard, "master", 0, shard.numel, moved

    return elements(pick)


def moments_of_another(found: Checkpoint, choose: random.Random) -> Picked:
    """Two parameters of one shape have each other's moments."""
    shards = with_moments(found, 1)
    pairs = [(a, b) for a in shards for b in shards if a.parameter < b.parameter and a.shape == b.shape]
    for pair in choose.sample(pairs, min(1, len(pairs))):
        for role in MOMENTS:
            values = [np.concatenate(values_of(shard, role)) for shard in pair]
            for shard, new in zip(pair, reversed(values), strict=True):
                yield shard, role, 0, shard.numel, _in_turn(new)


def _in_turn(values: Any) -> Callable[[Any], Any]:
    """A change that puts these values in place of others, part after part."""
    left = list(values)

    def change(part: Any) -> Any:
        own = left[: len(part)]
        del left[: len(part)]
        return np.asarray(own, part.dtype)

    return change


def moved(*roles: str) -> Change:
    """The states of a parameter are moved by one element."""

    def pick(found: Checkpoint, choose: random.Random) -> Picked:
        for shard in one_of(with_moments(found, 8, *roles), choose):
            for role in roles:
                yield shard, role, 0, shard.numel, _in_turn(np.roll(np.concatenate(values_of(shard, role)), 1))

    return elements(pick)


def initialized_again(role: str) -> Change:
    def pick(found: Checkpoint, choose: random.Random) -> Picked:
        noise = np.random.default_rng(choose.randrange(1 << 30))
        for shard in one_of([s for s in with_moments(found, 8) if role in s.streams], choose):
            is_bf16 = shard.streams[role].dtype == "bfloat16"

            def drawn(values: Any, is_bf16: bool = is_bf16) -> Any:
                new = noise.normal(size=len(values)).astype(np.float32) * np.float32(0.02)
                return (new.view(np.uint32) >> 16).astype(np.uint16) if is_bf16 else new.astype(values.dtype)

            yield shard, role, 0, shard.numel, drawn

    return elements(pick)


def loaded(folder: Path) -> Any:
    """The states of a checkpoint in torch.distributed.checkpoint, with its keys."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "all.pt")
        dcp_to_torch_save(folder, file)
        return torch.load(file, weights_only=False)


def again(folder: Path, change: Callable[[dict[str, Any]], None]) -> bool:
    """Save the states of an optimizer again, changed."""
    value = loaded(folder)
    for state in value["optimizer"]["state"].values():
        change(state)
    shutil.rmtree(folder)
    dcp.save(value, checkpoint_id=folder, no_dist=True)
    return True


def without(name: str) -> Change:
    return lambda folder, *_: again(folder, lambda state: state.pop(name, None))


def without_in_one(folder: Path, choose: random.Random, _: Source) -> bool:
    number = choose.randrange(8)
    seen: list[int] = []

    def change(state: dict[str, Any]) -> None:
        seen.append(1)
        if len(seen) == number + 1:
            state.pop("exp_avg_sq")

    return again(folder, change)


def steps_of_zero(folder: Path, *_: Any) -> bool:
    return again(folder, lambda state: state["step"].zero_())


# Files

SHARED = (".metadata", "common.pt", "metadata.json")


def files_of(folder: Path) -> list[Path]:
    """The files that a save needs: not the index, and no file of what only a tool reads."""
    kinds = (".distcp", ".pt", ".pth", ".bin", ".safetensors")
    every = [file for file in folder.rglob("*") if file.is_file() and file.name != "training_args.bin"]
    return sorted(file for file in every if file.suffix in kinds or file.name in SHARED or _is_chunk(file))


def _is_chunk(file: Path) -> bool:
    return (file.parent / ".zarray").exists() and file.name[0].isdigit() and file.parent.suffix != ".sync"  # a lock


def truncated(folder: Path, choose: random.Random, _: Source) -> bool:
    file = choose.choice([file for file in files_of(folder) if file.stat().st_size])
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return True


def emptied(folder: Path, choose: random.Random, _: Source) -> bool:
    choose.choice([file for file in files_of(folder) if file.stat().st_size]).write_bytes(b"")
    return True


def missing(folder: Path, choose: random.Random, _: Source) -> bool:
    choose.choice([file for file in files_of(folder) if file.name != "scheduler.bin"]).unlink()
    return True


def flipped(folder: Path, choose: random.Random, _: Source) -> bool:
    """One bit of a tensor in a file with checksums."""
    found = audit(folder).checkpoint
    records = [record for record in found.records if record.nbytes > 8]
    if not records:
        return False
    record = choose.choice(records)
    with open(record.path, "r+b") as file:
        file.seek(record.offset + choose.randrange(record.nbytes))
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ (1 << choose.randrange(8))]))
    return True


def rank_files(folder: Path, rank: int) -> list[Path]:
    """The files of a rank's optimizer."""
    patterns = (
        f"__{rank}_0.distcp",
        f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        f"optim_world_*_rank_{rank}.pt",
    )
    return [file for pattern in patterns for file in sorted(folder.glob(pattern))]


def file_of(which: str) -> Change:
    """A rank's file is that of the save before, or of another run."""

    def change(folder: Path, choose: random.Random, source: Source) -> bool:
        files = rank_files(folder, choose.randrange(2))
        for file in files:
            others = sorted(getattr(source, which).glob(file.name))
            if not others:
                return False
            shutil.copyfile(others[0], file)
        return bool(files)

    return change


def files_of_another_run(pattern: str) -> Change:
    def change(folder: Path, _: random.Random, source: Source) -> bool:
        files = sorted(folder.glob(pattern))
        for file in files:
            if not (source.other / file.name).exists():
                return False
            shutil.copyfile(source.other / file.name, file)
        return bool(files)

    return change


def files_of_an_earlier_step(pattern: str) -> Change:
    def change(folder: Path, _: random.Random, source: Source) -> bool:
        files = sorted(folder.glob(pattern))
        for file in files:
            shutil.copyfile(source.earlier / file.name, file)
        return bool(files)

    return change


def swapped(folder: Path, *_: Any) -> bool:
    """The files of two ranks have each other's names."""
    for one, other in zip(rank_files(folder, 0), rank_files(folder, 1), strict=True):
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
    return bool(rank_files(folder, 0))


def duplicated(folder: Path, *_: Any) -> bool:
    for one, other in zip(rank_files(folder, 0), rank_files(folder, 1), strict=True):
        shutil.copyfile(one, other)
    return bool(rank_files(folder, 0))


def of_more_ranks(folder: Path, *_: Any) -> bool:
    """Files of two more ranks are left from a save before."""
    files = sorted(folder.glob("*zero_pp_rank_1_mp_rank_00_*.pt"))
    for file in files:
        for rank in (2, 3):
            shutil.copyfile(file, file.with_name(file.name.replace("_rank_1_", f"_rank_{rank}_", 1)))
    return bool(files)


def of_states(change: Callable[[dict[str, Any]], Any], *, of_all: bool = True) -> Change:
    """Change the states in the optimizer files of ZeRO, or of Trainer: of all, or of one rank."""

    def apply(folder: Path, choose: random.Random, _: Source) -> bool:
        files = sorted([*folder.glob("*optim_states.pt"), *folder.glob("optimizer.*")])
        _import_deepspeed()
        for file in files if of_all else [choose.choice(files)]:
            value = torch.load(file, weights_only=False)
            for state in _states_in(value):
                change(state)
            torch.save(value, file)
        return bool(files)

    return apply


def _import_deepspeed() -> None:
    """The classes in its files are those of the newest release."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    path = str(tree("deepspeed", newest("deepspeed")))
    if path not in sys.path:
        sys.path.append(path)


def _states_in(value: Any) -> list[dict[str, Any]]:
    """All states of parameters: dicts below a key `state` or `base_optimizer_state`."""
    found: list[dict[str, Any]] = []
    for key, own in value.items() if isinstance(value, dict) else ():
        if key == "state" and isinstance(own, dict) and all(isinstance(state, dict) for state in own.values()):
            found += own.values()
        elif key == "base_optimizer_state" and isinstance(own, list):
            found += own
        elif isinstance(own, dict):
            found += _states_in(own)
    return found


def zero_nested(state: dict[str, Any]) -> None:
    """All numbers of a state, nested ones too."""
    for value in state.values():
        if isinstance(value, dict):
            zero_nested(value)
        elif isinstance(value, torch.Tensor) and value.numel() > 1:
            value.zero_()


def nan_nested(state: dict[str, Any]) -> None:
    for value in state.values():
        if isinstance(value, dict):
            nan_nested(value)
        elif isinstance(value, torch.Tensor) and value.numel() > 1 and value.is_floating_point():
            value.view(-1)[0] = float("nan")


DCP, RANKS = "dcp: AdamW", ("ranks: fsdp", "ranks: hsdp", "ranks: fsdp, flat names")
ZERO = tuple(f"deepspeed: zero {stage}" for stage in (1, 2, 3))
WITH_MASTERS = ZERO[:2]
MEGATRON = tuple(
    f"megatron: {kind}"
    for kind in ("*, fully_reshardable", "*, dp_zero_gather_scatter", "0.14.0, zarr", "0.14.0, torch_dist")
)
BUCKETS = ("megatron: *, dp_reshardable", "megatron: *, torch")
UNIVERSAL = "universal: zero *"
TRAINER, LORA, WITH_ZERO = "trainer: AdamW", "trainer: LoRA", "trainer: zero [23]"
FILES = (*("deepspeed: zero [12]", "deepspeed: zero 3"), "ranks: files of ranks")
ROWS = (DCP, *RANKS, *ZERO, *MEGATRON, UNIVERSAL)
EVERY = (*ROWS, *BUCKETS, TRAINER, "accelerate: AdamW")
DAMAGES = [
    Damage("a slice of exp_avg", ROWS, slice_of("exp_avg")),
    Damage("a slice of exp_avg_sq", ROWS, slice_of("exp_avg_sq")),
    Damage("a slice of both moments", ROWS, slice_of(*MOMENTS)),
    Damage("whole rows of exp_avg_sq", ROWS, slice_of("exp_avg_sq", rows=True)),
    Damage("whole rows of both moments", ROWS, slice_of(*MOMENTS, rows=True)),
    Damage("a slice of main parameters", (*WITH_MASTERS, *MEGATRON, UNIVERSAL), slice_of("master")),
    Damage("a parameter without moments", EVERY, elements(a_parameter_without_moments)),
    Damage("no moments", EVERY, elements(no_moments)),
    Damage("moments of a rank", (*RANKS, *ZERO), of_a_rank(*MOMENTS)),
    Damage("first moments of a rank", (*RANKS, *ZERO), of_a_rank("exp_avg")),
    Damage("all states of a rank", (*RANKS, *ZERO), of_a_rank("master", *MOMENTS)),
    Damage("weights of a rank", RANKS, of_a_rank("master")),
    Damage("NaN in a moment", EVERY, one_element("exp_avg", lambda v: v * np.nan)),
    Damage("NaN in a main parameter", (*ROWS, *BUCKETS), one_element("master", lambda v: v * np.nan)),
    Damage("a negative square", EVERY, one_element("exp_avg_sq", lambda v: -np.abs(v) - 1)),
    Damage("main parameters of a parameter", (*WITH_MASTERS, *MEGATRON, UNIVERSAL), not_rounding("one")),
    Damage("main parameters of an earlier step", (*WITH_MASTERS, *MEGATRON), not_rounding("all")),
    Damage("moments moved by one element", ROWS, moved(*MOMENTS)),
    Damage("main parameters moved by one element", (*WITH_MASTERS, *MEGATRON), moved("master")),
    Damage("moments of another parameter", ROWS, elements(moments_of_another)),
    Damage("a weight initialized again", (*WITH_MASTERS, *MEGATRON), initialized_again("weight")),
    Damage("a weight initialized again", (DCP,), initialized_again("master")),
    Damage("exp_avg_sq dropped for all", (DCP, *RANKS[:1]), without("exp_avg_sq")),
    Damage("step dropped for all", (DCP, *RANKS[:1]), without("step")),
    Damage("exp_avg_sq dropped for one", (DCP, *RANKS[:1]), without_in_one),
    Damage("steps of 0", (DCP, *RANKS[:1]), steps_of_zero),
    Damage("exp_avg_sq dropped", (*ZERO, TRAINER), of_states(lambda state: state.pop("exp_avg_sq"))),
    Damage("step dropped", (*ZERO, TRAINER), of_states(lambda state: state.pop("step", None))),
    Damage("step 0", (*ZERO, TRAINER), of_states(lambda state: state["step"].zero_())),
    Damage("exp_avg dropped in a rank", ZERO, of_states(lambda state: state.pop("exp_avg"), of_all=False)),
    Damage("a rank's file of an earlier step", (*RANKS, *FILES), file_of("earlier")),
    Damage("a rank's file of another run", (*RANKS, *FILES), file_of("other")),
    Damage("swapped files", FILES, swapped),
    Damage("a duplicated file", FILES, duplicated),
    Damage("files of more ranks", ("deepspeed: zero [123]",), of_more_ranks),
    Damage("model states of another run", WITH_MASTERS, files_of_another_run("*model_states.pt")),
    Damage("model states of an earlier step", WITH_MASTERS, files_of_an_earlier_step("*model_states.pt")),
    Damage("all optimizer files of another run", WITH_MASTERS, files_of_another_run("*optim_states.pt")),
    Damage("all optimizer files of another run, zero 3", ZERO[2:], files_of_another_run("*optim_states.pt")),
    Damage(
        "nested states of zeros in a rank", ("deepspeed: zero ?, AdamW8bit*",), of_states(zero_nested, of_all=False)
    ),
    Damage("nested states of zeros", ("deepspeed: zero ?, AdamW8bit*",), of_states(zero_nested)),
    Damage("NaN in nested states", ("deepspeed: zero ?, AdamW8bit*",), of_states(nan_nested, of_all=False)),
    Damage("nested states dropped", ("deepspeed: zero ?, AdamW8bit*",), of_states(dict.clear, of_all=False)),
    Damage("a truncated file", (*EVERY, *FILES, LORA), truncated),
    Damage("an empty file", (*EVERY, *FILES, LORA), emptied),
    Damage("a missing file", (*EVERY, *FILES, LORA, WITH_ZERO), missing),
    Damage("a flipped bit", (*EVERY, *FILES), flipped),
    Damage("the optimizer of an earlier step", (TRAINER,), files_of_an_earlier_step("optimizer.pt")),
    Damage("the model of an earlier step", (TRAINER,), files_of_an_earlier_step("model.safetensors")),
]
