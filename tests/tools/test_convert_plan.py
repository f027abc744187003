"""Compare the pure parts of the converter with slow code in torch: layouts, merged bytes, plans."""

import itertools
import math
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_patches.convert import layout
from ckpt_patches.convert.conversion_plan import AVERAGED, PLACED, Content
from ckpt_patches.convert.layout import Layout, SubParams
from ckpt_patches.convert.merging import Merger
from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.ranged import RangedFiles

SMALL = settings(max_examples=150, deadline=None)


class Memory(RangedFiles):
    """A stub of the files: bytes by path."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.data = files

    def read(self, path: str, offset: int, into: memoryview) -> None:
        into[:] = self.data[path][offset : offset + len(into)]


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
    sub = SubParams(["w"], spec, dim, tuple(map(tuple, widths)))
    where, described = layout.sub_params("w", sub, [tuple(s.shape) for s in slices])
    assert described == spec
    assert by_layout(slices, where, 4 * window).equal(whole)


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
