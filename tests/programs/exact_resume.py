"""Train, save in every format, continue; resume from each save, at the same and at another data-parallel size.

Uses the real megatron-core on CPU ranks. Prints a line of JSON for each optimizer, format and data-parallel size:
"bit-equal" if each weight, main parameter and moment equals the saved one after the load, and the uninterrupted run's
after two more steps; else the difference or the failure. A load has Megatron's order: build the optimizer's sharded
state dict, load the model's weights, then load the optimizer's state.

    exact_resume.py OUT --formats torch,dp_reshardable,… [--inner fused|torch] [--optimizers NAME,…]
        [--resume-ranks 2,4] [--only save|resume]

With `--only` one release saves in OUT, and another resumes from there.

An optimizer's name is `plain`, `precision-aware`, or `hybrid-F` with an offload fraction F, then, if they apply,
`-precision-aware`, `-overlap` and `-fp32` (the model has one parameter in fp32).
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainers import megatron_training as mt

STEPS_BEFORE, STEPS_AFTER = 3, 2


@dataclass(frozen=True)
class Optimizer:
    """A configuration of the optimizer, given by its name."""

    name: str

    def build(self) -> tuple[Any, Any]:
        words = self.name.split("-")
        return mt.build(
            offload_fraction=float(words[1]) if words[0] == "hybrid" else None,
            precision_aware="precision" in words,
            overlap="overlap" in words,
            native_fp32="fp32" in words,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--formats", required=True, type=lambda text: text.split(","))
    parser.add_argument("--inner", default="fused")
    parser.add_argument(
        "--optimizers", default=[Optimizer("plain")], type=lambda text: [Optimizer(n) for n in text.split(",")]
    )
    parser.add_argument("--resume-ranks", default=[2, 4], type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--only", choices=["save", "resume"])
    options = parser.parse_args()
    if options.only != "resume":
        mt.spawn(train_and_save, 2, options)
    for ranks in options.resume_ranks if options.only != "save" else []:
        mt.spawn(resume, ranks, options)


def train_and_save(rank: int, options: argparse.Namespace) -> None:
    mt.use_inner_optimizer(options.inner)
    for kind in options.optimizers:
        folder = options.out / kind.name
        try:
            model, optimizer = kind.build()
        except Exception as error:
            write(folder / "refused", error)
            continue
        for iteration in range(STEPS_BEFORE):
            mt.step(model, optimizer, iteration)
        for name in options.formats:
            try:
                mt.save(name, model, optimizer, folder / name)
            except Exception as error:
                write(folder / f"{name}.died", error)
        saved = mt.everything(model, optimizer)
        for iteration in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
            mt.step(model, optimizer, iteration)
        reference = mt.everything(model, optimizer)
        if rank == 0:
            torch.save((saved, reference), folder / "reference.pt")


def write(path: Path, error: Exception) -> None:
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(said(error))


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"


def resume(rank: int, options: argparse.Namespace) -> None:
    mt.use_inner_optimizer(options.inner)
    for kind in options.optimizers:
        folder = options.out / kind.name
        for name in options.formats:
            result = resumed(kind, name, folder)
            results = mt.gathered(result)
            if rank == 0:
                line = {"inner": options.inner, "optimizer": kind.name, "format": name, "ranks": dist.get_world_size()}
                print(json.dumps({**line, "result": worst(results)}), flush=True)


def worst(results: list[str]) -> str:
    """The worst result: a failure, else a difference, else "bit-equal"."""
    return sorted(results, key=lambda text: (text == "bit-equal", text.startswith("differs")))[0]


def resumed(kind: Optimizer, name: str, folder: Path) -> str:
    """The result of one resume on this rank."""
    if (folder / "refused").exists():
        return f"refused: {(folder / 'refused').read_text()}"
    if (folder / f"{name}.died").exists():
        return f"save died: {(folder / f'{name}.died').read_text()}"
    model, optimizer = kind.build()
    try:
        mt.load(name, model, optimizer, folder / name)
        loaded = mt.everything(model, optimizer)
        for iteration in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
            mt.step(model, optimizer, iteration)
    except Exception as error:
        return f"load died: {said(error)}"
    saved, reference = torch.load(folder / "reference.pt")
    in_load, in_step = difference(saved, loaded), difference(reference, mt.everything(model, optimizer))
    if in_load == in_step == 0:
        return "bit-equal"
    return f"differs by {in_step:.2g}" + ("" if in_load else ", the loaded state is bit-equal")


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference; NaN differs from everything."""
    if mt.equal(left, right):
        return 0.0
    return max((left[name] - right[name]).abs().max().item() for name in left) or float("nan")


if __name__ == "__main__":
    main()
