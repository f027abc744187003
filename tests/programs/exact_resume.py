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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from program_arguments import parsed
from trainers import megatron_training as mt

STEPS_BEFORE, STEPS_AFTER = 3, 2


def main() -> None:
    options = parsed({"out": Path}, formats=[""], inner="fused", optimizers=["plain"], resume_ranks=[2, 4], only="")
    if options.only != "resume":
        mt.spawn(train_and_save, 2, options)
    for ranks in options.resume_ranks if options.only != "save" else []:
        mt.spawn(resume, ranks, options)


def build(name: str) -> tuple[Any, Any]:
    words = name.split("-")
    return mt.build(
        offload_fraction=float(words[1]) if words[0] == "hybrid" else None,
        precision_aware="precision" in words,
        overlap="overlap" in words,
        native_fp32="fp32" in words,
    )


def take_steps(run: tuple[Any, Any], first: int, steps: int) -> dict[str, torch.Tensor]:
    for iteration in range(first, first + steps):
        mt.step(*run, iteration)
    return mt.everything(*run)


def train_and_save(rank: int, options: argparse.Namespace) -> None:
    mt.use_inner_optimizer(options.inner)
    for kind in options.optimizers:
        folder = options.out / kind
        try:
            run = build(kind)
        except Exception as error:
            write(folder / "refused", error)
            continue
        saved = take_steps(run, 0, STEPS_BEFORE)
        for name in options.formats:
            try:
                mt.save(name, *run, folder / name)
            except Exception as error:
                write(folder / f"{name}.died", error)
        reference = take_steps(run, STEPS_BEFORE, STEPS_AFTER)
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
        for name in options.formats:
            results = mt.gathered(resumed(kind, name, options.out / kind))
            # The worst result: a failure, else a difference, else "bit-equal".
            result = min(results, key=lambda text: (text == "bit-equal", text.startswith("differs")))
            if rank == 0:
                line = {"inner": options.inner, "optimizer": kind, "format": name, "ranks": dist.get_world_size()}
                print(json.dumps({**line, "result": result}), flush=True)


def resumed(kind: str, name: str, folder: Path) -> str:
    """The result of one resume on this rank."""
    for file, what in (("refused", "refused"), (f"{name}.died", "save died")):
        if (folder / file).exists():
            return f"{what}: {(folder / file).read_text()}"
    run = build(kind)
    try:
        mt.load(name, *run, folder / name)
        loaded = mt.everything(*run)
        end = take_steps(run, STEPS_BEFORE, STEPS_AFTER)
    except Exception as error:
        return f"load died: {said(error)}"
    saved, reference = torch.load(folder / "reference.pt")
    in_load, in_step = difference(saved, loaded), difference(reference, end)
    if in_load == in_step == 0:
        return "bit-equal"
    return f"differs by {in_step:.2g}" + ("" if in_load else ", the loaded state is bit-equal")


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference; NaN differs from everything."""
    if left.keys() == right.keys() and not mt.how_many_differ(left, right):
        return 0.0
    return max((left[name] - right[name]).abs().max().item() for name in left) or float("nan")


if __name__ == "__main__":
    main()
