"""Save an optimizer state that is empty, or has lost entries, with the real megatron-core; load it; train on.

Prints a line of JSON for each format: what the save did on any rank, what was warned of, and whether the run that was
resumed equals, bit for bit, the one that went on.

    empty_state.py OUT [--formats torch,dp_zero_gather_scatter,…] [--inner fused|torch] [--precision-aware]
        [--steps 0] [--lose nothing|moment|parameter|all] [--fp16]
        [--offload-fraction F]
"""

import argparse
import copy
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import megatron_training as mt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--formats", default="torch")
    parser.add_argument("--inner", default="fused")
    parser.add_argument("--precision-aware", action="store_true")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--lose", default="nothing")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--offload-fraction", type=float)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    mt.spawn(worker, options.ranks, options)


def worker(rank: int, options: argparse.Namespace) -> None:
    if options.inner == "fused" and importlib.util.find_spec("apex") is None:
        import stand_in_fused_adam

        stand_in_fused_adam.patch_megatron()
    log = Log()
    logging.getLogger("megatron.core.optimizer.distrib_optimizer").addHandler(log)
    for name in options.formats.split(","):
        log.messages.clear()
        result = case(name, options)
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, {**result, "warnings": [m for m in log.messages if "lack optimizer" in m]})
        if rank == 0:
            failed = [r["error"] for r in results if r["error"]]
            resume = sorted({r["resume"] for r in results})
            print(json.dumps({
                "format": name,
                "error": failed[0] if failed else "",
                "resume": resume[0] if len(resume) == 1 else resume,
                "warnings": [warning for r in results for warning in r["warnings"]],
                "keys": results[0]["keys"],
            }), flush=True)  # fmt: skip


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def case(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Save in one format, go on training; load into a fresh run, train the same steps."""
    result: dict[str, Any] = {"error": "", "resume": "not tried", "keys": []}
    model, optimizer = build(options)
    for iteration in range(options.steps):
        mt.step(model, optimizer, iteration)
    lose(mt.inner(optimizer), options.lose)
    saved_weights = mt.weights(model)
    folder = Path(options.out, f"{name}-{options.inner}-{options.steps}-{options.lose}")
    try:
        saved = save(name, model, optimizer, folder)
        result["keys"] = moments(saved)
    except Exception as error:
        result["error"] = f"save: {type(error).__name__}: {str(error)[:200]}"
        return result
    if options.lose != "nothing":
        return result
    for iteration in range(options.steps, options.steps + 2):
        mt.step(model, optimizer, iteration)
    resumed, optimizer = build(options)
    mt.set_weights(resumed, saved_weights)
    try:
        load(name, resumed, optimizer, saved, folder)
        for iteration in range(options.steps, options.steps + 2):
            mt.step(resumed, optimizer, iteration)
    except Exception as error:
        result["error"] = f"load: {type(error).__name__}: {str(error)[:200]}"
        return result
    result["resume"] = "bit-equal" if mt.equal(mt.weights(model), mt.weights(resumed)) else "differs"
    return result


def build(options: argparse.Namespace) -> tuple[Any, Any]:
    return mt.build(
        precision_aware=options.precision_aware, fp16=options.fp16, offload_fraction=options.offload_fraction
    )


def lose(optimizer: Any, what: str) -> None:
    """Take entries out of the state on the last rank: one moment of one parameter, one parameter's, or all."""
    if what == "nothing" or dist.get_rank() != dist.get_world_size() - 1:
        return
    state = optimizer.optimizer.state
    if what == "all":
        state.clear()
        return
    param = next(iter(state))
    if what == "moment":
        del state[param]["exp_avg_sq"]
    else:
        state[param].clear()


def save(name: str, model: Any, optimizer: Any, folder: Path) -> Any:
    """The `torch` format as objects, the sharded formats on disk; what was handed to the writer."""
    if name == "torch":
        distributed = mt.inner(optimizer)
        state = distributed.get_parameter_state_dp_zero()
        return {"optimizer": copy.deepcopy(optimizer.state_dict()), "parameters": state}
    from megatron.core import dist_checkpointing

    state_dict = mt.sharded_state_dict(name, model, optimizer, is_loading=False)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state_dict, str(folder), (mt.sharded_backend(name), 1))
    return state_dict


def load(name: str, model: Any, optimizer: Any, saved: Any, folder: Path) -> None:
    if name == "torch":
        optimizer.load_state_dict(saved["optimizer"])
        mt.inner(optimizer).load_parameter_state_from_dp_zero(saved["parameters"])
        return
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(mt.sharded_state_dict(name, model, optimizer, is_loading=True), str(folder))
    optimizer.load_state_dict(loaded["optimizer"])


def moments(saved: Any) -> list[str]:
    """The keys of a `torch` checkpoint's buffers on rank 0."""
    parameters = saved.get("parameters") if isinstance(saved, dict) else None
    if not parameters:
        return []
    buffer = next(iter(v for v in parameters.values() if isinstance(v, dict)))
    return sorted(str(key) for key in next(iter(buffer.values())))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    main()
