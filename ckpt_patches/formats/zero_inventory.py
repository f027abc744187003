"""Consistency checks of a ZeRO checkpoint by what its own files state: what is absent, foreign or contradictory. Pure.

The ranks' optimizer files must agree: the same groups, the same states of the same optimizer, the same settings and
steps. The model files state world sizes and shapes. No tensor data is read.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_patches.formats import settings, zero_experts, zero_keys, zero_pipeline
from ckpt_patches.formats.damages import (
    CONTRADICTION,
    FOREIGN_FILE,
    MISSING_RANK,
    MISSING_STATE,
    MISSING_WEIGHT,
    MIXED_RANKS,
    MIXED_STEPS,
    RARE,
    UNUSUAL,
    Finding,
)
from ckpt_patches.formats.zero import EXPERT as EXPERT_FILE
from ckpt_patches.formats.zero import OPTIMIZER, RankFile, Shape
from ckpt_patches.runtime.shown import shown

EXPERT = re.compile(r"\.deepspeed_experts\.|\.experts\.w[123]$")
NAMED = re.compile(r"global_step(\d{1,15})")
LEAST_DISTINCTIVE = 16  # elements
MOST_KEYS = 5  # to report per file
MOST_FILES = 20_000  # of experts, to report
MOST_RANKS = 1 << 20  # of one kind; a larger number in a file is ignored


@dataclass(frozen=True)
class ModelFacts:
    """A model-states file."""

    name: str
    value: Mapping[str, Any]  # what the file holds; tensors are headers
    root: str = ""  # as in RankFile


Rank = tuple[int, int]  # data-parallel, model-parallel
Ranks = Mapping[Rank, RankFile]
Models = Mapping[tuple[int | None, int], ModelFacts]  # the data-parallel rank is None before stage 3


def problems(
    ranks: Ranks, models: Models, stage: int, names: Collection[str], files: Iterable[Rank]
) -> Iterator[Finding]:
    """Yield all problems, each once, in the order of the files.

    Args:
        ranks: the optimizer files that could be read.
        models: the model files that could be read.
        stage: of ZeRO.
        names: of all files in the folder.
        files: the ranks that have a file, readable or not.
    """
    layers = zero_pipeline.layer_files(names)
    has_experts = any(map(EXPERT_FILE.fullmatch, names)) or any(own.value.get("num_experts") for own in models.values())
    yield from _model_parallel_ranks({*ranks, *files}, models)
    yield from _data_parallel_ranks(ranks, models, {*ranks, *files}, has_experts=has_experts)
    yield from _roots(ranks)
    yield from _copies(ranks)
    stages = _stages(ranks, layers)
    yield from _keys(ranks, stages, stage)
    yield from _groups(ranks)
    yield from _states(ranks, models)
    yield from itertools.chain(*map(_settings, stages))
    yield from _steps(ranks)
    yield from _counted_steps(ranks, models)
    yield from _models(models, stage, has_layers=bool(layers))
    yield from _layers(layers, models)
    yield from _expert_files(names, models)


def blocking(found: Iterable[Finding]) -> list[Finding]:
    """The problems without those that a run can save."""
    return [problem for problem in found if problem.kind not in (UNUSUAL, RARE)]


def degree(stated: Any, counts: Iterable[Any], ranks: Iterable[int]) -> int:
    """The number of data-parallel ranks: from the model files, or the ranks' files, or the file names."""
    sizes = {count for count in map(count_of, counts) if count}
    return count_of(stated) or max(sizes, default=max(ranks) + 1)


def _data_parallel_ranks(
    ranks: Ranks, models: Models, files: Iterable[Rank], *, has_experts: bool
) -> Iterator[Finding]:
    """Check that each model-parallel rank has all data-parallel ranks. Only some of these share a group of experts."""
    there: dict[int, set[int]] = {}
    for dp, mp in files:
        there.setdefault(mp, set()).add(dp)
    by_model_rank = dict(_by_model_rank(ranks))
    for mp in sorted(there):
        own = by_model_rank.get(mp, {})
        model = models.get((None, mp)) or models.get((0, mp))
        stated = model.value.get("dp_world_size") if model else None
        if stated is not None and count_of(stated) is None:
            detail = f"dp_world_size is {shown(stated)}, expected a number of ranks"
            yield Finding(CONTRADICTION, "model states", detail)
        count = degree(stated, (size for facts in own.values() for size in facts.data_parallel), there[mp])
        yield from absent_ranks(there[mp], count)
        for dp, facts in own.items():
            others = [
                size
                for size in facts.data_parallel
                if size != count and not (has_experts and count_of(size) and count % size == 0)
            ]
            if others:
                sizes = ", ".join(map(shown, dict.fromkeys(others)))
                yield Finding(MIXED_RANKS, facts.name, f"of {sizes} ranks, expected {count}")
            elif dp >= count:
                yield Finding(MIXED_RANKS, facts.name, f"of rank {dp}, and the save has {count} ranks")


def _model_parallel_ranks(ranks: Collection[Rank], models: Models) -> Iterator[Finding]:
    """Check that there are as many model-parallel ranks as the model files state."""
    stated = {count_of(model.value.get("mp_world_size")) for model in models.values()} - {None}
    if len(stated) > 1:
        yield Finding(CONTRADICTION, "mp_world_size", f"model files state {_listed(stated)} model-parallel ranks")
    count = max((size for size in stated if size is not None), default=1)
    for there, what in (models, "the file of its model states"), (ranks, "all files of its optimizer states"):
        yield from absent_ranks({mp for _, mp in there}, count, what, "model-parallel ")
    for number in sorted({mp for _, mp in (*ranks, *models) if mp >= count}):
        if stated:
            yield Finding(FOREIGN_FILE, f"model-parallel rank {number}", f"the model files state {count} of them")


def absent_ranks(there: Collection[int], count: int, what: str = "", kind: str = "") -> Iterator[Finding]:
    """Yield a problem for each range of absent ranks out of `count`."""
    for before, after in itertools.pairwise((-1, *sorted(number for number in there if number < count), count)):
        if after - before > 1:
            yield Finding(MISSING_RANK, f"{kind}{numbered(before + 1, after - 1, count)}", what)


def numbered(first: int, last: int, count: int) -> str:
    """The description of ranks, numbered from 0: `rank 1 of 4`."""
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    return f"{ranks} of {count}"


def count_of(value: Any) -> int | None:
    """The value if it is a number of ranks; None for anything else, and for more than any job has."""
    return value if type(value) is int and 0 < value <= MOST_RANKS else None


def _roots(ranks: Ranks) -> Iterator[Finding]:
    """Find copies of other ranks' files: torch.save names the records' folder after the file that it writes."""
    for facts in ranks.values():
        written_as = f"{facts.root}.pt"
        if OPTIMIZER.fullmatch(written_as) and _is_of_another_rank(facts.root, facts.name):
            yield Finding(FOREIGN_FILE, facts.name, f"it was written as {written_as}: it is another rank's")


def _is_of_another_rank(root: str, name: str) -> bool:
    own = _rank_in(root)
    return bool(own) and own != _rank_in(name)


def _rank_in(name: str) -> list[str]:
    return re.findall(r"\d+", name.removeprefix("fp16_").removeprefix("bf16_"))


def _copies(ranks: Ranks) -> Iterator[Finding]:
    """Find ranks and moments that are bit-identical, by their checksums."""
    first: dict[tuple[int, tuple[tuple[int, ...], ...]], str] = {}
    masters = {facts.name: [own.master_crc for own in facts.partitions] for facts in ranks.values()}
    for (_, mp), facts in sorted(ranks.items()):
        for number, own in enumerate(facts.partitions):
            if len(set(own.moment_crcs)) < len(own.moment_crcs):
                detail = f"group {number}: two of its moments are the same, bit for bit: one is a copy"
                yield Finding(FOREIGN_FILE, facts.name, detail)
        if not _is_distinctive(facts):
            continue
        other = first.setdefault((mp, tuple(own.moment_crcs for own in facts.partitions)), facts.name)
        if other != facts.name:
            # If a layer was initialized with zeros, equal rows have equal gradients; then main parameters are zeros.
            is_copy = any(masters[other]) and masters[facts.name] == masters[other]
            detail = f"its moments are those of {other}, bit for bit{': it is a copy' if is_copy else ''}"
            yield Finding(FOREIGN_FILE if is_copy else UNUSUAL, facts.name, detail)


def _is_distinctive(facts: RankFile) -> bool:
    """Whether a rank's moments cannot equal another rank's by chance: there are enough, and some are not zero."""
    return sum(own.needed for own in facts.partitions if own.moment_crcs) >= LEAST_DISTINCTIVE


def _keys(ranks: Ranks, stages: Iterable[Ranks], stage: int) -> Iterator[Finding]:
    """Check that every rank's file has the keys of all others, and each group its parameters' numbers.

    The items of lists are compared only within a pipeline stage.
    """
    usual = zero_keys.usual(facts.keys for facts in ranks.values())
    for of_stage in stages:
        own = zero_keys.usual(facts.keys for facts in of_stage.values())
        expected = {key: value for key, value in usual.items() if key in own or not zero_keys.ITEM.search(key)}
        expected |= {key: value for key, value in own.items() if zero_keys.ITEM.search(key)}
        for facts in of_stage.values():
            for what in itertools.islice(zero_keys.contradictions(facts.keys, expected), MOST_KEYS):
                yield Finding(CONTRADICTION, facts.name, what)
            for what in settings.not_groups(facts.settings):
                yield Finding(CONTRADICTION, facts.name, what)
    if stage < 3 and ranks and zero_keys.VERSION not in usual:
        yield Finding(CONTRADICTION, "all ranks", f"no {zero_keys.VERSION}, without which no load begins")


def _stages(ranks: Ranks, layers: Iterable[tuple[int, int]]) -> list[dict[Rank, RankFile]]:
    """The ranks of each pipeline stage, which has its own param groups. Without a pipeline, all ranks."""
    tensor_parallel = 1 + max((rank for _, rank in layers), default=1 << 20)
    found: dict[int, dict[Rank, RankFile]] = {}
    for (dp, mp), facts in sorted(ranks.items()):
        found.setdefault(mp // tensor_parallel, {})[dp, mp] = facts
    return list(found.values())


def _groups(ranks: Ranks) -> Iterator[Finding]:
    """Check that all data-parallel ranks have the same number of groups."""
    for _, by_rank in _by_model_rank(ranks):
        own = by_rank.values()
        for what, counts in (
            ("groups of optimizer states", [len(facts.partitions) for facts in own]),
            ("param groups", [len(facts.settings) for facts in own]),
        ):
            usual = max(counts)
            for facts, count in zip(own, counts, strict=True):
                if count != usual:
                    yield Finding(CONTRADICTION, facts.name, f"{count} {what}, other ranks have {usual}")


def _by_model_rank(ranks: Ranks) -> Iterator[tuple[int, dict[int, RankFile]]]:
    """Yield each model-parallel rank with its data-parallel ranks."""
    for mp, own in itertools.groupby(sorted(ranks, key=lambda rank: rank[::-1]), key=lambda rank: rank[1]):
        yield mp, {rank[0]: ranks[rank] for rank in own}


def _states(ranks: Ranks, models: Models) -> Iterator[Finding]:
    """Check that every rank has all states of its optimizer, for each element that it owns."""
    promised = _promised(ranks)
    every = [group for facts in ranks.values() for group in facts.partitions]
    # An unknown optimizer can have states per block, such as quantization scales.
    of_elements = {
        name
        for group in every
        for name, numel in group.sizes.items()
        if (numel or 0) >= group.needed >= LEAST_DISTINCTIVE
    }
    of_elements |= {"fp32", "exp_avg", "exp_avg_sq"}
    steps = max((taken_steps(model.value) for model in models.values()), default=0)
    for facts in ranks.values():
        for number, group in enumerate(facts.partitions):
            if not group.needed:
                continue  # only padding
            names = promised.get(_optimizer_of(facts, number), set()) | _by_settings(facts, number, steps, promised)
            is_of_torch = _optimizer_of(facts, number) >= settings.TORCHS_ADAM
            if is_of_torch and group.sizes.get("exp_avg") is not None and facts.step is None:
                names |= {"step"}
            for name in sorted(names - group.sizes.keys()):
                yield Finding(MISSING_STATE, facts.name, f"group {number} has no {shown(name)}")
            for name, numel in group.sizes.items():
                if numel is not None and numel < group.needed and name in of_elements:
                    detail = f"group {number}: {shown(name)} has {numel} elements, its parameters {group.needed}"
                    yield Finding(MISSING_STATE, facts.name, detail)


def _promised(ranks: Ranks) -> dict[frozenset[str], set[str]]:
    """The names of the states that any rank has, by optimizer. The settings identify an optimizer."""
    found: dict[frozenset[str], set[str]] = {}
    for facts in ranks.values():
        for number, group in enumerate(facts.partitions):
            found.setdefault(_optimizer_of(facts, number), set()).update(group.sizes)
    return found


def _optimizer_of(facts: RankFile, group: int) -> frozenset[str]:
    """The names of a group's settings; for a stage 3 sub-group, whose param group is unknown, its number."""
    kinds = {frozenset(own) for own in facts.settings}
    if len(kinds) > 1 and len(facts.settings) != len(facts.partitions):
        return frozenset({f"sub-group {group}"})
    return frozenset(facts.settings[group]) if group < len(facts.settings) else frozenset()


def _by_settings(facts: RankFile, group: int, steps: int, promised: Mapping[frozenset[str], set[str]]) -> set[str]:
    optimizer = _optimizer_of(facts, group)
    known = facts.settings[group] if group < len(facts.settings) else {}
    return states_by_settings(optimizer, known, promised.get(optimizer, set()), steps)


def states_by_settings(
    optimizer: Collection[str], known: Mapping[str, Any], has: Collection[str], steps: int
) -> set[str]:
    """The states that Adam and SGD keep after a step. Their settings identify them.

    Lion has no eps, Adamax another second moment.
    """
    has = {*has} - {"fp32", "step"}
    if {"momentum", "dampening", "nesterov"} <= {*optimizer} and known.get("momentum") and steps:
        return {"momentum_buffer"}
    if not {"betas", "eps"} <= {*optimizer} or has - {"exp_avg", "exp_avg_sq"}:
        return set()
    return {"exp_avg", "exp_avg_sq"} if has or steps else set()


def taken_steps(model: Mapping[str, Any]) -> int:
    """Steps of the run that were not skipped because of an overflow."""
    taken, skipped = model.get("global_steps"), model.get("skipped_steps")
    return max(taken - (skipped if type(skipped) is int else 0), 0) if type(taken) is int else 0


def _settings(ranks: Ranks) -> Iterator[Finding]:
    """Check that optimizers accept the settings and steps, and that all ranks have the same settings."""
    if not ranks:
        return
    (_, first), *others = sorted(ranks.items())
    for facts in ranks.values():
        stated = {f"step of group {n}": own.stated_step for n, own in enumerate(facts.partitions)}
        steps = {called: step for called, step in stated.items() if step is not None}
        for what in (*settings.not_numbers(facts.settings), *settings.not_steps(steps)):
            yield Finding(CONTRADICTION, facts.name, what)
        if settings.is_not_finite(facts.loss_scale):
            yield Finding(CONTRADICTION, facts.name, f"the loss scale is {facts.loss_scale}")
    for _, facts in others:
        for number, (own, expected) in enumerate(zip(facts.settings, first.settings, strict=False)):
            for what in settings.differences(own, expected):
                yield Finding(CONTRADICTION, facts.name, f"group {number}: {what} in {first.name}")


def _steps(ranks: Ranks) -> Iterator[Finding]:
    """Check that all ranks are at one step, including model-parallel ranks."""
    newest = max((step for facts in ranks.values() if (step := facts.step) is not None), default=None)
    for facts in ranks.values():
        if facts.step not in (None, newest):
            yield Finding(MIXED_STEPS, facts.name, f"step {facts.step:g}, others are at {newest:g}")
    for _, own in _by_model_rank(ranks):
        yield from _steps_of_groups(own.values(), newest)
    by_group = [
        {own.stated_step for own in facts.partitions if settings.is_step(own.stated_step)} for facts in ranks.values()
    ]
    if mixed := [steps for steps in by_group if len(steps) > 1]:
        steps = ", ".join(f"{step:g}" for step in sorted(mixed[0])[:5])
        yield Finding(UNUSUAL, "param groups", f"they are at different steps: {steps}")


def _steps_of_groups(own: Iterable[RankFile], newest: float | None) -> Iterator[Finding]:
    """Check that a group is at one step on all ranks that share it."""
    first: dict[int, tuple[float, str]] = {}
    for facts in own:
        for number, group in enumerate(facts.partitions):
            own_step = group.stated_step
            if not settings.is_step(own_step) or facts.step != newest:
                continue  # reported elsewhere
            step, name = first.setdefault(number, (own_step, facts.name))
            if own_step != step:
                detail = f"group {number} is at step {own_step:g}, and at {step:g} in {name}"
                yield Finding(MIXED_STEPS, facts.name, detail)


def _counted_steps(ranks: Ranks, models: Models) -> Iterator[Finding]:
    """Check that the engine's and the optimizer's steps agree. After a load without optimizer states they differ."""
    steps = {int(facts.step) for facts in ranks.values() if facts.step is not None}
    begins = {0, 1} if all(map(_has_a_count_of_its_own, ranks.values())) else {0}
    for facts in models.values():
        counted = taken_steps(facts.value)
        if len(steps) == 1 and steps.isdisjoint(counted + begin for begin in begins):
            yield Finding(UNUSUAL, facts.name, f"the engine has counted {counted} steps, the optimizer {min(steps)}")


def _has_a_count_of_its_own(facts: RankFile) -> bool:
    """Whether only settings have the step, beside numbers that Adam's have not: Prodigy's and PSGD's begin at 1."""
    of_states = any(own.stated_step is not None for own in facts.partitions)
    return not of_states and any(settings.is_own(*one) for group in facts.settings for one in group.items())


def _layers(layers: Mapping[tuple[int, int], str], models: Models) -> Iterator[Finding]:
    """Check that a pipeline's layers have a file per tensor-parallel rank, and that no parameter's file is absent."""
    expected = {
        f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
        for layer, rank in itertools.product({one for one, _ in layers}, {rank for _, rank in layers})
        if (layer, rank) not in layers
    }
    for (_, mp), facts in models.items():
        if layers and not isinstance(facts.value.get("module"), Mapping):
            found = zero_pipeline.places(shapes_by_name(facts.value), layers.values(), mp)
            expected |= {place.file for name, place in found.items() if not is_expert(name)} - {*layers.values()}
    for name in sorted(expected):
        yield Finding(MISSING_WEIGHT, name, "the file is missing")


def _expert_files(names: Iterable[str], models: Models) -> Iterator[Finding]:
    """Check that each expert in layers of `deepspeed.moe` has a file. Model files state the numbers of experts."""
    there = {*names}
    absent = (name for name in _files_of_experts(models) if name not in there)
    for name in itertools.islice(absent, MOST_FILES):
        yield Finding(MISSING_WEIGHT, name, "the file is missing")
    if next(absent, None):
        yield Finding(MISSING_WEIGHT, "experts", f"more than {MOST_FILES} files are missing")


def _files_of_experts(models: Models) -> Iterator[str]:
    """The files that model files state, in `deepspeed.moe`'s numbers of experts by layer."""
    for (_, mp), facts in models.items():
        counts = facts.value.get("num_experts")
        is_autoep = any(map(facts.value.get, zero_experts.AUTOEP))
        if not isinstance(counts, list) or is_autoep:
            continue
        for layer, count in enumerate(counts):
            for expert in range(count if isinstance(count, int) and 0 <= count < MOST_RANKS else 0):
                yield f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"


def _models(models: Models, stage: int, *, has_layers: bool) -> Iterator[Finding]:
    """Check that model files are of one step and one run, and have all weights in `param_shapes`."""
    first = next(iter(models.values()), None)
    for (_, mp), facts in models.items():
        assert first is not None
        yield from absent_keys(facts)
        for key in ("iteration", "global_steps", "dp_world_size"):
            if settings.differ(facts.value.get(key), first.value.get(key)):
                detail = f"{key} is {shown(facts.value.get(key))}, and {shown(first.value.get(key))} in {first.name}"
                yield Finding(CONTRADICTION, facts.name, detail)
        same = next(other for (_, rank), other in models.items() if rank == mp)
        if shapes_by_name(facts.value) != shapes_by_name(same.value):
            yield Finding(CONTRADICTION, facts.name, f"its param_shapes are others than those in {same.name}")
        yield from _frozen(facts)
        yield from absent_weights(facts, has_layers=has_layers)


def other_step(folder: str, models: Iterable[ModelFacts]) -> Iterator[Finding]:
    """Compare the steps with the folder's name. DeepSpeed names folders after the step unless the user does."""
    named = NAMED.fullmatch(folder)
    for facts in models:
        counted = facts.value.get("global_steps")
        if named and type(counted) is int and counted != int(named[1]):
            yield Finding(UNUSUAL, facts.name, f"it states {counted} steps, and the folder is named {folder}")


def absent_keys(facts: ModelFacts) -> Iterator[Finding]:
    """Yield problems for absent keys that every load needs."""
    for key in zero_keys.OF_THE_MODEL:
        if key not in facts.value:
            yield Finding(CONTRADICTION, facts.name, f"no {key}, without which no load begins")


def shapes_by_name(model: Mapping[str, Any]) -> dict[str, Shape]:
    """The shapes of the trained parameters in a model file."""
    groups: Any = model.get("param_shapes")
    groups = groups if isinstance(groups, (list, tuple)) else ()
    return {n: tuple(shape) for group in groups if isinstance(group, Mapping) for n, shape in group.items()}


def _frozen(facts: ModelFacts) -> Iterator[Finding]:
    """Check the fragments of frozen parameters."""
    frozen, fragments = facts.value.get("frozen_param_shapes"), facts.value.get("frozen_param_fragments")
    held = fragments if isinstance(fragments, Mapping) else {}
    shapes = frozen if isinstance(frozen, Mapping) else {}
    for name in sorted(shapes.keys() - held.keys(), key=str):
        yield Finding(MISSING_WEIGHT, facts.name, f"no fragment of the frozen parameter {shown(name)}")
    for name in sorted(held.keys() - shapes.keys(), key=str):
        yield Finding(CONTRADICTION, facts.name, f"no shape of the frozen parameter {shown(name)}")
    if shapes and facts.root and _is_of_another_rank(facts.root, facts.name):
        detail = f"it was written as {facts.root}.pt: its parts of frozen parameters are another rank's"
        yield Finding(FOREIGN_FILE, facts.name, detail)


def absent_weights(facts: ModelFacts, *, has_layers: bool) -> Iterator[Finding]:
    """Yield problems for absent weights and buffers. A pipeline has them in files of its layers."""
    module = facts.value.get("module")
    if not isinstance(module, Mapping):
        if not has_layers:
            detail = f"expected the weights of the model, found {type(module).__name__}"
            yield Finding(MISSING_WEIGHT, facts.name, detail)
        return
    for name, shape in shapes_by_name(facts.value).items():
        if name not in module and 0 not in shape and not is_expert(name):
            yield Finding(MISSING_WEIGHT, facts.name, f"no weight of {name:.100}")
    buffers = facts.value.get("buffer_names")
    for name in buffers if isinstance(buffers, list) else ():
        if isinstance(name, str) and name not in module:
            yield Finding(MISSING_WEIGHT, facts.name, f"no buffer {name:.100}")
    tied = facts.value.get("shared_params")
    for name, other in tied.items() if isinstance(tied, Mapping) else ():
        if isinstance(other, str) and other in module and name not in module:
            yield Finding(MISSING_WEIGHT, facts.name, f"no weight of {shown(name)}, which is tied to {shown(other)}")
    frozen = facts.value.get("frozen_param_shapes")
    shapes = frozen if isinstance(frozen, Mapping) else {}
    absent = shapes.keys() - module.keys()
    for name in sorted(absent) if len(absent) < len(shapes) else ():  # a save can omit all of them
        yield Finding(MISSING_WEIGHT, facts.name, f"no weight of the frozen {name:.100}")


def is_expert(name: str) -> bool:
    """Whether the weights of a parameter are in files of experts, as with `deepspeed.moe` and AutoEP."""
    return EXPERT.search(name) is not None


def _listed(values: Iterable[Any]) -> str:
    return " and ".join(map(str, sorted(values)))
