"""Save an optimizer with the real megatron-core while something damages the save, and load it again.

damaged_saving.py OUT race    two ranks lose slices of a zarr checkpoint, as test_zarr_create_synchronizer.py describes
damaged_saving.py OUT step    the next step runs while a persistent worker writes main parameters on the CPU
damaged_saving.py OUT load-race|load-step
"""

import inspect
from pathlib import Path
from typing import Any

import torch

from program_arguments import parsed
from trainers import async_saving
from trainers import megatron_training as mt
from trainers.zarr_saving import force_race

STEPS = 3
RANKS = {"race": 2, "step": 1}


def main() -> None:
    options = parsed({"out": Path, "what": str})
    kind = options.what.removeprefix("load-")
    mt.spawn(load if options.what != kind else WHAT[kind], RANKS[kind], options.out, kind)


def one_weight(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
    """A model of one weight, so that both ranks write half of each array: a sole writer could not lose a slice."""
    from megatron.core.transformer.module import MegatronModule

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.a = torch.nn.Linear(16, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.a(x)
            return out

    return Model().to(dtype)


def build(kind: str) -> tuple[Any, Any]:
    mt.use_inner_optimizer("fused")
    return mt.build(make_model=one_weight) if kind == "race" else mt.build(offload_fraction=1.0)


def state(kind: str, model: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """The sharded state of the optimizer, without the model."""
    name = "fully_sharded_model_space" if kind == "race" else "dp_reshardable"
    return {"optimizer": mt.sharded_state_dict(name, model, optimizer, is_loading=is_loading)["optimizer"]}


def trained(kind: str) -> tuple[Any, Any]:
    model, optimizer = build(kind)
    for number in range(STEPS):
        mt.step(model, optimizer, number)
    return model, optimizer


def race(rank: int, out: Path, kind: str) -> None:
    model, optimizer = trained(kind)
    force_race(rank, RANKS[kind], out.parent)
    mt.write(state(kind, model, optimizer, is_loading=False), out, "zarr")


def step(rank: int, out: Path, kind: str) -> None:
    from megatron.core import dist_checkpointing

    model, optimizer = trained(kind)
    mt.make_folder(out)
    options: dict[str, Any] = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:  # since 0.17 not the default
        options["async_strategy"] = "mcore"
    asked = dist_checkpointing.save(
        state(kind, model, optimizer, is_loading=False), str(out), ("torch_dist", 1), **options
    )
    sign = out.with_suffix(".go")
    calls = async_saving.schedule(asked, sign)
    mt.step(model, optimizer, STEPS)
    sign.touch()
    calls.maybe_finalize_async_calls(blocking=True)
    calls.close()


def load(rank: int, out: Path, kind: str) -> None:
    from megatron.core import dist_checkpointing

    model, optimizer = build(kind)
    loaded = dist_checkpointing.load(state(kind, model, optimizer, is_loading=True), str(out))
    optimizer.load_state_dict(loaded["optimizer"])


WHAT = {"race": race, "step": step}


if __name__ == "__main__":
    main()
