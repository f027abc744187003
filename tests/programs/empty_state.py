"""Save an optimizer state that is empty, or has lost entries, with the real megatron-core; load it; continue training.

Prints a line of JSON for each format: the error of any rank's save, and whether the resumed run is bit-equal to the one
that continued.

    empty_state.py OUT [--formats torch,dp_zero_gather_scatter,…] [--inner fused|torch] [--precision-aware]
        [--steps 0] [--lose nothing|moment|parameter|all] [--fp16]
        [--offload-fraction F]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from program_arguments import parsed
from trainers import megatron_training as mt


def main() -> None:
    options = parsed(
        {"out": str}, formats="torch", inner="fused", precision_aware=False, steps=0, lose="nothing", fp16=False,
        offload_fraction=float, ranks=2,
    )  # fmt: skip
    mt.spawn(worker, options.ranks, options)


def worker(rank: int, options: argparse.Namespace) -> None:
    mt.use_inner_optimizer(options.inner)
    for name in options.formats.split(","):
        result = case(name, options)
        results = mt.gathered(result)
        if rank == 0:
            failed = [r["error"] for r in results if r["error"]]
            resume = sorted({r["resume"] for r in results})
            print(json.dumps({
                "format": name,
                "error": failed[0] if failed else "",
                "resume": resume[0] if len(resume) == 1 else resume,
                "keys": results[0]["keys"],
            }), flush=True)  # fmt: skip


def case(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Save in one format and continue; load into a fresh run and train the same steps."""
    result: dict[str, Any] = {"error": "", "resume": "not tried", "keys": []}
    model, optimizer = build(options)
    for iteration in range(options.steps):
        mt.step(model, optimizer, iteration)
    lose(mt.inner(optimizer), options.lose)
    folder = Path(options.out, f"{name}-{options.inner}-{options.steps}-{options.lose}")
    try:
        mt.save(name, model, optimizer, folder)
        result["keys"] = keys_in(folder) if name == "torch" else []
    except Exception as error:
        result["error"] = f"save: {type(error).__name__}: {str(error)[:200]}"
        return result
    if options.lose != "nothing":
        return result
    for iteration in range(options.steps, options.steps + 2):
        mt.step(model, optimizer, iteration)
    resumed, optimizer = build(options)
    try:
        mt.load(name, resumed, optimizer, folder)
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
    """Remove entries from each rank's state: one moment of one parameter, one parameter's moments, or all."""
    if what == "nothing":
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


def keys_in(folder: Path) -> list[str]:
    """The keys in the first bucket of the first buffer in a checkpoint in the format `torch`."""
    parameters = torch.load(folder / "distrib_optim.pt")
    buffer = next(iter(v for v in parameters.values() if isinstance(v, dict)))
    return sorted(str(key) for key in next(iter(buffer.values())))


if __name__ == "__main__":
    main()
