"""Resume in full under the real hybrid CPU-offload optimizer: are the main parameters the saved ones, bit for bit?

Prints a line of JSON for each combination: "exact", "rounded" or the exception, and whether the saved ones have more
digits than bf16 (else nothing could be told from them).
"""

import copy
import itertools
import json
from typing import Any

import torch
import torch.distributed as dist

import megatron_training as mt


def worker(rank: int) -> None:
    for precision_aware, fraction in itertools.product((False, True), (0.0, 0.5, 1.0)):
        masters, digits = case(precision_aware, fraction)
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, masters)
        if rank == 0:
            print(json.dumps({
                "precision_aware": precision_aware,
                "fraction": fraction,
                "masters": results[0] if len(set(results)) == 1 else results,
                "more_digits_than_bf16": digits,
            }), flush=True)  # fmt: skip


def case(precision_aware: bool, fraction: float) -> tuple[str, bool]:
    model, optimizer = mt.build(offload_fraction=fraction, precision_aware=precision_aware)
    for iteration in range(3):
        mt.step(model, optimizer, iteration)
    saved, parameters = copy.deepcopy(mt.inner(optimizer).state_dict()), gathered(optimizer)
    digits = any(not torch.equal(p, p.bfloat16().float()) for p in parameters)
    weights = mt.weights(model)
    state = mt.inner(optimizer).get_parameter_state_dp_zero()
    resumed, optimizer = mt.build(offload_fraction=fraction, precision_aware=precision_aware)
    mt.set_weights(resumed, weights)
    try:
        mt.inner(optimizer).load_state_dict(saved)
        mt.inner(optimizer).load_parameter_state_from_dp_zero(state)
    except Exception as error:
        return type(error).__name__, digits
    equal = all(torch.equal(a, b) for a, b in zip(parameters, gathered(optimizer), strict=True))
    return "exact" if equal else "rounded", digits


def gathered(optimizer: Any) -> list[torch.Tensor]:
    """The main parameters of every buffer, on data-parallel rank 0."""
    state = mt.inner(optimizer).get_parameter_state_dp_zero()
    buffers = [b for b in (state or {}).values() if isinstance(b, dict)]
    return [world["param"].clone() for buffer in buffers for world in buffer.values()]


if __name__ == "__main__":
    mt.spawn(worker, 2)
