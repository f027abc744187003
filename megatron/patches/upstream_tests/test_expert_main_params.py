# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest

from megatron.core.optimizer.optimizer import ChainedOptimizer


def chain(model_chunks, of_each_optimizer):
    chained = object.__new__(ChainedOptimizer)
    chained.model_chunks = model_chunks
    chained.chained_optimizers = [SimpleNamespace(model_chunks=own) for own in of_each_optimizer]
    return chained


def test_optimizers_of_one_chunk_get_its_weights():
    weights = {"model": {"w": 0}}

    dense, experts = chain(["chunk"], [["chunk"], ["chunk"]])._split_state_dict(weights)

    assert dense is weights
    assert experts is weights


@pytest.mark.parametrize("prefix", ["model", "model_"])
def test_each_optimizer_gets_the_weights_of_its_chunks(prefix):
    weights = {f"{prefix}{number}": {"w": number} for number in range(3)}
    chunks = ["first", "second", "third"]

    dense, experts = chain(chunks, [chunks, chunks[1:]])._split_state_dict(weights)

    assert dense == weights
    assert experts == {f"{prefix}0": {"w": 1}, f"{prefix}1": {"w": 2}}


def test_without_a_state_dict_none_gets_one():
    assert chain(["chunk"], [["chunk"], ["chunk"]])._split_state_dict(None) == [None, None]
