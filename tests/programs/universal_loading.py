"""Train param groups at ZeRO 1 and 2 with the real DeepSpeed, load the saved state, and print the results, as JSON.

    universal_loading.py write FOLDER KIND... [--small]
    universal_loading.py resume FOLDER KIND... [--small] [--steps N] [--load-only] [--universal OTHER] [--settings]

`write` trains, saves in FOLDER/KIND, converts into FOLDER/KIND/universal with this project's converter, and continues.
`resume` loads that into a new run that has taken N times two steps; overwrites a main parameter, trains, loads again,
and continues. With --small there is a group of one element, of which one of the two ranks owns only padding. With
--universal it loads OTHER/KIND, and with --settings into a run whose groups started with other settings.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param

from trainers import deepspeed_training
from trainers.deepspeed_training import (
    KINDS,
    MOMENTS,
    STEPS,
    TAG,
    differences,
    engine_of,
    flat_groups,
    gathered,
    on_ranks,
    same,
    save,
    train,
)

RANKS = 2
UNIVERSAL = "universal"
OTHER_SETTINGS: dict[str, Any] = {"lr": 0.5, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.2}


def engine(kind: str, universal: bool, small: bool, seed: int, *, other: bool = False) -> Any:
    """A run whose groups differ in their learning rates and weight decays."""
    return engine_of(f"{kind}-{3 if small else 2}", RANKS, universal, seed, **(OTHER_SETTINGS if other else {}))


def name_release() -> None:
    """Set a release: an uninstalled checkout has version 0.0.0, and rejects its own checkpoints as too old."""
    for name, module in list(sys.modules.items()):
        if name.startswith("deepspeed.") and getattr(module, "version", "") == "0.0.0":
            vars(module)["version"] = "0.19.6"


def load(run: Any, tag: Path) -> None:
    deepspeed_training.load(run, tag.parent, str(tag.resolve()))  # DeepSpeed joins the folder and the tag


def snapshot(run: Any) -> dict[str, Any]:
    """Full weights, main parameters and moments, and all groups' steps and settings. Does not use the fragments."""
    names = {parameter: name for name, parameter in run.module.named_parameters()}
    states: dict[str, Any] = {f"{name}.weight": p.detach().clone() for p, name in names.items()}
    inner = run.optimizer.optimizer
    for number, (master, parameters) in enumerate(flat_groups(run)):
        own = {"fp32": master.detach(), **inner.state.get(master, {})}
        settings = inner.param_groups[number]
        states[f"group {number}"] = {key: value for key, value in settings.items() if key != "params"}
        states[f"group {number}.steps"] = gathered(float(own.get("step", torch.nan)))
        for key in ("fp32", *MOMENTS):
            flat = torch.cat(gathered(own.get(key, torch.full_like(master, torch.nan)).clone()))
            for parameter in parameters:
                states[f"{names[parameter]}.{key}"] = flat[: parameter.numel()].view(parameter.shape).clone()
                flat = flat[parameter.numel() :]
            states[f"group {number}.padding.{key}"] = flat
    return states


def unlinked(run: Any) -> dict[str, str]:
    """By parameter, the error of safe_get_full_optimizer_state on a rank, or that it returns another state."""
    states, found = snapshot(run), {}
    for name, parameter in run.module.named_parameters():
        errors = [error for error in gathered(error_of_link(parameter)) if error]
        if errors:
            found[name] = errors[0]  # on some ranks; the others would wait for them
        elif not all(same(safe_get_full_optimizer_state(parameter, key), states[f"{name}.{key}"]) for key in MOMENTS):
            found[name] = "another state"
    return found


def error_of_link(parameter: Any) -> str:
    try:
        for key in MOMENTS if parameter._hp_mapping is not None else ():
            parameter._hp_mapping.get_hp_fragment(key)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def masters_are(run: Any) -> list[str]:
    """The states that safe_get_full_fp32_param returns."""
    states, found = snapshot(run), set()
    for name, parameter in run.module.named_parameters():
        value = safe_get_full_fp32_param(parameter)
        found.add(next((key for key in ("fp32", *MOMENTS) if same(value, states[f"{name}.{key}"])), "none"))
    return sorted(found)


def write(rank: int, args: argparse.Namespace) -> None:
    results = {}
    for kind in args.kinds:
        run = engine(kind, universal=False, small=args.small, seed=0)
        train(run, rank, RANKS, first=0)
        save(run, args.folder / kind)
        result: dict[str, Any] = {"optimizer": type(run.optimizer).__name__, "unlinked": unlinked(run)}
        truth: dict[str, Any] = {"saved": snapshot(run), "losses": train(run, rank, RANKS, first=STEPS)}
        result["losses"] = truth["losses"]
        run.load_checkpoint(str(args.folder / kind), tag=TAG)
        result["reloaded"] = differences(snapshot(run), truth["saved"])
        result["unlinked right after a load"] = unlinked(run)
        train(run, rank, RANKS, first=STEPS)
        result["unlinked after a load"] = unlinked(run)
        if rank == 0:
            torch.save(truth, args.folder / kind / "truth.pt")
        results[kind] = result
    if rank == 0:
        args.result.write_text(json.dumps(results))


def resume(rank: int, args: argparse.Namespace) -> None:
    results = {}
    for kind in args.kinds:
        truth = torch.load(args.folder / kind / "truth.pt", weights_only=False)
        run = engine(kind, universal=True, small=args.small, seed=1, other=args.settings)
        for _ in range(args.steps):
            train(run, rank, RANKS, first=100)
        universal = args.universal / kind if args.universal else args.folder / kind / UNIVERSAL
        load(run, universal)
        result: dict[str, Any] = {"loaded": differences(snapshot(run), truth["saved"])}
        results[kind] = result
        if args.load_only:
            continue
        result["masters are"], result["unlinked"] = masters_are(run), unlinked(run)
        weight = run.module.w1.weight
        safe_set_full_fp32_param(weight, torch.full(weight.shape, 7.0))
        result["overwritten"] = differences(snapshot(run), truth["saved"])
        train(run, rank, RANKS, first=STEPS)
        result["unlinked after a step"] = unlinked(run)
        load(run, universal)
        result["loaded again"] = differences(snapshot(run), truth["saved"])
        result["losses"], result["expected"] = train(run, rank, RANKS, first=STEPS), truth["losses"]
    if rank == 0:
        args.result.write_text(json.dumps(results))


def converted(folder: Path) -> None:
    folders = ["--input_folder", str(folder / TAG), "--output_folder", str(folder / UNIVERSAL)]
    subprocess.run([sys.executable, "-m", "deepspeed_patches.ds_to_universal", *folders], check=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for work in (write, resume):
        chosen = commands.add_parser(work.__name__)
        chosen.set_defaults(work=work)
        chosen.add_argument("folder", type=Path)
        chosen.add_argument("kinds", nargs="+", choices=KINDS)
        chosen.add_argument("--small", action="store_true")
    chosen.add_argument("--steps", type=int, default=0)
    chosen.add_argument("--load-only", action="store_true")
    chosen.add_argument("--universal", type=Path, metavar="OTHER")
    chosen.add_argument("--settings", action="store_true")
    args = parser.parse_args()
    args.ranks = RANKS
    name_release()
    args.folder.mkdir(exist_ok=True)
    # Several resumes can use one folder at the same time.
    args.result = args.folder / ("write.json" if args.work is write else f"resume-{os.getpid()}.json")
    on_ranks(args)
    if args.work is write:
        for kind in args.kinds:
            converted(args.folder / kind)
    print("\n" + args.result.read_text())


if __name__ == "__main__":
    main()
