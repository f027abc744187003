"""Load weights into a model under the real hybrid CPU-offload optimizer, reload, take one step at learning rate 0.

Prints a line of JSON for each combination: the parameters that did not keep the loaded weights, and the copies in the
optimizer that do not hold them.

    hybrid_reload.py [--state-dict] [--steps-before N] [--ranks 2]

With `--state-dict` reload_model_params gets the weights, in fp32.
"""

import argparse
import inspect
import itertools
import json
from typing import Any

import torch

from program_arguments import parsed
from trainers import megatron_training as mt


def main() -> None:
    options = parsed({}, state_dict=False, steps_before=0, ranks=2)
    mt.spawn(worker, options.ranks, options)


def worker(rank: int, options: argparse.Namespace) -> None:
    for precision_aware, fraction, overlap in itertools.product((False, True), (0.0, 0.5, 1.0), (False, True)):
        result = case(options, precision_aware, fraction, overlap)
        results = mt.gathered(result)
        if rank == 0:
            print(json.dumps({
                "precision_aware": precision_aware,
                "fraction": fraction,
                "overlap": overlap,
                "lost": sorted({name for r in results for name in r["lost"]}),
                "stale": sorted({copy for r in results for copy in r["stale"]}),
            }), flush=True)  # fmt: skip


def case(options: argparse.Namespace, precision_aware: bool, fraction: float, overlap: bool) -> dict[str, list[str]]:
    model, optimizer = mt.build(
        offload_fraction=fraction, precision_aware=precision_aware, overlap=overlap, native_fp32=True
    )
    for iteration in range(options.steps_before):
        mt.step(model, optimizer, iteration)
    # Not a bf16 number: the model rounds it, a state dict in fp32 does not.
    exact = {name: torch.full_like(value, 0.7501) for name, value in mt.weights(model).items()}
    mt.set_weights(model, exact)
    loaded = mt.weights(model)
    reload_params(model, optimizer, exact if options.state_dict else None)
    stale = stale_copies(mt.inner(optimizer), 0.7501 if options.state_dict else None)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    mt.step(model, optimizer, 0)
    after = mt.weights(model)
    return {"lost": [name for name in after if not torch.equal(after[name], loaded[name])], "stale": stale}


def reload_params(model: Any, optimizer: Any, exact: dict[str, torch.Tensor] | None) -> None:
    if exact is None:
        optimizer.reload_model_params()
        return
    state_dict = {name.removeprefix("module."): value for name, value in exact.items()}
    accepts = "state_dict" in inspect.signature(optimizer.reload_model_params).parameters
    optimizer.reload_model_params(**({"state_dict": {"model": state_dict}} if accepts else {}))


def stale_copies(optimizer: Any, exact: float | None) -> list[str]:
    """The kinds of copies without the loaded value: exact in fp32 copies, rounded in bf16 copies."""
    hybrid = optimizer.optimizer
    stale = set()
    for group in hybrid.param_groups:
        for param in group["params"]:
            copies = {
                "parameter": param,
                "CPU clone": hybrid.gpu_params_map_cpu_copy.get(param),
                "fp32 working copy": hybrid.param_to_fp32_param.get(param),
                "main parameter in the state": hybrid.state.get(param, {}).get("master_param"),
            }
            rounded = float(torch.tensor(0.7501).bfloat16())
            native = any(p.data_ptr() == param.data_ptr() for g in optimizer.shard_fp32_groups for p in g)
            expected = 0.7501 if native else rounded if exact is None else exact
            for kind, copy in copies.items():
                if copy is not None:
                    want = torch.full_like(copy, expected)
                    if not torch.equal(copy, want):
                        stale.add(kind)
    return sorted(stale)


if __name__ == "__main__":
    main()
