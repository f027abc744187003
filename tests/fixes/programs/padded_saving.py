"""Save buckets with padding beyond the end of one rank's shard, in formats that save buckets; load them; continue.

For each case, the real megatron-core saves the state after three steps. A fresh run loads it and takes two more steps,
as the saving run does. Prints a line of JSON for each case and number of loading ranks: the failure, or whether the
state after the load and the weights after the steps are bit-equal to the run that continued.

    padded_saving.py OUT --format NAME [--ranks 2] [--cases NAME,…] [--load FOLDER]

With `--load` nothing is saved: the checkpoints in FOLDER are loaded by that many ranks.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from program_arguments import parsed
from trainers import megatron_training as mt

# The parameters of each case, in the order of their creation: the last is the first in the buffer.
CASES: dict[str, tuple[dict[str, tuple[int, ...]], int | None]] = {
    # One bucket, with padding at its end.
    "plain": ({}, None),
    # A shared embedding has its own bucket. The bucket before it ends in the gap that aligns the next parameter.
    "shared embedding": ({"shared_embedding": (20, 16), "first": (33,)}, None),
    # A bucket in which the last rank's shard is only padding.
    "small bucket": ({"first": (33,)}, 1000),
    # On four ranks the second rank's shard is only the gap between two parameters.
    "gap": ({"second": (30,), "first": (30,)}, 40),
    # So few parameters that the second of four ranks owns only the gap between the two.
    "rank without parameters": ({"first": (30, 1)}, None),
}
FEW = "rank without parameters"


def main() -> None:
    options = parsed({"out": Path}, format=str, ranks=2, cases=list(CASES), load=Path)
    load_all = options.cases if options.load else on_ranks(save, options.cases, options)
    on_ranks(load, load_all, options)


def on_ranks(what: Callable[..., None], cases: list[str], options: argparse.Namespace) -> list[str]:
    """The cases in which no rank failed. After a failure, the other cases run on new ranks."""
    done: list[str] = []
    left = list(cases)
    while left:
        try:
            mt.spawn(attempt, options.ranks, what, left, options)
            return [*done, *left]
        except torch.multiprocessing.ProcessRaisedException as error:  # the remaining ranks, which may wait, are ended
            count = next((n for n, case in enumerate(left) if said(options.out, case, what)), len(left) - 1)
            reason = said(options.out, left[count], what) or str(error)
            print(json.dumps({"case": left[count], "result": f"{what.__name__} died: {reason}"}), flush=True)
        done += left[:count]
        left = left[count + 1 :]
    return done


def attempt(rank: int, what: Callable[..., None], cases: list[str], options: argparse.Namespace) -> None:
    """Record a rank's own error: the first error reported may be a lost connection to that rank."""
    for case in cases:
        try:
            what(rank, case, options)
        except Exception as error:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{case}.{what.__name__}.{rank}").write_text(f"{type(error).__name__}: {error}")
            raise


def said(out: Path, case: str, what: Callable[..., None]) -> str:
    texts = [path.read_text().strip() for path in sorted(out.glob(f"{case}.{what.__name__}.*"))]
    found = [text for text in texts if text]  # a rank may have ended before it wrote
    own = [text for text in found if "onnection" not in text] or found
    return own[0].splitlines()[-1] if own else ""


def make(case: str) -> Callable[[Any, torch.dtype, bool], Any]:
    def network(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
        from megatron.core.transformer.module import MegatronModule

        class Net(MegatronModule):
            def __init__(self) -> None:
                super().__init__(config)
                for name, shape in CASES[case][0].items():
                    parameter = torch.nn.Parameter(torch.randn(shape))
                    parameter.shared_embedding = name == "shared_embedding"
                    self.register_parameter(name, parameter)
                self.a = torch.nn.Linear(16, 1 if case == FEW else 64, bias=case != FEW)
                self.b = torch.nn.Identity() if case == FEW else torch.nn.Linear(64, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.b(torch.relu(self.a(x)))
                for name in CASES[case][0]:
                    out = out + self.get_parameter(name).float().pow(2).sum().to(out.dtype) * 0.01
                return out

        return Net().to(dtype)

    return network


def build(case: str) -> tuple[Any, Any]:
    mt.use_inner_optimizer("fused")
    return mt.build(make_model=make(case), bucket_size=CASES[case][1])


def save(rank: int, case: str, options: argparse.Namespace) -> None:
    model, optimizer = build(case)
    for iteration in range(3):
        mt.step(model, optimizer, iteration)
    folder = options.out / case
    mt.save(options.format, model, optimizer, folder)
    saved = mt.everything(model, optimizer)
    for iteration in range(3, 5):
        mt.step(model, optimizer, iteration)
    reference = mt.everything(model, optimizer)
    if rank == 0:
        torch.save((saved, reference), options.out / f"{case}.reference.pt")


def load(rank: int, case: str, options: argparse.Namespace) -> None:
    folder = (options.load or options.out) / case
    model, optimizer = build(case)
    mt.load(options.format, model, optimizer, folder)
    saved, reference = torch.load(f"{folder}.reference.pt")
    same = [mt.equal(saved, mt.everything(model, optimizer))]
    for iteration in range(3, 5):
        mt.step(model, optimizer, iteration)
    same.append(mt.equal(reference, mt.everything(model, optimizer)))
    if rank == 0:
        print(json.dumps({"case": case, "result": "bit-equal" if all(same) else f"differs: {same}"}), flush=True)


if __name__ == "__main__":
    main()
