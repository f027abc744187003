"""Small training runs with the real DeepSpeed and optimizers other than Adam, with their own states."""

import functools
import gc
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import fused_adam

from trainers import deepspeed_training as dt

RANKS = 2


class Lion(torch.optim.Optimizer):
    """Lion, with one moment and no step: https://arxiv.org/abs/2302.06675."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.01})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for param in (param for param in group["params"] if param.grad is not None):
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        first, second = group["betas"]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_((moment * first + param.grad * (1 - first)).sign(), alpha=-group["lr"])
        moment.mul_(second).add_(param.grad, alpha=1 - second)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Lion": Lion,
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "AMSGrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "weight_decay": 0.01}}}
BEFORE_GROUPS = (0, 18)  # before, ZeRO-3 loads universal checkpoints of one group


class NoCompiler:
    """Replaces an operator that DeepSpeed compiles at run time, so that no compiler is needed."""

    def load(self) -> None:
        raise RuntimeError("nothing is compiled here")


def has_muon() -> bool:
    return importlib.util.find_spec("deepspeed.runtime.zero.muon") is not None


def engine(name: str, ranks: int, stage: int, *, universal: bool = False, seed: int = 0, **of_zero: Any) -> Any:
    """A run with an optimizer from OPTIMIZERS, or with "Muon"."""
    gc.freeze()
    torch._dynamo.config.disable = True  # Muon uses torch.compile
    torch.manual_seed(seed)
    model = dt.Tiny()
    config = dt.config(dt.SAMPLES // ranks, universal, dt.BF16, dt.zero(stage, **of_zero))
    if name == "Muon":
        fused_adam.FusedAdamBuilder = NoCompiler  # then Muon updates vectors with its own Adam
        config["zero_optimization"]["reduce_scatter"] = False
        return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config | MUON)[0]
    number = 1 if stage == 3 and dt.numbers(deepspeed.__version__) < BEFORE_GROUPS else 2
    optimizer = OPTIMIZERS[name](dt.param_groups(model, model.scale, number))
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train_and_keep(rank: int, folder: Path, cases: list[str], ranks: int) -> None:
    """Train each case ("Lion-1": optimizer and stage), save as dt.TAG, and save the live state as dt.TRUTH."""
    for case in cases:
        name, _, stage = case.partition("-")
        run = engine(name, ranks, int(stage))
        dt.train(run, rank, ranks, first=0)
        dt.save(run, folder / case)
        truth = dt.snapshot(run)
        if rank == 0:
            torch.save(truth, folder / case / dt.TRUTH)


def load(rank: int, folder: Path, cases: list[str], ranks: int, tag: str) -> dict[str, list[str]]:
    """By case, the states that differ after a load into a run with other weights.

    An error in a load, or in the steps after it, ends the loop.
    """
    found = {}
    for case in cases:
        try:
            found[case] = _load(rank, folder / case, case, ranks, tag)
        except Exception as error:
            return {**found, case: [f"{type(error).__name__}: {error}"]}
    return found


def _load(rank: int, folder: Path, case: str, ranks: int, tag: str) -> list[str]:
    name, _, stage = case.partition("-")
    run = engine(name, ranks, int(stage), universal=tag == dt.UNIVERSAL, seed=1)
    dt.load(run, folder, tag)
    truth, found = torch.load(folder / dt.TRUTH, weights_only=False), dt.snapshot(run)
    wrong = dt.on_any_rank(dt.differences(found, truth))
    dt.train(run, rank, ranks, first=dt.STEPS)
    return wrong


def resumed(folder: Path, *cases: str, tags: Sequence[str] = (dt.TAG,), **of_zero: Any) -> str:
    """What differs when 2 ranks save each case with these ZeRO settings and resume from each tag, in words."""
    dt.allow_pickles()
    found = {case: dt.results(_resume, RANKS, folder / case, case, tags, of_zero)[0] for case in cases}
    return "; ".join(f"{case}: {wrong}" for case, wrong in found.items() if wrong)


def _resume(rank: int, folder: Path, case: str, tags: Sequence[str], of_zero: dict[str, Any]) -> str:
    name, _, stage = case.partition("-")
    make = functools.partial(engine, name, RANKS, int(stage), **of_zero)
    return dt.resume(rank, folder, RANKS, make, tags)
