"""Gather the state of one bucket to rank 0 over Gloo, with the package's method and with upstream's own file.

Megatron's own set-up makes sixty groups; this program runs only the methods, in one group, on a stub optimizer. Prints
a line of JSON: for each rank, by side, the messages and bytes that it sends, and the memory growth (bytes) and seconds
of each repetition.

    gather_on_many_ranks.py UPSTREAM_FILE RANKS ELEMENTS    elements of each state on each rank
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

from ckpt_patches.demo.memory import MIB, peak, return_freed_memory
from lean_gather import upstream_optimizer

STATES = ("exp_avg", "exp_avg_sq")
REPETITIONS = 21


def main() -> None:
    file, ranks, elements = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    return_freed_memory()
    torch.multiprocessing.start_processes(worker, (file, ranks, elements), nprocs=ranks, start_method="fork")


def worker(rank: int, file: str, ranks: int, elements: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    optimizer, sides = optimizer_of(rank, ranks, elements), {"ours": DistributedOptimizer}
    sides["upstream"] = upstream_optimizer(file)
    found: dict[str, Any] = {name: [] for name in sides}
    for repetition in range(REPETITIONS + 1):
        for name in list(sides)[:: 1 if repetition % 2 else -1]:
            with sent() as messages:
                _, used, seconds = peak(functools.partial(sides[name].get_parameter_state_dp_zero, optimizer))
            if repetition > 0:  # the first repetition opens connections
                found[name].append((used * MIB, seconds))
            found[f"{name}, messages"], found[f"{name}, bytes"] = len(messages), sum(messages)
    by_rank: list[Any] = [None] * ranks
    dist.gather_object(found, by_rank if rank == 0 else None)
    if rank == 0:
        print(json.dumps(by_rank), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def optimizer_of(rank: int, ranks: int, elements: int) -> Any:
    """The attributes of a distributed optimizer that a gather reads, with one parameter, which all ranks share."""
    param = torch.nn.Parameter(torch.empty(ranks * elements, dtype=torch.bfloat16))
    shard = torch.nn.Parameter(torch.full((elements,), float(rank)))
    world, local = Range(rank * elements, (rank + 1) * elements), Range(0, elements)
    ranges = {"gbuf_world": world, "gbuf_world_in_bucket": world, "gbuf_local": local, "param": world}
    optimizer: Any = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.optimizer = torch.optim.AdamW([shard])
    optimizer.optimizer.state[shard] = {state: torch.full((elements,), rank + 0.5) for state in STATES}
    optimizer.model_chunks = [torch.nn.ParameterList([param])]
    optimizer.model_param_group_index_map = {param: (0, 0)}
    optimizer.gbuf_ranges = [{(torch.bfloat16, torch.float32): [{"param_map": {param: ranges}}]}]
    bucket = SimpleNamespace(grad_data=torch.empty(ranks * elements), numel_unpadded=ranks * elements)
    optimizer.buffers = [SimpleNamespace(params=[param], buckets=[bucket], numel_unpadded=ranks * elements)]
    optimizer.data_parallel_group = optimizer.data_parallel_group_gloo = dist.group.WORLD
    optimizer.ddp_config = SimpleNamespace(use_custom_fsdp=False, use_megatron_fsdp=False)
    optimizer.config = SimpleNamespace(
        optimizer="adam",
        use_precision_aware_optimizer=False,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=False,
    )
    optimizer.is_stub_optimizer = False
    return optimizer


@contextmanager
def sent() -> Iterator[list[int]]:
    """The bytes of each message that this rank sends in a gather: in the collective, or one by one."""
    messages: list[int] = []
    functions = {name: getattr(dist, name) for name in ("gather", "isend")}

    def note(function: Callable[..., Any], tensor: torch.Tensor, *arguments: Any) -> Any:
        if function is functions["isend"] or arguments[0] is None:  # rank 0 passes a list of outputs to a gather
            messages.append(tensor.numel() * tensor.element_size())
        return function(tensor, *arguments)

    for name, function in functions.items():
        setattr(dist, name, functools.partial(note, function))
    try:
        yield messages
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)


if __name__ == "__main__":
    main()
