"""sharding_check_on_all_ranks: a save that is refused for a frozen layer ends on all ranks, and says what to do."""

import time
from pathlib import Path
from typing import Any

import pytest

from trainers.lazy import gpt_training, mt
from upstream import affected, called, with_fix, without_fix

AFFECTED = affected("sharding_check_on_all_ranks")
WAITS = "rank 1 still waits, 10 s after the error of rank 0"
WHAT_TO_DO = "are they frozen? Then save the optimizer in dp_reshardable"


def refused(version: str, delivery: str) -> Any:
    """What a save of a model with a frozen layer in fully_reshardable raises on each rank."""
    return called(__file__, "save", version=version, delivery=delivery, layout=[2])


@without_fix(AFFECTED)
def test_one_rank_raises_and_the_other_waits(version: str, delivery: str) -> None:
    with pytest.raises(AssertionError, match=WAITS):
        refused(version, delivery)


@with_fix(AFFECTED)
def test_all_ranks_raise_and_say_what_to_do(version: str, delivery: str) -> None:
    errors = refused(version, delivery)
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("CheckpointingException: Invalid ")
        assert WHAT_TO_DO in error


# What the ranks run

OPTIONS = {
    **dict.fromkeys(
        ("untied", "learned_positions", "fp32_norms", "frozen", "zero_initialized", "gated", "biases"), False
    ),
    "ep": 0,
    "tp": 1,
    "pp": 1,
}


def save(rank: int, folder: Path) -> str:
    from megatron.core import tensor_parallel

    mt.use_inner_optimizer("fused")
    tensor_parallel.random.initialize_rng_tracker()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    gpt_training.on_cpu()
    model, optimizer = mt.build(make_model=two_layers)
    gpt_training.step(model, optimizer, 1)
    try:
        mt.save("fully_reshardable", model, optimizer, folder)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    else:
        found = "saved"
    folder.with_name(str(rank)).touch()
    if rank == 0 and not is_there(folder.with_name("1"), 10):
        raise TimeoutError(WAITS)
    return found


def two_layers(config: Any, dtype: Any, native_fp32: bool) -> Any:
    """A GPT whose first layer is frozen."""
    model = gpt_training.gpt(OPTIONS, dtype, 1)
    for parameter in model.decoder.layers[0].parameters():
        parameter.requires_grad = False
    return model


def is_there(path: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.exists()
