"""universal_frozen_and_buffers: a universal load loads frozen parameters and buffers."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainers.lazy import dt
from upstream import proof

test_frozen_parameters_and_buffers_are_not_those_saved, test_frozen_parameters_and_buffers_are_those_saved = proof(
    __file__, re.compile("^seen, w1.bias, w1.weight are not those saved, and no error$")
)


# What the ranks run

KINDS = ("stage1", "stage3", "stage2", "stage1-nested")
RANKS = ((2, 3), (3, 2))  # number of ranks at the save and at the load
SAVED = "saved.pt"


def bug(folder: Path, kinds: Sequence[str] = KINDS, ranks: Sequence[tuple[int, int]] = RANKS) -> str:
    dt.allow_pickles()
    for kind in kinds:
        for save_on, load_on in ranks:
            checkpoint = folder / f"{kind}-{save_on}"
            dt.results(save, save_on, checkpoint, kind, save_on)
            if wrong := dt.results(load, load_on, checkpoint, kind, load_on)[0]:
                return f"{', '.join(wrong)} are not those saved, and no error"
    return ""


def bug_of_two(folder: Path) -> str:
    """At stages 1 and 3, on more ranks."""
    return bug(folder, KINDS[:2], RANKS[:1])


def save(rank: int, folder: Path, kind: str, ranks: int) -> None:
    run = engine(kind, ranks, universal=False, seed=0)
    dt.train(run, rank, ranks, first=0)
    dt.save(run, folder)
    states = kept(run)
    if rank == 0:
        torch.save(states, folder / SAVED)
    dt.convert(folder)


def load(rank: int, folder: Path, kind: str, ranks: int) -> list[str]:
    """The weights and buffers that differ from the saved ones on any rank."""
    run = engine(kind, ranks, universal=True, seed=1)
    dt.load(run, folder, dt.UNIVERSAL)
    return dt.on_any_rank(dt.differences(kept(run), torch.load(folder / SAVED, weights_only=False)))


def kept(run: Any) -> dict[str, Any]:
    """The weights and buffers."""
    states = {name: value for name, value in dt.snapshot(run).items() if dt.kind_of(name) in ("weight", "buffer")}
    return {name.removeprefix("buffer ").removesuffix(".weight"): value for name, value in states.items()}


def engine(kind: str, ranks: int, universal: bool, seed: int) -> Any:
    """A run with a frozen first layer and a buffer. All values depend on the seed."""
    torch.manual_seed(seed)
    model = dt.Tiny()
    model.w1.requires_grad_(False)
    model.register_buffer("seen", torch.randn(5))
    groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    stage, _, form = kind.partition("-")
    return dt.initialize(stage, ranks, Nested(model) if form else model, groups, universal)


class Nested(torch.nn.Module):
    """As Megatron-DeepSpeed's models are: the state dict is nested and without one buffer, a load returns nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.language_model = model
        self.register_buffer("inv_freq", torch.ones(2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.language_model(x)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in self.language_model.state_dict().items():
            layer, _, own = name.rpartition(".")
            found.setdefault(layer, {})[own] = value
        return {"language_model": found | found.pop("")}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        for name, value in state_dict["language_model"].items():
            if isinstance(value, dict):
                self.language_model.get_submodule(name).load_state_dict(value, strict)
