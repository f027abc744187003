"""Rules on all shards of a checkpoint: what a rank or every parameter has lost, and steps that contradict moments."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_patches.audit.judging import blocks
from ckpt_patches.audit.judging.scan import OddRuns, stretches
from ckpt_patches.audit.rules import BOTH, OF_OPTIMIZER, SMALL, ZERO_MASTER
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import MASTER, MOMENTS, WEIGHT, Checkpoint, Shard
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dtypes import FLOATS

# Names of the scales of a state of 8 bits, in bitsandbytes and torchao, or of a state that is too small for it.
SCALES = re.compile(r"\.((absmax|state)[12]|scale)$")


@dataclass(frozen=True)
class Part:
    """What one rank holds of a shard."""

    shard: Shard
    rank: str  # empty if unknown
    begin: int
    end: int
    is_zero: bool  # whether both moments of all its elements are zero


def parts_of(shard: Shard, runs: OddRuns) -> list[Part]:
    """The parts of a shard by rank, or one part; none if it has no moments."""
    if not set(MOMENTS) <= shard.streams.keys() or shard.is_padding:
        return []
    zeros, owners = stretches(runs, BOTH), (own for own in shard.owners if own.end > own.begin)
    return [Part(shard, *own, any(begin <= own.begin and own.end <= end for begin, end in zeros)) for own in owners]


def scales_of(shard: Shard, runs: OddRuns) -> list[Part]:
    """The shard as a part, by its file, if it is the scales of a state of 8 bits, or a state in place of one."""
    is_state = SCALES.search(shard.parameter) and OF_OPTIMIZER.search(shard.parameter)
    if not is_state or shard.streams.keys() != {WEIGHT} or shard.streams[WEIGHT].dtype not in FLOATS:
        return []
    file = Path(shard.streams[WEIGHT].extents[0].path).name
    return [Part(shard, file, 0, shard.numel, stretches(runs, blocks.NO_MASTER) == [(0, shard.numel)])]


def of_scales(parts: list[Part]) -> Iterator[Finding]:
    """Scales that are zero in all states of a file: so are the states."""
    for own in _by_rank(parts):
        if all(part.is_zero for part in own):
            detail = f"all {len(own)} scales of the optimizer's states are zero, and so are the states"
            yield Finding(damages.UNUSUAL, own[0].rank, detail=detail)


def of_zero_masters(found: Checkpoint, findings: list[Finding]) -> Iterator[Finding]:
    """The findings; a main parameter that is zero only in some shards becomes `LOST_MASTER`."""
    counts = Counter(shard.streams[MASTER].array for shard in found.shards if MASTER in shard.streams)
    zeros = Counter(finding.array for finding in findings if finding.detail.startswith(ZERO_MASTER))
    for finding in findings:
        if finding.detail.startswith(ZERO_MASTER) and zeros[finding.array] < counts[finding.array]:
            yield replace(finding, kind=damages.LOST_MASTER, detail="all zeros, and the other shards are not")
        else:
            yield finding


def of_sparse_moments(found: Checkpoint, findings: list[Finding]) -> list[Finding]:
    """The findings, without short runs in a moment that is sparse in most other shards: those are no lost slices."""
    small = {(s.array, shard.label) for shard in found.shards for s in shard.streams.values() if shard.numel < SMALL}
    kept = list(findings)
    for role in MOMENTS:
        own = {(s.array, shard.label) for shard in found.shards if (s := shard.streams.get(role)) is not None}
        lost = {(f.array, f.shard) for f in findings if f.kind is damages.LOST_MOMENT} & own
        sparse = {(f.array, f.shard) for f in findings if f.kind is damages.SPARSE_MOMENT} & own
        if len(sparse - lost) >= len(lost):
            natural = lost & small
            kept = [f for f in kept if f.kind is not damages.LOST_MOMENT or (f.array, f.shard) not in natural]
    return kept


def of_moments(found: Checkpoint, parts: list[Part]) -> Iterator[Finding]:
    """Findings for moments that are zero in a parameter, on a rank or everywhere, or not zero at step 0."""
    if found.step == 0:
        if places := sum(not part.is_zero for part in parts):
            found.step = None
            yield _at_step_0(found, f"moments that are not zero in {places} places, and ")
        return
    by_parameter: dict[str, list[Part]] = {}
    for part in parts:
        by_parameter.setdefault(part.shard.parameter, []).append(part)
    empty = {name for name, own in by_parameter.items() if all(part.is_zero for part in own)}
    if found.step is not None and parts and len(empty) == len(by_parameter):
        yield from _zeros(damages.NO_MOMENTS, parts, f"step {found.step}")
        return
    lost = [part for own in _by_rank(parts) if _is_lost(own, by_parameter) for part in own if part.is_zero]
    for part in lost:
        yield from _zeros(damages.LOST_MOMENT, [part], f"as all that {part.rank} holds")
    for part in (part for part in parts if part.is_zero and part not in lost):
        if part.shard.parameter in empty:
            yield from _zeros(damages.PARAMETER_WITHOUT_MOMENTS, [part], f"step {found.step}")


def _by_rank(parts: Iterable[Part]) -> Iterable[list[Part]]:
    found: dict[str, list[Part]] = {}
    for part in parts:
        if part.rank:
            found.setdefault(part.rank, []).append(part)
    return found.values()


def _is_lost(own: list[Part], by_parameter: dict[str, list[Part]]) -> bool:
    """Whether a rank has no moments in most of its parameters, and other ranks have some of the same parameters.

    Unseen tokens, experts and units leave a rank without moments in a few parameters.
    """
    names = {part.shard.parameter for part in own}
    zero = names - {part.shard.parameter for part in own if not part.is_zero}
    shared = {
        name for name in zero if any(part.rank != own[0].rank and not part.is_zero for part in by_parameter[name])
    }
    return (len(shared) > 1 and 2 * len(zero) > len(names)) or (len(shared) > 0 and len(zero) == len(names) > 1)


def _zeros(kind: damages.FindingKind, parts: Iterable[Part], detail: str) -> Iterator[Finding]:
    for part in parts:
        for role in MOMENTS:
            yield Finding(kind, part.shard.streams[role].array, detail, part.shard.label, part.begin, part.end)


def _at_step_0(found: Checkpoint, detail: str) -> Finding:
    """Moments although the step is 0, or although no file has a step."""
    if found.format.startswith("megatron") and not any("step" in group for group in found.groups):
        return Finding(damages.UNUSUAL, "param_groups", detail=f"{detail}no step: a load counts from 0")
    return Finding(damages.CONTRADICTION, "the optimizer's step", detail=f"{detail}step 0: a load counts from there")
