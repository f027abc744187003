"""Compare the pure parts of the converter with slow code in torch: layouts, merged bytes, plans."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_patches.convert import layout
from ckpt_patches.convert.conversion_plan import AVERAGED, PLACED, Content, Plan, TorchOutput, plan
from ckpt_patches.convert.layout import Layout, SubParams
from ckpt_patches.convert.merging import Merger
from ckpt_patches.convert.reading import Reader
from ckpt_patches.convert.source import Source
from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.zero import ElementType, Flat, Folder, Partition, RankFile, Step
from ckpt_patches.formats.zero_folder import Zero, shapes_of, slices
from ckpt_patches.formats.zero_inventory import ModelFacts

SMALL = settings(max_examples=150, deadline=None)
FLOAT32 = ElementType("float32")
DP, STATES = st.integers(1, 9), ("fp32", "exp_avg", "exp_avg_sq")


class Memory(Reader):
    """A stub of the files: bytes by path."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files

    def read(self, path: str, offset: int, into: memoryview) -> None:
        into[:] = self.files[path][offset : offset + len(into)]


def placed(content: Content, window: int, files: Mapping[str, bytes]) -> bytes:
    """A storage, merged window by window."""
    return b"".join(map(bytes, Merger(Memory(files), window).blocks(content, "w")))


def merged(slices: list[torch.Tensor], where: Layout, window: int, how: str = PLACED) -> bytes:
    """The slices as one content; to be averaged, as copies."""
    files = {str(n): own.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for n, own in enumerate(slices)}
    own = [partial(tuple, [Extent(path, 0, len(data))]) for path, data in files.items()]
    copies = [[one] for one in own] if how == AVERAGED else [own]
    return placed(Content(str(slices[0].dtype).removeprefix("torch."), where, copies, how), window, files)


def by_layout(slices: list[torch.Tensor], where: Layout, window: int) -> torch.Tensor:
    found = merged(slices, where, window)
    return (
        torch.frombuffer(bytearray(found), dtype=torch.float32).view(where.shape) if found else torch.empty(where.shape)
    )


def numbered(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors in which all elements differ."""
    begins = itertools.accumulate((math.prod(shape) for shape in shapes), initial=0)
    return [
        torch.arange(b, b + math.prod(s), dtype=torch.float32).view(s) for b, s in zip(begins, shapes, strict=False)
    ]


@SMALL
@given(st.data(), st.integers(0, 2), st.integers(1, 40))
def test_slices_along_a_dimension(data: st.DataObject, dim: int, window: int) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=dim + 1, max_size=3))
    widths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    slices = numbered(*((*shape[:dim], width, *shape[dim + 1 :]) for width in widths))
    where = layout.concatenated("w", [tuple(s.shape) for s in slices], dim)
    assert by_layout(slices, where, 4 * window).equal(torch.cat(slices, dim=dim))


@SMALL
@given(st.lists(st.integers(2, 7), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 40))
def test_two_halves(rows: list[int], columns: int, window: int) -> None:
    slices = numbered(*((count, columns) for count in rows))
    halves = [torch.chunk(s, 2) for s in slices]
    expected = torch.cat([half[i] for i in range(2) for half in halves])
    where = layout.in_two_halves("w", [tuple(s.shape) for s in slices])
    assert by_layout(slices, where, 4 * window).equal(expected)


@SMALL
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40))
def test_sub_params_of_any_widths(data: st.DataObject, tp: int, dim: int, window: int) -> None:
    shares_ = st.lists(st.integers(0, 3), min_size=tp, max_size=tp)
    widths = data.draw(st.lists(shares_, min_size=1, max_size=3))
    dim -= 1
    shape = data.draw(st.lists(st.integers(1, 3), min_size=3, max_size=3))
    whole = numbered((*shape[:dim], sum(map(sum, widths)), *shape[dim + 1 :]))[0]
    subs = torch.split(whole, [sum(share) for share in widths], dim=dim)
    cut = [torch.split(sub, share, dim=dim) for sub, share in zip(subs, widths, strict=True)]
    slices = [torch.cat([parts[i] for parts in cut], dim=dim) for i in range(tp)]
    spec = (*shape[:dim], tuple(sum(share) for share in widths), *shape[dim + 1 :])
    sub = SubParams("w", ["w"], spec, dim, tuple(map(tuple, widths)))
    where, described = layout.sub_params("w", sub, [tuple(s.shape) for s in slices])
    assert described == spec
    assert by_layout(slices, where, 4 * window).equal(whole)


# Plans of complete checkpoints, in memory


SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2).map(tuple), min_size=1, max_size=6)


def source(stage: int, ranks: list[Partition], truth: dict[str, torch.Tensor], **more: Any) -> Source:
    """A checkpoint of one group in memory, with a partition for each rank."""
    count = len(ranks)
    model = {"param_shapes": [{name: tuple(t.shape) for name, t in truth.items()}], "dp_world_size": count}
    files = {}
    for rank, partition in enumerate(ranks):
        files[rank, 0] = RankFile(Path(f"rank_{rank}.pt"), rank, 0, stage, (partition,), (count,))
    folder = Folder(Path(), (), {(rank, 0): file.path.name for (rank, _), file in files.items()}, {})
    models: dict[tuple[int | None, int], ModelFacts] = {(None if stage < 3 else 0, 0): ModelFacts("model.pt", model)}
    found = Zero(folder, models, files)
    by_name: dict[str, Any] = {name: {} for name in truth}
    held, problems = slices(found, 0, shapes_of(model))
    if wrong := [*problems, *(own.contradiction for own in held if own.contradiction)]:
        raise UserError(str(wrong[0]))
    for own in held:
        by_name[own.name].setdefault(0, []).append(own)
    return Source(found, 1, by_name, {}, **more)


def flattened(shapes: list[tuple[int, ...]], dp: int) -> tuple[list[Partition], list[bytes], dict[str, torch.Tensor]]:
    """A ZeRO-1 checkpoint of one group: a partition for each rank, and one file each, with consecutive states."""
    truth = dict(zip((f"p{i}" for i in range(len(shapes))), numbered(*shapes), strict=True))
    flat = torch.cat([t.flatten() for t in truth.values()])
    size = -(-len(flat) // dp) or 1
    flat = torch.nn.functional.pad(flat, (0, size * dp - len(flat)), value=-1)
    ranks, data = [], []
    for rank in range(dp):
        part = flat[rank * size : (rank + 1) * size]
        data.append(b"".join((part * factor).numpy().tobytes() for factor in (1, 2, 3)))
        states = {key: Flat(f"rank_{rank}.pt", 4 * size * i, size, FLOAT32) for i, key in enumerate(STATES)}
        ranks.append(Partition(states, Step(7, f"rank_{rank}.pt", 7, 0), dict(_fragments(truth, size, rank))))
    return ranks, data, truth


def _fragments(truth: dict[str, torch.Tensor], size: int, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    begin = 0
    for name, tensor in truth.items():
        low, high = max(begin, rank * size), min(begin + tensor.numel(), (rank + 1) * size)
        if low < high:
            yield name, (low - rank * size, high - low)
        begin += tensor.numel()


def contents(found: Plan, data: list[bytes], window: int) -> dict[str, bytes]:
    files = {f"rank_{number}.pt": own for number, own in enumerate(data)}
    return {
        output.name: placed(output.contents["0"], window, files)
        for output in found.outputs
        if isinstance(output, TorchOutput) and output.contents
    }


@SMALL
@given(SHAPES, DP, st.integers(1, 30))
def test_a_plan_of_stage_1(shapes: list[tuple[int, ...]], dp: int, window: int) -> None:
    ranks, data, truth = flattened(shapes, dp)
    found = contents(plan(source(1, ranks, truth)), data, 4 * window)
    expected = {
        f"zero/{name}/{key}.pt": (tensor * factor).numpy().tobytes()
        for name, tensor in truth.items()
        for key, factor in zip(STATES, (1, 2, 3), strict=True)
        if tensor.numel()
    }
    assert {name: value for name, value in found.items() if value} == expected


@SMALL
@given(SHAPES, DP, st.integers(1, 30))
def test_a_plan_of_stage_3(shapes: list[tuple[int, ...]], dp: int, window: int) -> None:
    truth = dict(zip((f"p{i}" for i in range(len(shapes))), numbered(*shapes), strict=True))
    parts = torch.cat(
        [torch.nn.functional.pad(t.flatten(), (0, -t.numel() % dp)).view(dp, -1) for t in truth.values()], dim=1
    )
    size, data = parts.shape[1], [b"".join((part * f).numpy().tobytes() for f in (1, 2, 3)) for part in parts]
    ranks = []
    for rank in range(dp):
        flats = {key: Flat(f"rank_{rank}.pt", 4 * size * i, size, FLOAT32) for i, key in enumerate(STATES)}
        ranks.append(Partition(flats, None, {}))
    found = contents(plan(source(3, ranks, truth)), data, 4 * window)
    for name, tensor in truth.items():
        for key, factor in zip(STATES, (1, 2, 3), strict=True):
            assert found[f"zero/{name}/{key}.pt"] == (tensor * factor).numpy().tobytes()


@SMALL
@given(SHAPES, st.integers(2, 9), st.data())
def test_a_fragment_that_is_moved_or_lost_is_found(shapes: list[tuple[int, ...]], dp: int, data: st.DataObject) -> None:
    """The plan refuses a fragment that was lost, moved or resized, if the others contradict it."""
    ranks, _, truth = flattened(shapes, dp)
    holders = [(partition, name) for partition in ranks for name in partition.fragments]
    if not holders:
        return
    partition, name = data.draw(st.sampled_from(holders))
    fragments = partition.fragments
    start, numel = fragments[name]
    change = data.draw(st.sampled_from(["lost", "longer", "shorter", "later"]))
    if change == "lost":
        del fragments[name]
        if not any(other.fragments for other in ranks):
            return  # the only parameter
    elif change == "later":
        spans = sum(name in other.fragments for other in ranks)
        fragments[name] = (start + 1, numel)
        if spans == 1 and start + 1 + numel <= partition.states["fp32"].numel and len(fragments) == 1:
            return  # within one partition, only the start defines a parameter's place
    else:
        fragments[name] = (start, numel + (1 if change == "longer" else -1))
    with pytest.raises(UserError):
        plan(source(1, ranks, truth))


@pytest.mark.parametrize("name", ["../../home", "a/../../b", ".."])
def test_a_name_that_leaves_the_output_folder_is_refused(name: str) -> None:
    """A parameter's name, which is a folder name, cannot lead out of the output folder."""
    ranks, _, truth = flattened([(5, 5)], 1)
    renamed = replace(ranks[0], fragments={name: ranks[0].fragments["p0"]})
    with pytest.raises(UserError, match="is no name of a file in the output folder"):
        plan(source(1, [renamed], {name: truth["p0"]}))


@pytest.mark.parametrize("state", ["state1", "__bnb_optimizer_quant_state__", "x" * 10**6])
def test_a_state_that_would_be_lost_is_refused(state: str) -> None:
    """Codes and nested states are refused with a parameter's name, unless they are named to be lost."""
    ranks, _, truth = flattened([(5, 5)], 2)
    ranks[0] = replace(ranks[0], others=(state,))
    named = re.escape(state[:20])
    with pytest.raises(UserError, match=rf"rank_0\.pt: the optimizer's state '{named}.* of 'p0' .*cannot") as refused:
        plan(source(1, ranks, truth))
    assert "--drop-state" in str(refused.value)
    assert len(str(refused.value)) < 700
    assert plan(source(1, ranks, truth), drop=(state,)).warnings == ()


def test_a_single_value_would_be_lost_in_a_conversion_and_has_no_fingerprint() -> None:
    ranks, _, truth = flattened([(5, 5)], 2)
    ranks[1] = replace(ranks[1], singles=("mu_product",))
    with pytest.raises(UserError, match="the optimizer's state 'mu_product' of 'p0'"):
        plan(source(1, ranks, truth))
    assert plan(source(1, ranks, truth), skip_lost=True).lost == {"mu_product": []}


def test_a_state_of_all_elements_is_left_out_on_request() -> None:
    ranks, _, truth = flattened([(5, 5)], 2)
    names = {output.name for output in plan(source(1, ranks, truth), drop=("exp_avg",)).outputs}
    assert {"zero/p0/fp32.pt", "zero/p0/exp_avg_sq.pt"} <= names
    assert "zero/p0/exp_avg.pt" not in names
    with pytest.raises(UserError, match="--drop-state fp32: expected a state of the optimizer"):
        plan(source(1, ranks, truth), drop=("fp32",))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_that_one_rank_lacks_is_refused(stage: int) -> None:
    ranks, _, truth = flattened([(5, 4)], 2)
    ranks[0] = replace(ranks[0], states={**ranks[0].states, "momentum_buffer": ranks[0].states["fp32"]})
    with pytest.raises(UserError, match=r"rank_1\.pt: expected 'momentum_buffer' of .*, as other ranks have it"):
        plan(source(stage, ranks, truth))


def test_a_pattern_without_a_parameter_is_refused() -> None:
    ranks, _, truth = flattened([(5, 5)], 3)
    mistyped = replace(source(1, ranks, truth), info={"parameter_to_average_patterns": ["layernom"]})
    with pytest.raises(UserError, match="no parameter matches the patterns layernom"):
        plan(mistyped)
    assert plan(mistyped, strict=False).warnings


# Arithmetic


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16"])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_an_average_is_torch_s_to_the_last_bit(dtype: str, count: int) -> None:
    kind = getattr(torch, dtype)
    torch.manual_seed(count)
    slices = [torch.cat([torch.randn(999), torch.tensor([-0.0, 0.0, 1e-40, torch.inf])]).to(kind) for _ in range(count)]
    slices[0][-4:-2] = -0.0
    expected = sum(slices) / len(slices)
    assert isinstance(expected, torch.Tensor)
    assert merged(slices, layout.whole((1003,)), 96, AVERAGED) == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16", "int64", "uint8", "bool"])
def test_a_weight_in_float32_is_torch_s_to_the_last_bit(dtype: str) -> None:
    values = (torch.randn(1000) * 100).to(getattr(torch, dtype))
    assert merged([values], layout.whole((1000,)), 96, "float32") == values.float().numpy().tobytes()
