"""Save buckets whose padding is more than a rank's end, in the formats that save buckets; load them, and train on.

Of each case the real megatron-core saves the state of three steps; a fresh run loads it and takes two steps more, as
the one that saved does. Prints a line of JSON for each case and number of ranks that load: what died on which ranks, or
whether all of the state, and then of the weights, is bit for bit that of the run that went on.

    padded_saving.py OUT --format NAME [--ranks 2] [--cases NAME,…] [--load FOLDER]

With `--load` nothing is saved: what lies in FOLDER is loaded by as many ranks.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckpt_patches.demo import megatron_training as mt
from program_arguments import parsed

# What a case's parameters are, in the order in which they are made: the last is the first in the buffer.
CASES: dict[str, tuple[dict[str, tuple[int, ...]], int | None]] = {
    # One bucket, padded at its end as ever.
    "plain": ({}, None),
    # A shared embedding gets a bucket of its own. The one before it ends in the gap that aligns the next parameter.
    "shared embedding": ({"shared_embedding": (20, 16), "first": (33,)}, None),
    # A bucket of which the last rank's shard is padding alone.
    "small bucket": ({"first": (33,)}, 1000),
    # On four ranks the second's shard is the gap between two parameters, and nothing else.
    "gap": ({"second": (30,), "first": (30,)}, 40),
    # So few parameters that the second of four ranks owns none at all, and the gap between the two.
    "rank without parameters": ({"first": (30, 1)}, None),
}
FEW = "rank without parameters"


def main() -> None:
    options = parsed({"out": Path}, format=str, ranks=2, cases=list(CASES), load=Path)
    load_all = options.cases if options.load else on_ranks(save, options.cases, options)
    on_ranks(load, load_all, options)


def on_ranks(what: Callable[..., None], cases: list[str], options: argparse.Namespace) -> list[str]:
    """The cases in which no rank died; after one in which one did, the others have ranks of their own."""
    done: list[str] = []
    left = list(cases)
    while left:
        try:
            mt.spawn(attempt, options.ranks, what, left, options)
            return [*done, *left]
        except torch.multiprocessing.ProcessRaisedException as error:  # the other ranks, which may wait, are ended
            count = next((n for n, case in enumerate(left) if said(options.out, case, what)), len(left) - 1)
            reason = said(options.out, left[count], what) or str(error)
            print(json.dumps({"case": left[count], "result": f"{what.__name__} died: {reason}"}), flush=True)
        done += left[:count]
        left = left[count + 1 :]
    return done


def attempt(rank: int, what: Callable[..., None], cases: list[str], options: argparse.Namespace) -> None:
    """Keep what a rank dies of: the first that is heard of may be one that has lost the connection to it."""
    for case in cases:
        try:
            what(rank, case, options)
        except Exception as error:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{case}.{what.__name__}.{rank}").write_text(f"{type(error).__name__}: {error}")
            raise


def said(out: Path, case: str, what: Callable[..., None]) -> str:
    texts = [path.read_text().strip() for path in sorted(out.glob(f"{case}.{what.__name__}.*"))]
    found = [text for text in texts if text]  # a rank may have been ended before it wrote
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
