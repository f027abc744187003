"""autotp_fused_widths: universal checkpoints of AutoTP with a fused layer keep the order of its parts."""

from pathlib import Path
from typing import Any

import torch

from trainers.lazy import dt
from upstream import affected, proof, shown, with_fix

RELEASES = affected("autotp_fused_widths")
test_parts_of_the_fused_layer_are_exchanged_or_the_conversion_fails, test_it_is_converted_and_loaded_bit_for_bit = (
    proof(__file__, "states differ, and no error")
)
REFUSED = "qkv.bias: the checkpoint does not state how it is cut, though qkv.weight has sub-parameters"


@with_fix(RELEASES)
def test_a_fused_bias_that_the_checkpoint_does_not_describe_is_refused(version: str, delivery: str) -> None:
    """By this package's converter, which DeepSpeed's `main` calls."""
    assert REFUSED in shown(__file__, version, delivery, "undescribed_bias")


# What the ranks run

RANKS, HIDDEN, FUSED = 2, 4, 3


class Model(torch.nn.Module):
    """A column-parallel layer with three sub-parameters, and a row-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN, FUSED * HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(FUSED, dim=-1)
        output: torch.Tensor = self.out(q * torch.tanh(k) + v)
        return output


def bug(folder: Path) -> str:
    import deepspeed

    dt.allow_pickles()
    # Before 0.19.4 DeepSpeed rejects AutoTP at stage 3.
    stages = [1, 3] if dt.numbers(deepspeed.__version__) >= (0, 19, 4) else [1]
    found = {stage: saved_and_loaded(folder / str(stage), stage) for stage in stages}
    return "; ".join(f"stage {stage}: {wrong}" for stage, wrong in found.items() if wrong)


def saved_and_loaded(folder: Path, stage: int) -> str:
    dt.results(save, RANKS, folder, stage)
    if wrong := dt.converted(folder, handed_over=True):
        return f"converted: {wrong}"
    different = dt.results(load, RANKS, folder, stage)[0]
    return f"loaded: {different} states differ, and no error" if different else ""


def undescribed_bias(folder: Path) -> str:
    dt.allow_pickles()
    dt.results(save, RANKS, folder, 1)
    for path in (folder / dt.TAG).glob("mp_rank_*"):
        state = torch.load(path)
        info = state["universal_checkpoint_info"]
        described = info["parameter_with_sub_params"]
        info["parameter_with_sub_params"] = [one for one in described if "weight" in one["patterns"][0]]
        torch.save(state, path)
    return dt.converted(folder, handed_over=True)


def save(rank: int, folder: Path, stage: int) -> None:
    run = engine(stage, universal=False, seed=0)
    train(run, 0)
    run.save_checkpoint(str(folder), tag=dt.TAG, client_state={"iteration": dt.STEPS})
    saved = whole(run)
    if rank == 0:
        torch.save(saved, folder / dt.TRUTH)


def train(run: Any, first: int) -> None:
    for step in range(first, first + dt.STEPS):
        samples = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(step)).bfloat16()
        run.backward((run(samples).float() - 1).pow(2).mean())
        with torch.no_grad():
            run.step()


def load(rank: int, folder: Path, stage: int) -> int:
    run = engine(stage, universal=True, seed=1)
    run.load_checkpoint(str(folder), tag=dt.UNIVERSAL)
    truth, found = torch.load(folder / dt.TRUTH), whole(run)
    return sum(len(dt.differences(found[name], truth[name])) for name in truth)


def engine(stage: int, universal: bool, seed: int) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    model = Model()
    fused = {"patterns": [r".*qkv\.weight$"], "partition_type": "column", "shape": [FUSED, -1], "partition_dim": 0}
    rows = {"patterns": [r".*out\.weight$"], "partition_type": "row"}
    parallel = {
        "autotp_size": RANKS,
        "partition_config": {"use_default_specs": False, "layer_specs": [fused, rows]},
    }
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    parts = {"tensor_parallel": parallel, "optimizer": optimizer}
    config = dt.config(2, universal, parts, dt.BF16, dt.zero(stage))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def whole(run: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The full main parameters and moments, from the optimizers' memory on all ranks, without metadata."""
    by_rank = dt.gathered(own(run))
    return {
        name: {key: joined(name, [states[name][key] for states in by_rank]) for key in by_rank[0][name]}
        for name in by_rank[0]
    }


def own(run: Any) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's main parameters and moments, from its flat tensors."""
    names = dt.names_of(run)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for master, parameters in dt.flat_groups(run):
        for key, flat in {"fp32": master.detach(), **run.optimizer.optimizer.state[master]}.items():
            if key not in ("fp32", *dt.MOMENTS):
                continue
            at = 0
            for parameter in parameters:
                shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))
                part = flat[at : at + shape.numel()].view(shape).clone()
                found.setdefault(names[parameter], {})[key] = part
                at += shape.numel()
    return found


def joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if name.startswith("qkv"):
        return torch.cat([part.chunk(FUSED)[number] for number in range(FUSED) for part in parts])
    return torch.cat(parts, 1) if name == "out.weight" else parts[0]
