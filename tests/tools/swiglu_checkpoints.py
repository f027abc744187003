"""Handmade SwiGLU checkpoints, sharded as torch FSDP2 does or without it, with rows in place or mixed."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from old_checkpoints import Old

LAYERS, FFN, HIDDEN = 2, 24, 12
FC1, FC2 = "decoder.layers.mlp.linear_fc1", "decoder.layers.mlp.linear_fc2"
SHAPES = {f"{FC1}.weight": (2 * FFN, HIDDEN), f"{FC1}.bias": (2 * FFN,), f"{FC2}.weight": (HIDDEN, FFN)}
STATES = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
ONE_CHUNK, TWO_CHUNKS, MIXED = "one chunk", "two chunks", "mixed"  # how a shard is stored
Piece = tuple[int, tuple[int, ...], torch.Tensor]  # rank, offsets, data


def saved(
    folder: Path,
    tensor_parallel: int,
    data_parallel: int,
    how: str,
    *,
    arguments: dict[str, Any] | None = None,
    in_one_file: bool = False,
    numbered: bool = False,
    without: str = "",
) -> dict[str, torch.Tensor]:
    """Write a checkpoint; return its tensors.

    Layers are along the first axis or, if `numbered`, have separate tensors.
    """
    old, truth = Old(folder), dict[str, torch.Tensor]()
    for seed, state in enumerate(STATES):
        for of_all, shape in SHAPES.items():
            if of_all == without:
                continue
            whole = torch.randn((LAYERS, *shape), generator=torch.Generator().manual_seed(seed + len(shape))) * 0.02
            whole = whole.square() + 1e-6 if state.endswith("sq.") else whole
            names = [state + (of_all.replace("layers", f"layers.{n}") if numbered else of_all) for n in range(LAYERS)]
            tensors = dict(zip(names, whole, strict=True)) if numbered else {names[0]: whole}
            truth |= tensors
            for name, tensor in tensors.items():
                old.tensor(name, tensor.dtype, tuple(tensor.shape))
            for layer, name in enumerate(names):
                cut = _rows if of_all.startswith(FC1) else _of_fc2
                for rank, at, piece in cut(whole[layer], tensor_parallel, data_parallel, how):
                    chunk = (at, piece) if numbered else ((layer, *at), piece[None])
                    old.chunk(name, *chunk, rank=0 if in_one_file else rank)
    group = {"wd_mult": 1.0, "lr_mult": 1.0, "betas": (0.9, 0.999), "eps": 1e-8, "lr": 1e-3, "step": 3}
    common: dict[str, Any] = {"optimizer": {"optimizer": {"param_groups": [group, {**group, "wd_mult": 0.0}]}}}
    if arguments is not None:
        common |= {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 3}
    old.write(common)
    return truth


def _of_fc2(whole: torch.Tensor, tensor_parallel: int, data_parallel: int, how: str) -> Iterator[Piece]:
    for column, part in enumerate(whole.chunk(tensor_parallel, 1)):
        for row, piece in enumerate(part.chunk(data_parallel)):
            yield column * data_parallel + row, (row * len(piece), column * piece.shape[1]), piece


def _rows(whole: torch.Tensor, tensor_parallel: int, data_parallel: int, how: str) -> Iterator[Piece]:
    """The pieces of [W; V]."""
    of_w, of_v = (half.chunk(tensor_parallel) for half in whole.chunk(2))
    for rank, rows in enumerate(torch.cat(own) for own in zip(of_w, of_v, strict=True)):
        for place, shard in enumerate(rows.chunk(data_parallel)):
            number = rank * data_parallel + place
            pieces = shard.chunk(1 if how == ONE_CHUNK else 2)
            for half, piece in enumerate(pieces):
                of_half = len(pieces) * data_parallel // 2  # pieces of a rank's W
                side, at = divmod(len(pieces) * place + half, of_half)
                in_place = at + of_half * (side * tensor_parallel + rank)
                chunk = number + half * tensor_parallel * data_parallel if how == MIXED else in_place
                yield number, (chunk * len(piece), *(0 for _ in piece.shape[1:])), piece
