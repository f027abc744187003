"""Save a run of the real megatron.training whose ranks have drawn random numbers, or load it, on CPU ranks.

Prints a line of JSON. A save: its error. A load: its error; for each rank, the saved rank whose random numbers it draws
next for its experts (a number, "seeded" or null); whether the model-parallel ones are those of the saved run; and rank
0's output about RNG states.

    expert_rng.py save|load OUT [--ranks 2] [--tp 1] [--ep 2] [--etp 0] [--random] [--local] [--partial]
        [--format torch_dist]

`--random`: with --data-parallel-random-init. `--local`: a local checkpoint, saved and loaded in this process (`save`).
`--etp 0`: as many expert-tensor-parallel ranks as tensor-parallel ones. `--partial`: fsdp_dtensor may lack keys.
"""

import argparse
import contextlib
import io
import json
from typing import Any

import torch

from program_arguments import parsed
from trainers import megatron_lm
from trainers import megatron_training as mt
from trainers.ranks import RankError

EXPERTS, MODEL = "expert-parallel-rng", "model-parallel-rng"


class InMemory:
    """A stub of nvidia-resiliency-ext's manager of local checkpoints, for one rank."""

    local_ckpt_dir = "memory"
    iteration = -1

    def save(self, state_dict: Any, iteration: int, is_async: bool) -> None:
        self.state_dict, self.iteration = state_dict, iteration

    def load(self) -> tuple[Any, str]:
        return self.state_dict, "in memory"

    def find_latest(self) -> int:
        return self.iteration


def main() -> None:
    from pathlib import Path

    layout = {"ranks": 2, "tp": 1, "ep": 2, "etp": 0}
    switches = {"random": False, "local": False, "partial": False}
    options = parsed({"what": str, "out": Path}, **layout, **switches, format="torch_dist")
    megatron_lm.import_training()
    line: dict[str, Any] = {"error": ""}
    try:
        found = mt.results({"save": save, "load": load}[options.what], options.ranks, options)
        if options.what == "load" or options.local:
            numbers, model, said = zip(*found, strict=True)
            line |= {"experts": numbers, "model": all(model), "said": said[0]}
    except RankError as error:
        line["error"] = str(error).splitlines()[0]
    print(json.dumps(line), flush=True)


def begin(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    layout = options.tp, options.ep, options.etp or None
    args = megatron_lm.arguments(options.out / "run", *layout, data_parallel_random_init=options.random)
    args.ckpt_format, args.use_dist_ckpt = options.format, options.format != "torch"
    args.use_megatron_fsdp = options.format == "fsdp_dtensor"
    args.strict_fsdp_dtensor_load = not options.partial
    megatron_lm.start(*layout)
    model = mt.tiny_model(mt.transformer_config(torch.bfloat16), torch.bfloat16, False)
    return megatron_lm.import_training(), model, args


def save(rank: int, options: argparse.Namespace) -> Any:
    checkpointing, model, args = begin(options)
    seeded = peek()
    draw(EXPERTS, rank + 1)
    draw(MODEL, 3)
    manager = InMemory()
    if options.local:
        args.non_persistent_ckpt_type = "local"
        args.non_persistent_local_ckpt_algo = "atomic"
        checkpointing.get_args = lambda: args
        context = {"local_checkpoint_manager": manager}
        checkpointing.save_checkpoint(1, [model], None, None, 0, context, non_persistent_ckpt=True)
    else:
        megatron_lm.save(checkpointing, model, args)
    torch.save((seeded[EXPERTS], peek()), options.out / f"{rank}.pt")
    if not options.local:
        return None
    torch.distributed.barrier()
    megatron_lm.start(options.tp, options.ep, options.etp or None)
    return loaded(rank, options, checkpointing, model, args, checkpointing_context=context)


def load(rank: int, options: argparse.Namespace) -> Any:
    return loaded(rank, options, *begin(options))


def loaded(rank: int, options: argparse.Namespace, checkpointing: Any, model: Any, args: Any, **more: Any) -> Any:
    """Whose random numbers come next for the experts, whether the model's are the saved ones, and the output."""
    seeded = peek()[EXPERTS]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        megatron_lm.load(checkpointing, model, args, **more)
    saved = [torch.load(options.out / f"{n}.pt")[1] for n in range(len(list(options.out.glob("*.pt"))))]
    found = peek()
    same = [n for n, numbers in enumerate(saved) if torch.equal(numbers[EXPERTS], found[EXPERTS])]
    whose = next(iter([rank] if rank in same else same), "seeded" if torch.equal(seeded, found[EXPERTS]) else None)
    lines = [line for line in said.getvalue().splitlines() if "RNG" in line]
    return whose, torch.equal(saved[rank % options.tp][MODEL], found[MODEL]), lines


def draw(name: str, times: int) -> torch.Tensor:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork(name):
        for _ in range(times):
            drawn = torch.rand(8, device="cuda")
    return drawn.cpu()


def peek() -> dict[str, torch.Tensor]:
    """The next random numbers of each stream; the states are restored, so they are drawn again."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    found = {name: draw(name, 1) for name in (EXPERTS, MODEL)}
    get_cuda_rng_tracker().set_states(states)
    return found


if __name__ == "__main__":
    main()
