"""Gather and scatter the optimizer's state with the real megatron-core, and with the methods of upstream's own file.

Prints a line of JSON for each part: the differences from upstream, the collectives called on each rank, and the memory
and time of the save and the load.

    lean_gather.py UPSTREAM_FILE [--parts equal,memory,cost] [--inner fused|torch] [--precision-aware] [--ranks 4]
        [--elements 524288] [--case gloo] [--out FOLDER]
"""

import argparse
import copy
import functools
import importlib.util
import inspect
import io
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt_patches.demo import megatron_training as mt
from ckpt_patches.demo.memory import MIB, large, peak, return_freed_memory, size
from program_arguments import parsed

SIZES = (5, 700, 129, 3, 1000, 64, 333)
BUCKET_SIZE = 500
PAIRS = 7
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend",
    "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip


def main() -> None:
    options = parsed(
        {"upstream_file": str}, parts="equal,memory", inner="fused", precision_aware=False, ranks=4,
        elements=MIB // 2, case="gloo", out=str,
    )  # fmt: skip
    return_freed_memory()
    mt.spawn(worker, options.ranks, options)


def worker(rank: int, options: argparse.Namespace) -> None:
    mt.use_inner_optimizer(options.inner)
    upstream = upstream_optimizer(options.upstream_file)
    for part in options.parts.split(","):
        found = {"equal": equal, "memory": memory, "cost": cost}[part](upstream, options)
        by_rank = mt.gathered(found)
        if rank == 0:
            print(json.dumps({"part": part, "ranks": by_rank}), flush=True)


def upstream_optimizer(path: str) -> Any:
    """The class from upstream's file, loaded beside the package's own module, without any hook."""
    spec = importlib.util.spec_from_file_location("megatron.core.optimizer.upstream_distrib_optimizer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DistributedOptimizer


# Saved and loaded states


def equal(upstream: Any, options: argparse.Namespace) -> dict[str, Any]:
    """A rank's differences between the package's methods and upstream's, by case."""
    model, optimizer = small(options)
    for iteration in range(2):
        mt.step(model, optimizer, iteration)
    distributed = mt.inner(optimizer)
    found: dict[str, Any] = {"buckets": buckets(distributed), "split": split_params(distributed)}
    found["save"], found["calls"] = {}, {}
    for name, arguments in cases(distributed).items():
        with recorded() as calls:
            ours = distributed.get_parameter_state_dp_zero(**arguments)
        found["calls"][name] = counted(calls)
        found["save"][name] = difference(ours, upstream.get_parameter_state_dp_zero(distributed, **arguments))
    state = upstream.get_parameter_state_dp_zero(distributed)
    found["load"] = load(upstream, options, model, optimizer, state, found["calls"])
    return found


def cases(distributed: Any) -> dict[str, dict[str, bool]]:
    """Arguments of the save. Since 0.15 it can use NCCL (here on the GPU stub), and return the state on all ranks."""
    if "use_gloo_comm" not in inspect.signature(distributed.get_parameter_state_dp_zero).parameters:
        return {"gloo": {}}
    return {
        "gloo": {},
        "nccl": {"use_gloo_comm": False},
        "gloo, all ranks": {"return_on_all_ranks": True},
        "nccl, all ranks": {"use_gloo_comm": False, "return_on_all_ranks": True},
        "empty": {"use_gloo_comm": False, "return_on_all_ranks": True, "empty_data": True},
    }


def small(options: argparse.Namespace) -> tuple[Any, Any]:
    return mt.build(precision_aware=options.precision_aware, bucket_size=BUCKET_SIZE, make_model=odd_model)


def odd_model(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
    """The tiny model with parameters of odd sizes, so that shards start and end inside parameters.

    Buckets are filled from the last parameter on. The first parameter has a bucket of its own, where most shards are
    padding.
    """
    model = mt.tiny_model(config, dtype, native_fp32)
    tiny = model.forward
    model.first = torch.nn.Parameter(torch.randn(3).to(dtype))
    model.odd = torch.nn.ParameterList([torch.randn(size).to(dtype) for size in SIZES])
    odd = [model.first, *model.odd]
    model.forward = lambda x: tiny(x) * sum((p * p).float().mean() for p in odd).to(dtype)
    return model


def buckets(distributed: Any) -> list[list[int]]:
    """The elements of each bucket, with and without its padding."""
    return [[b.grad_data.numel(), b.numel_unpadded] for buffer in distributed.buffers for b in buffer.buckets]


def split_params(distributed: Any) -> int:
    """The number of parameters that start on an earlier rank than this one."""
    maps = [gbuf for ranges in distributed.gbuf_ranges for by_bucket in ranges.values() for gbuf in by_bucket]
    return sum(r["param"].start > 0 for gbuf in maps for r in gbuf["param_map"].values())


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The collectives called, in order."""
    calls: list[str] = []

    def record(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            calls.append(name)
            return function(*args, **keywords)

        return call

    functions = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, function in functions.items():
        setattr(dist, name, record(name, function))
    try:
        yield calls
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)


def counted(calls: list[str]) -> list[tuple[str, int]]:
    """The calls in order, each with its number of consecutive repetitions."""
    return [(name, len(list(same))) for name, same in itertools.groupby(calls)]


def difference(ours: Any, theirs: Any) -> str:
    """The first difference in layout or bits; empty if there is none."""
    for (place, one), (other_place, other) in zip(described(ours), described(theirs), strict=False):
        if (place, one) != (other_place, other):
            return f"{place}: {one!r:.200}, upstream {other_place}: {other!r:.200}"
    return "" if on_disk(ours) == on_disk(theirs) else "the files differ"


def described(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf with its place; for a tensor, everything that a file or a reader could see."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from described(item, f"{place}/{key!r}")
    elif isinstance(value, torch.Tensor):
        storage = value.untyped_storage().nbytes(), value.storage_offset(), value.stride()
        yield place, (value.dtype, value.device, value.shape, storage, value.requires_grad)
        yield f"{place} bits", value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        yield place, value


def on_disk(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def load(
    upstream: Any, options: argparse.Namespace, model: Any, optimizer: Any, state: Any, calls: dict[str, Any]
) -> str:
    """Load with the package's method and with upstream's, and continue training: the first difference."""
    weights, saved, before = mt.weights(model), copy.deepcopy(optimizer.state_dict()), on_disk(state)
    for iteration in (2, 3):
        mt.step(model, optimizer, iteration)
    loaded = []
    for method in (
        type(mt.inner(optimizer)).load_parameter_state_from_dp_zero,
        upstream.load_parameter_state_from_dp_zero,
    ):
        resumed, resumed_optimizer = small(options)
        mt.set_weights(resumed, weights)
        resumed_optimizer.load_state_dict(copy.deepcopy(saved))
        with recorded() as called:
            method(mt.inner(resumed_optimizer), state)
        calls.setdefault("load", counted(called))
        loaded.append(copy.deepcopy(mt.inner(resumed_optimizer).optimizer.state_dict()["state"]))
        for iteration in (2, 3):
            mt.step(resumed, resumed_optimizer, iteration)
        if not mt.equal(mt.weights(model), mt.weights(resumed)):
            return f"{method.__qualname__}: not the weights of the run that went on"
    if on_disk(state) != before:
        return "the state that was loaded has changed"
    return difference(*loaded)


# Memory and time


def memory(upstream: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The memory of a rank's save and load beyond the gathered state, in MiB, with the package's methods."""
    distributed = large(options.elements, bucket_size=options.elements)
    bucket = 4 * options.elements / MIB
    found: dict[str, Any] = {"bucket": bucket, "shard": bucket / dist.get_world_size()}
    for name, arguments in cases(distributed).items():
        gathered, used, _ = peak(functools.partial(distributed.get_parameter_state_dp_zero, **arguments))
        found[name] = used - size(gathered)
        if name == "gloo":
            _, found["load"], _ = peak(functools.partial(distributed.load_parameter_state_from_dp_zero, gathered))
        del gathered
    return found


def cost(upstream: Any, options: argparse.Namespace) -> dict[str, Any]:
    """MiB and seconds of a gather, and of a save in the `torch` format, in pairs of the package and upstream's file.

    A save uses Gloo; for another case only the gather is measured.
    """
    distributed = large(options.elements)
    arguments = cases(distributed)[options.case]
    found: dict[str, Any] = {"buckets": buckets(distributed), "gathered": 0.0}
    classes = {"ours": type(distributed), "upstream": upstream}
    originals = {name: cls.get_parameter_state_dp_zero for name, cls in classes.items()}
    for pair in range(PAIRS):
        for name in list(classes)[:: 1 if pair % 2 else -1]:
            classes["ours"].get_parameter_state_dp_zero = originals[name]
            gathered, *used = peak(functools.partial(distributed.get_parameter_state_dp_zero, **arguments))
            found.setdefault(f"{name}, gather", []).append(used)
            found["gathered"] = size(gathered)
            del gathered
            if options.case == "gloo":
                file = Path(options.out, "distrib_optim.pt")
                _, *used = peak(functools.partial(distributed.save_parameter_state, str(file)))
                found.setdefault(f"{name}, save", []).append(used)
    return found


if __name__ == "__main__":
    main()
