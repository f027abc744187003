"""Many layouts of a gradient buffer, split like megatron-core since 0.15.0: no element moves to a wrong place.

tests/test_audit_shifted.py has the few buffers of real models, which need a training each.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from ckpt_patches.audit.judging import shift_search, shifted
from ckpt_patches.formats.checkpoint import MASTER, MOMENTS, WEIGHT, Extent, Shard, Stream
from ckpt_patches.formats.elements import read_elements
from upstream import all_releases

WAS_WRONG = 45  # constants between the halves of gated parameters, which were once taken for neighbors
ROLES = (MASTER, *MOMENTS)
States: TypeAlias = "dict[str, npt.NDArray[np.float32]]"


@dataclass(frozen=True)
class Parameter:
    """A parameter of a buffer: its name, true states, and place in the buffer with padding."""

    name: str
    label: str
    states: States
    start: int
    shift: int


def some_states(random: np.random.Generator, numel: int, *, constant: bool) -> States:
    """Main parameters, all of which round to one number if `constant`, and moments, some of them zero."""
    masters = 1 + random.normal(size=numel) * 1e-4 if constant else random.normal(size=numel)
    averages, squares = random.normal(size=numel) * 1e-2, random.random(numel) + 0.1
    without_gradient = random.random(numel) < random.choice([0, 0.3])
    averages[without_gradient] = squares[without_gradient] = 0
    return {role: values.astype(np.float32) for role, values in zip(ROLES, (masters, averages, squares), strict=True)}


def some_buffer(seed: int, *, constants: bool) -> tuple[list[Parameter], States]:
    """A buffer's parameters, and its states without the padding at the ends of buckets."""
    random = np.random.default_rng(seed)
    divisor = math.lcm(int(random.choice([2, 3, 5, 6, 12])), 128)
    bucket_size = int(random.choice([100, 300, 1000]))
    found: list[Parameter] = []
    parts: dict[str, list[npt.NDArray[np.float32]]] = {role: [] for role in ROLES}
    at = bucket_start = shift = 0
    for number in range(int(random.integers(4, 12))):
        sizes = (
            random.integers(1, 40),
            random.integers(1, 300),
            random.integers(300, 2000),
            64 * random.integers(1, 8),
        )
        numel = int(random.choice(sizes))
        start = -(-at // 64) * 64
        for role in ROLES:
            parts[role].append(np.zeros(start - at, np.float32))
        is_gated = random.random() < 0.2
        for half in range(2 if is_gated else 1):
            states = some_states(random, numel, constant=constants and random.random() < 0.35)
            found.append(Parameter(f"p{number}", str(half), states, start + half * numel, shift))
            for role in ROLES:
                parts[role].append(states[role])
        at = start + (2 if is_gated else 1) * numel
        if at - bucket_start >= bucket_size:
            bucket_start = -(-at // divisor) * divisor
            shift, at = shift + bucket_start - at, bucket_start
    return found, {role: np.concatenate(parts[role]) for role in ROLES}


def save(parameters: list[Parameter], buffer: States, seed: int, file: Path) -> list[Shard]:
    """Write the shards as the releases save them, in random order."""
    shards = []
    with open(file, "wb") as out:

        def put(array: npt.NDArray[np.generic]) -> tuple[Extent, ...]:
            out.write(array.tobytes())
            return (Extent(str(file), out.tell() - array.nbytes, array.nbytes),)

        for number in np.random.default_rng(seed).permutation(len(parameters)).tolist():
            own = parameters[number]
            numel = len(own.states[MASTER])
            streams = {WEIGHT: Stream(own.name, "bfloat16", put(rounded(own.states[MASTER])))}
            for role in ROLES:
                cut = buffer[role][own.start : own.start + numel]
                filled = np.concatenate([cut, np.zeros(numel - len(cut), np.float32)])
                streams[role] = Stream(f"optimizer.state.{role}.{own.name}", "float32", put(filled))
            shards.append(Shard(own.name, own.label, (numel,), streams))
    return shards


def rounded(masters: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to the nearest bf16, ties to even."""
    bits = masters.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("seed", range(100) if all_releases() else [1, 2, WAS_WRONG])
def test_what_is_moved_belongs_there_and_what_is_said_is_so(seed: int, constants: bool, tmp_path: Path) -> None:
    parameters, buffer = some_buffer(seed, constants=constants)
    shards = save(parameters, buffer, seed, tmp_path / "states")
    shift_search.forget()
    found = shifted.find(shards)
    by_name = {(own.name, own.label): own for own in parameters}
    truth = [by_name[shard.parameter, shard.label] for shard in shards]
    is_told = any(
        own.shift and len(own.states[MASTER]) - own.shift >= 100 and np.ptp(rounded(own.states[MASTER])) > 100
        for own in parameters
    )
    if found is None:
        assert not is_told
        return
    assert any(own.shift for own in parameters)
    for by, own in zip(found.by, truth, strict=True):
        assert by in (None, own.shift)
    covered = [np.zeros(shard.numel, np.int64) for shard in shards]
    for move in found.moves:
        covered[move.target][move.offset : move.offset + move.length] += 1
        for role in ROLES:
            saved = read_elements(shards[move.source].streams[role], move.begin, move.begin + move.length)
            expected = truth[move.target].states[role][move.offset : move.offset + move.length]
            np.testing.assert_array_equal(saved.view(np.uint32), expected.view(np.uint32))
    for own_covered, ranges in zip(covered, found.lost, strict=True):
        for begin, end in ranges:
            own_covered[begin:end] += 1
        assert (own_covered == 1).all()
    if not constants:
        lost = sum(end - begin for ranges in found.lost for begin, end in ranges)
        alike = 8  # elements; by chance a few can match two parameters
        assert 0 <= lost - in_no_file(parameters, len(buffer[MASTER])) <= alike


def in_no_file(parameters: list[Parameter], length: int) -> int:
    """The number of elements whose place without padding is in no parameter's place with padding."""
    saved = np.zeros(length + max(own.start + len(own.states[MASTER]) for own in parameters), np.bool_)
    for own in parameters:
        saved[own.start : own.start + len(own.states[MASTER])] = True
    right = (slice(own.start - own.shift, own.start - own.shift + len(own.states[MASTER])) for own in parameters)
    return sum(int((~saved[own]).sum()) for own in right)
