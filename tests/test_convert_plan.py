"""Compare the pure parts of the one-pass converter with slow code in torch: layouts, runs of bytes, plans."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_patches.convert import arithmetic, layout
from ckpt_patches.convert.conversion_plan import plan
from ckpt_patches.convert.layout import Layout
from ckpt_patches.convert.output_files import (
    Content,
    CopiedOutput,
    EqualPieces,
    Link,
    Pieces,
    Plan,
    Run,
    TorchOutput,
)
from ckpt_patches.convert.rules import SubParams
from ckpt_patches.convert.traits import Traits
from ckpt_patches.convert.write import place
from ckpt_patches.errors import UserError
from ckpt_patches.formats.torch_file import StorageHeader, TensorHeader
from ckpt_patches.formats.zero import ElementType, Flat, ModelFile, Partition, Step
from ckpt_patches.formats.zero_checkpoint import Checkpoint, File, Rank
from ckpt_patches.formats.zero_experts import Experts
from ckpt_patches.runtime.shared_writing import shares

SMALL = settings(max_examples=150, deadline=None)
FLOAT32 = ElementType("float32")
DP, STATES = st.integers(1, 9), ("fp32", "exp_avg", "exp_avg_sq")


class Memory:
    """A stub of the files: slices are bytes, or runs of files' bytes."""

    def __init__(self, files: list[bytes] | None = None) -> None:
        self.files = files or []

    def read_slice(self, slice_: Any, begin: int, into: memoryview) -> None:
        if isinstance(slice_, bytes):
            into[:] = slice_[begin : begin + len(into)]
        else:
            into[:] = b"".join(self.files[f][at : at + n] for f, at, n in slice_.runs(begin, begin + len(into)))


def placed(content: Content, window: int, memory: Memory) -> bytes:
    """A storage, placed window by window."""
    rows, found = memoryview(bytearray(max(window, 64))), b""
    for begin in range(0, content.nbytes, window):
        buffer = memoryview(bytearray(min(window, content.nbytes - begin)))
        place(memory, content, begin, buffer, rows)  # type: ignore[arg-type]
        found += bytes(buffer)
    return found


def by_layout(slices: list[torch.Tensor], where: Layout, window: int) -> torch.Tensor:
    data = tuple(s.contiguous().numpy().tobytes() for s in slices)
    layout.check("w", where, [tuple(s.shape) for s in slices])
    found = placed(Content("float32", where, data), window, Memory())
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
    where, described = layout.sub_params_by_widths("w", sub, [tuple(s.shape) for s in slices])
    assert described == spec
    assert by_layout(slices, where, 4 * window).equal(whole)


@SMALL
@given(st.permutations(range(6)), st.integers(1, 40))
def test_affine_blocks_in_any_order(order: list[int], window: int) -> None:
    """The tensor is restored from six blocks of two rows, three per rank."""
    whole = numbered((12, 3))[0]
    blocks = whole.view(6, 2, 3)
    slices = [blocks[list(part)].reshape(6, 3) for part in (order[:3], order[3:])]
    ranks = {
        rank: {
            "shard_shape": [6, 3],
            "pieces": [
                {"shape": [2, 3], "source": [6 * block, [3, 1]], "dest": [6 * at, [3, 1]], "locations": [rank]}
                for at, block in enumerate(part)
            ],
        }
        for rank, part in enumerate((order[:3], order[3:]))
    }
    where = layout.affine("w", {"logical_shape": [12, 3], "ranks": ranks}, [(6, 3), (6, 3)])
    assert by_layout(slices, where, 4 * window).equal(whole)


def test_a_transposed_affine_piece() -> None:
    whole = numbered((2, 3, 4))[0]
    piece = {"shape": [3, 4, 2], "source": [0, [4, 1, 12]], "dest": [0, [8, 2, 1]], "locations": [0]}
    entry = {"logical_shape": [2, 3, 4], "ranks": {"0": {"shard_shape": [3, 4, 2], "pieces": [piece]}}}
    where = layout.affine("w", entry, [(3, 4, 2)])
    assert by_layout([whole.permute(1, 2, 0)], where, 28).equal(whole)


@pytest.mark.parametrize(
    "change",
    [
        {"source": [-1, [3, 1]]},
        {"source": [1, [3, 1]]},
        {"dest": [4, [3, 1]]},
        {"dest": [0, [300, 1]]},
        {"shape": [1, 3]},
        {"scale": 0.5},
        {"source": [0, [0, 1]]},  # every row at the first row's place
        {"shape": [3, 2], "source": [0, [1, 2]], "dest": [0, [2, 1]]},  # an overlap, and a gap of its size
    ],
)
def test_an_affine_map_of_something_else_is_refused(change: dict[str, Any]) -> None:
    piece = {"shape": [2, 3], "source": [0, [3, 1]], "dest": [0, [3, 1]], "locations": [0], **change}
    entry = {"logical_shape": [2, 3], "ranks": {0: {"shard_shape": [2, 3], "pieces": [piece]}}}
    with pytest.raises(UserError, match="w: "):
        layout.check("w", layout.affine("w", entry, [(2, 3)]), [(2, 3)])


BLOCKS = st.builds(
    layout.Block,
    slice=st.just(0),
    source=st.just(0),
    source_stride=st.just(0),
    target=st.integers(0, 12),
    target_stride=st.sampled_from([4, 5, 6]),
    length=st.integers(1, 4),
    count=st.integers(1, 4),
)


@given(st.lists(BLOCKS, max_size=5))
def test_blocks_are_disjoint_if_no_element_is_placed_twice(blocks: list[layout.Block]) -> None:
    placed = [
        block.target + row * block.target_stride + at
        for block in blocks
        for row in range(block.count)
        for at in range(block.length)
    ]
    assert layout._are_disjoint("w", blocks) == (len(set(placed)) == len(placed))


# Runs of bytes


@SMALL
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(1, 9)), max_size=8), st.data())
def test_pieces(pieces: list[tuple[int, int, int]], data: st.DataObject) -> None:
    files = [bytes(range(i * 30, i * 30 + 30)) for i in range(3)]
    whole = b"".join(files[file][at : at + length] for file, at, length in pieces)
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    runs = Pieces.of([Run(*piece) for piece in pieces]).runs(begin, end)
    assert b"".join(files[file][at : at + length] for file, at, length in runs) == whole[begin:end]


@SMALL
@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 5), st.data())
def test_equal_pieces(ranks: int, start: int, length: int, data: st.DataObject) -> None:
    files = [bytes(range(i * 20, i * 20 + 20)) for i in range(ranks)]
    equal = EqualPieces(tuple((rank, rank) for rank in range(ranks)), start, length)
    whole = b"".join(files[rank][rank + start : rank + start + length] for rank in range(ranks))
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    assert b"".join(files[f][at : at + n] for f, at, n in equal.runs(begin, end)) == whole[begin:end]


# Plans of complete checkpoints, in memory


SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2).map(tuple), min_size=1, max_size=6)


def flattened(shapes: list[tuple[int, ...]], dp: int) -> tuple[Checkpoint, list[bytes], dict[str, torch.Tensor]]:
    """A ZeRO-1 checkpoint of one group: one file per rank, with consecutive states."""
    truth = dict(zip((f"p{i}" for i in range(len(shapes))), numbered(*shapes), strict=True))
    flat = torch.cat([t.flatten() for t in truth.values()])
    size = -(-len(flat) // dp) or 1
    flat = torch.nn.functional.pad(flat, (0, size * dp - len(flat)), value=-1)
    ranks, data = [], []
    for rank in range(dp):
        part = flat[rank * size : (rank + 1) * size]
        data.append(b"".join((part * factor).numpy().tobytes() for factor in (1, 2, 3)))
        states = {key: Flat(rank, 4 * size * i, size, FLOAT32) for i, key in enumerate(STATES)}
        fragments = dict(_fragments(truth, size, rank))
        ranks.append(Rank(rank, 0, 0, rank, (Partition(states, Step(7, rank, 7, 0), fragments),)))
    model = ModelFile(dp, ({name: tuple(t.shape) for name, t in truth.items()},), {})
    paths = tuple(File(Path(f"rank_{i}.pt"), len(d), 0) for i, d in enumerate([*data, b""]))
    return Checkpoint(Path(), 1, 1, 1, dp, paths, tuple(ranks), (model,), (dp,), {}), data, truth


def _fragments(truth: dict[str, torch.Tensor], size: int, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    begin = 0
    for name, tensor in truth.items():
        low, high = max(begin, rank * size), min(begin + tensor.numel(), (rank + 1) * size)
        if low < high:
            yield name, (low - rank * size, high - low)
        begin += tensor.numel()


def contents(found: Plan, data: list[bytes], window: int) -> dict[str, bytes]:
    return {
        output.name: placed(output.contents["0"], window, Memory(data))
        for output in found.outputs
        if isinstance(output, TorchOutput) and output.contents
    }


@SMALL
@given(SHAPES, DP, st.integers(1, 30))
def test_a_plan_of_stage_1(shapes: list[tuple[int, ...]], dp: int, window: int) -> None:
    checkpoint, data, truth = flattened(shapes, dp)
    found = contents(plan(checkpoint, Traits()), data, 4 * window)
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
    ranks = [
        Rank(
            r,
            0,
            0,
            r,
            (
                Partition(
                    {k: Flat(r, 4 * size * i, size, ElementType("float32")) for i, k in enumerate(STATES)}, None, {}
                ),
            ),
        )
        for r in range(dp)
    ]
    model = ModelFile(0, ({name: tuple(t.shape) for name, t in truth.items()},), {})
    paths = tuple(File(Path(f"rank_{i}.pt"), len(d), 0) for i, d in enumerate(data))
    checkpoint = Checkpoint(Path(), 3, 1, 1, dp, paths, tuple(ranks), (model,), (), {})
    found = contents(plan(checkpoint, Traits()), data, 4 * window)
    for name, tensor in truth.items():
        for key, factor in zip(STATES, (1, 2, 3), strict=True):
            assert found[f"zero/{name}/{key}.pt"] == (tensor * factor).numpy().tobytes()


@SMALL
@given(SHAPES, st.integers(2, 9), st.data())
def test_a_fragment_that_is_moved_or_lost_is_found(shapes: list[tuple[int, ...]], dp: int, data: st.DataObject) -> None:
    """The plan refuses a fragment that was lost, moved or resized, if the others contradict it."""
    checkpoint, _, _ = flattened(shapes, dp)
    holders = [(r, n) for r in checkpoint.ranks for n in r.partitions[0].fragments]
    if not holders:
        return
    rank, name = data.draw(st.sampled_from(holders))
    fragments = rank.partitions[0].fragments
    start, numel = fragments[name]
    change = data.draw(st.sampled_from(["lost", "longer", "shorter", "later"]))
    if change == "lost":
        del fragments[name]
        if all(name not in other.partitions[0].fragments for other in checkpoint.ranks):
            return  # upstream takes it for a parameter that was never trained
    elif change == "later":
        spans = sum(name in other.partitions[0].fragments for other in checkpoint.ranks)
        fragments[name] = (start + 1, numel)
        if spans == 1 and start + 1 + numel <= rank.partitions[0].states["fp32"].numel:
            return  # within one partition, only the start defines a parameter's place
    else:
        fragments[name] = (start, numel + (1 if change == "longer" else -1))
    with pytest.raises(UserError):
        plan(checkpoint, Traits())


LOADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "zero3_tensor_parallel": ({"stage": 3, "tp_degree": 2}, "is of 2 tensor-parallel ranks at ZeRO stage 3"),
    "autoep": ({"experts": {"p0": Experts(1, ((0,),), ((0,),))}}, "has layers of experts (ds_autoep_layers)"),
}


@pytest.mark.parametrize("feature", LOADABLE)
def test_what_the_installed_deepspeed_does_not_load_is_refused(feature: str) -> None:
    changes, expected = LOADABLE[feature]
    checkpoint, _, _ = flattened([(4, 5)], 2)
    text = re.escape(f"{expected}, which the installed DeepSpeed does not load from a universal checkpoint")
    with pytest.raises(UserError, match=text.replace(",", ".*,", 1)):
        plan(replace(checkpoint, **changes), replace(Traits(), **{feature: False}))


def step_tensor(file: int, storage: int = 1) -> TensorHeader:
    return TensorHeader(StorageHeader(str(file), "float32", storage, 64 * file), "float32", 0, (), ())


STEPS: dict[str, tuple[Step, Step, bool]] = {
    "equal numbers": (Step(7, 0, 7, 0), Step(7, 1, 7, 0), True),
    "equal tensors": (Step(step_tensor(0), 0, b"7", 0), Step(step_tensor(1), 1, b"7", 0), True),
    "numbers of other types": (Step(7, 0, 7, 0), Step(7.0, 1, 7.0, 0), False),
    "tensors in storages of others": (Step(step_tensor(0, 2), 0, b"7", 0), Step(step_tensor(1, 2), 1, b"7", 0), False),
    "other groups": (Step(7, 0, 7, 0), Step(7, 1, 7, 1), False),
    "something else": (Step([7], 0, [7], 0), Step([7], 1, [7], 0), False),
}


def at_steps(*steps: Step) -> Checkpoint:
    """A checkpoint of one parameter per step, each on its own rank."""
    checkpoint, _, _ = flattened([(4,)] * len(steps), len(steps))
    ranks = (
        Rank(rank, 0, 0, rank, (replace(checkpoint.ranks[rank].partitions[0], step=step),))
        for rank, step in enumerate(steps)
    )
    return replace(checkpoint, ranks=tuple(ranks))


@pytest.mark.parametrize("case", STEPS)
def test_equal_steps_of_a_group_are_names_of_one_file(case: str) -> None:
    *steps, linked = STEPS[case]
    found = plan(at_steps(*steps), Traits())
    assert found.links == ((Link("zero/p1/step.pt", "zero/p0/step.pt"),) if linked else ())
    written = [output.name for output in found.outputs if output.name.endswith("step.pt")]
    assert written == (["zero/p0/step.pt"] if linked else ["zero/p0/step.pt", "zero/p1/step.pt"])


@pytest.mark.parametrize("name", ["../../home", "a/../../b", ".."])
def test_a_name_that_leaves_the_output_folder_is_refused(name: str) -> None:
    """A parameter's name, which is a folder name, cannot lead out of the output folder."""
    checkpoint, _, _ = flattened([(5, 5)], 1)
    model = ModelFile(1, ({name: (5, 5)},), {})
    partition = checkpoint.ranks[0].partitions[0]
    renamed = Partition(partition.states, None, {name: partition.fragments["p0"]})
    evil = {**vars(checkpoint), "models": (model,), "ranks": (Rank(0, 0, 0, 0, (renamed,)),)}
    with pytest.raises(UserError, match="is no name of a file in the output folder"):
        plan(Checkpoint(**evil), Traits())


def with_states(checkpoint: Checkpoint, **of_first: Any) -> Checkpoint:
    """Change the first rank's partition."""
    own = replace(checkpoint.ranks[0].partitions[0], **of_first)
    return replace(checkpoint, ranks=(replace(checkpoint.ranks[0], partitions=(own,)), *checkpoint.ranks[1:]))


def test_states_that_are_no_tensors_are_named() -> None:
    """A warning of limited length names states that are not tensors, such as NAdam's."""
    checkpoint, _, _ = flattened([(5, 5)], 2)
    assert plan(checkpoint, Traits()).warnings == ()
    (warning,) = plan(with_states(checkpoint, scalars=("mu_product", "x" * 10**6)), Traits()).warnings
    assert warning.startswith("not converted: 'mu_product', 'xxx")
    assert warning.endswith("of the optimizer's states that are no tensors only step is")
    assert len(warning) < 400


def test_tensors_of_other_elements_are_refused() -> None:
    """States of 8-bit optimizers are refused; without `strict`, a warning names them."""
    checkpoint, _, _ = flattened([(5, 5)], 2)
    eight_bits = with_states(checkpoint, others=("state1", "absmax1"))
    with pytest.raises(UserError, match=r"rank_0\.pt: the optimizer's states 'absmax1', 'state1' cannot be converted"):
        plan(eight_bits, Traits())
    assert plan(eight_bits, Traits(), strict=False).warnings == (
        "not converted: 'absmax1', 'state1'; the optimizer begins anew with them",
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_that_one_rank_lacks_is_refused(stage: int) -> None:
    checkpoint, _, _ = flattened([(5, 4)], 2)
    states = checkpoint.ranks[0].partitions[0].states
    more = {**states, "momentum_buffer": states["fp32"]}
    wrong = replace(with_states(checkpoint, states=more), stage=stage)
    with pytest.raises(UserError, match=r"rank_1\.pt: expected 'momentum_buffer' of .*, as other ranks have it"):
        plan(wrong, Traits())


def test_a_pattern_without_a_parameter_is_refused() -> None:
    checkpoint, _, _ = flattened([(5, 5)], 3)
    mistyped = Checkpoint(**{**vars(checkpoint), "info": {"parameter_to_average_patterns": ["layernom"]}})
    with pytest.raises(UserError, match="no parameter matches the patterns layernom"):
        plan(mistyped, Traits())
    assert plan(mistyped, Traits(), strict=False).warnings


# Division, and arithmetic


@SMALL
@given(st.lists(st.integers(0, 1 << 30), max_size=30), st.integers(1, 6))
def test_shares_are_all_outputs_and_even(sizes: list[int], count: int) -> None:
    outputs = [CopiedOutput(f"{i}", 0, nbytes) for i, nbytes in enumerate(sizes)]
    divided = shares(outputs, count)
    assert sorted(o.name for share in divided for o in share) == sorted(o.name for o in outputs)
    loads = [sum(o.nbytes for o in share) for share in divided]
    assert max(loads) - min(loads) <= max(sizes, default=0) + (1 << 18) * len(sizes)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16"])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_an_average_is_torch_s_to_the_last_bit(dtype: str, count: int) -> None:
    kind = getattr(torch, dtype)
    torch.manual_seed(count)
    slices = [torch.cat([torch.randn(999), torch.tensor([-0.0, 0.0, 1e-40, torch.inf])]).to(kind) for _ in range(count)]
    slices[0][-4:-2] = -0.0
    data = tuple(s.view(torch.uint8).numpy().tobytes() for s in slices)
    content = Content(dtype, layout.whole((1003,)), data, "averaged")
    window, other = memoryview(bytearray(len(data[0]))), memoryview(bytearray(len(data[0])))
    arithmetic.averaged(Memory(), content, 0, window, other)  # type: ignore[arg-type]
    expected = sum(slices) / len(slices)
    assert isinstance(expected, torch.Tensor)
    assert bytes(window) == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16", "int64", "uint8", "bool"])
def test_a_weight_in_float32_is_torch_s_to_the_last_bit(dtype: str) -> None:
    values = (torch.randn(1000) * 100).to(getattr(torch, dtype))
    data = values.view(torch.uint8).numpy().tobytes()
    content = Content(dtype, layout.whole((1000,)), (data,), "float32")
    window, other = memoryview(bytearray(4000)), memoryview(bytearray(96))
    arithmetic.as_float32(Memory(), content, 0, window, other)  # type: ignore[arg-type]
    assert bytes(window) == values.float().numpy().tobytes()
