"""Small trainings with the real DeepSpeed and other optimizers than Adam: whatever states an optimizer has."""

import gc
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import fused_adam

from ckpt_patches import demo
from ckpt_patches.demo import deepspeed_training as dt

MOMENTUM = "momentum_buffer"


class Lion(torch.optim.Optimizer):
    """One moment, and no step: https://arxiv.org/abs/2302.06675."""

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
BEFORE_GROUPS = (0, 18)  # until then ZeRO-3 loads universal checkpoints of one group


class NoCompiler:
    """In the place of an operator that DeepSpeed would compile at run time: a demonstration needs no compiler."""

    def load(self) -> None:
        raise RuntimeError("nothing is compiled here")


def has_muon() -> bool:
    return importlib.util.find_spec("deepspeed.runtime.zero.muon") is not None


def engine(name: str, ranks: int, stage: int, *, universal: bool = False, seed: int = 0, **of_zero: Any) -> Any:
    """A run with an optimizer of OPTIMIZERS, or with "Muon"."""
    gc.freeze()
    torch._dynamo.config.disable = True  # Muon compiles itself
    torch.manual_seed(seed)
    model = dt.Tiny()
    config = {
        "train_micro_batch_size_per_gpu": dt.SAMPLES // ranks,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
        **dt.BF16,
        **dt.zero(stage, **of_zero),
    }
    if name == "Muon":
        fused_adam.FusedAdamBuilder = NoCompiler  # then Muon steps vectors by Adam itself
        config["zero_optimization"]["reduce_scatter"] = False
        return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config | MUON)[0]
    number = 1 if stage == 3 and dt.numbers(deepspeed.__version__) < BEFORE_GROUPS else 2
    optimizer = OPTIMIZERS[name](dt.param_groups(model, model.scale, number))
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def live(run: Any) -> dict[str, Any]:
    """Weights, masters and all states, whole, from the running optimizer's memory; steps and settings by group."""
    names = dt.names_of(run)
    found: dict[str, Any] = {f"{name}.weight": weight for name, weight in dt.weights(run).items()}
    for number, (flat, params) in enumerate(_flats(run)):
        own = {"fp32": flat.detach(), **run.optimizer.optimizer.state.get(flat, {})}
        for key in sorted(set().union(*dt.gathered(set(own)))):
            values = dt.gathered(own.get(key))
            if not all(isinstance(value, torch.Tensor) and value.dim() for value in values):
                found[f"group {number}.{key}"] = {str(value) for value in values if value is not None}
            elif all(value.shape == flat.shape for value in values):
                found |= {f"{names[param]}.{key}": value for param, value in _cut(values, params)}
            else:
                found |= _of_wholes(run, number, own[key], names)
    for number, group in enumerate(dt.groups_of(run)):
        found[f"group {number}"] = {key: value for key, value in group.items() if key != "params"}
    return found


def _flats(run: Any) -> list[tuple[torch.Tensor, list[Any]]]:
    if hasattr(run.optimizer, "fp32_partitioned_groups_flat"):
        return list(zip(run.optimizer.fp32_partitioned_groups_flat, run.optimizer.fp16_groups, strict=True))
    return dt.flat_groups(run)


def _cut(partitions: list[torch.Tensor], params: list[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each parameter's elements, from the partitions of all ranks."""
    at, flat = 0, torch.cat(partitions)
    for param in params:
        if not hasattr(param, "ds_id"):
            yield param, flat[at : at + param.numel()].view(param.shape).clone()
            at += param.numel()
            continue
        each = param.partition_numel()
        whole = torch.cat([partition[at : at + each] for partition in partitions])[: param.ds_numel]
        yield param, whole.view(param.ds_shape).clone()
        at += each


def _of_wholes(run: Any, group: int, own: torch.Tensor, names: dict[Any, str]) -> dict[str, torch.Tensor]:
    """Muon's momentum at stage 1 and 2: of all of each matrix of which a part is in the partition."""
    at, mine = 0, {}
    for param in run.optimizer.params_in_partition[group]:
        mine[f"{names[param]}.{MOMENTUM}"] = own[at : at + param.numel()].view(param.shape).clone()
        at += param.numel()
    assert at == own.numel(), (at, own.numel())
    found: dict[str, torch.Tensor] = {}
    for of_rank in dt.gathered(mine):
        for name, momentum in of_rank.items():
            assert found.setdefault(name, momentum).equal(momentum), name
    return found


def train_and_keep(rank: int, folder: Path, cases: list[str], ranks: int) -> None:
    """Of each case, an optimizer and a stage as "Lion-1": save as dt.TAG; beside it dt.TRUTH, the live state."""
    for case in cases:
        name, _, stage = case.partition("-")
        run = engine(name, ranks, int(stage))
        dt.train(run, rank, ranks, first=0)
        dt.save(run, folder / case)
        truth = live(run)
        if rank == 0:
            torch.save(truth, folder / case / dt.TRUTH)


def load(rank: int, folder: Path, cases: list[str], ranks: int, tag: str) -> dict[str, list[str]]:
    """By case the states that a run of other weights has otherwise after a load.

    A load, or the step after it, that raises an error is the last one that is looked at.
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
    truth, found = torch.load(folder / dt.TRUTH, weights_only=False), live(run)
    wrong = _different(found, truth)
    dt.train(run, rank, ranks, first=dt.STEPS)
    return wrong


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bool(torch.equal(one, other))
    return type(one) is type(other) and bool(str(one) == str(other))


def show_resume(
    *every: str, tags: Sequence[str] = (dt.TAG,), raises: str | tuple[str, ...] = (), **of_zero: Any
) -> None:
    """A demonstration: save each case on 2 ranks with these settings of ZeRO, and resume from each of the tags.

    An error that begins with `raises` is the bug.
    """
    dt.allow_pickles()

    def run(folder: Path) -> str:
        ranks, each = 2, demo.cases(every)
        found = {case: dt.results(resume, ranks, folder / case, case, ranks, tags, of_zero)[0] for case in each}
        return "; ".join(f"{case}: {wrong}" for case, wrong in found.items() if wrong)

    demo.show(run, "saved; resumes bit for bit", raises=raises)


def resume(rank: int, folder: Path, case: str, ranks: int, tags: Sequence[str], of_zero: dict[str, Any]) -> str:
    """Train, save, load into a run of other weights, and take two steps in both; what differs then, "" if nothing."""
    name, _, stage = case.partition("-")
    run = engine(name, ranks, int(stage), **of_zero)
    dt.train(run, rank, ranks, first=0)
    dt.save(run, folder)
    saved = live(run)
    losses = dt.train(run, rank, ranks, first=dt.STEPS)
    for tag in tags:
        if tag == dt.UNIVERSAL:
            dt.convert(folder)
        resumed = engine(name, ranks, int(stage), universal=tag == dt.UNIVERSAL, seed=1, **of_zero)
        dt.load(resumed, folder, tag)
        loaded = _different(live(resumed), saved)
        found = dt.train(resumed, rank, ranks, first=dt.STEPS)
        trained = _different(live(resumed), live(run))
        if loaded or trained or found != losses:
            return (
                f"{len(loaded)} of {len(saved)} states differ after the load, {len(trained)} after {dt.STEPS} steps "
                f"more, whose last loss is {found[-1]:.5f} in place of {losses[-1]:.5f}; no error"
            )
    return ""


def _different(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    keys = sorted(expected.keys() | found.keys())
    return dt.on_any_rank([key for key in keys if not _same(found.get(key), expected.get(key))])
