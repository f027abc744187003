"""fsdp2_swiglu_rows: the rows of SwiGLU under torch FSDP2 are loaded on other ranks as they were."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.lazy import mt
from upstream import called, newest, once, proof

test_rows_are_those_of_others_after_a_load, test_all_rows_are_as_saved = proof(__file__, "rows are others")


# Further cases

SAVED_BY, NEWEST = "0.18.2", newest("megatron-core")  # the last release that mixes rows, and one that does not
IN_PLACE, MIXED = "", " of 0.18"  # as the release saves, and as those up to 0.18 do
Layout = tuple[int, int, bool]  # ranks, tensor-parallel size, FSDP2
TWO, THREE, FOUR, ALONE = (2, 1, True), (3, 1, True), (4, 2, True), (1, 1, False)
REFUSED = "refused"
TRUTH = "truth.pt"  # the rows that the run had, beside its checkpoints


def saved(layout: Layout, delivery: str = "hook") -> Path:
    """The folder of a run: its checkpoints, and the rows that it had."""
    name = f"fsdp2-rows-{delivery}-{layout}"
    on: dict[str, Any] = {"version": SAVED_BY, "delivery": delivery}
    return once(name, lambda folder: called(__file__, "save_on", *layout[:2], folder=folder, **on))


def other_rows(folder: Path, layout: Layout, version: str, delivery: str) -> dict[str, int | str]:
    """The number of rows that differ from the saved run after a load, or `refused`, by form."""
    on: dict[str, Any] = {"version": version, "delivery": delivery}
    found: dict[str, int | str] = called(__file__, "load_on", *layout, folder=folder, **on)
    return found


@pytest.mark.parametrize("ranks", [TWO, ALONE], ids=str)
def test_the_newest_release_loads_what_the_fix_saved_on_three_ranks(ranks: Layout) -> None:
    """All rows are right, though the middle rank has rows of W and of V."""
    assert other_rows(saved(THREE), ranks, NEWEST, "none")[IN_PLACE] == 0


@pytest.mark.parametrize("ranks", [TWO, THREE], ids=str)
def test_mixed_rows_of_three_ranks_load_on_as_many_and_are_refused_on_others(ranks: Layout) -> None:
    """Mixed rows are identified by the rank that wrote each chunk, not by the number of chunks."""
    mixed = 0 if ranks == THREE else REFUSED
    assert other_rows(saved(THREE), ranks, SAVED_BY, "hook") == {IN_PLACE: 0, MIXED: mixed}


@pytest.mark.slow
def test_a_release_saves_mixed_rows_and_the_newest_one_loads_them_with_the_fix() -> None:
    """Rows are right with the fix, and silently wrong without. On three ranks, 0.18 neither saves nor loads."""
    folder = saved(TWO, "none")
    for form in (IN_PLACE, MIXED):
        assert other_rows(folder, TWO, SAVED_BY, "none")[form] == 0
        assert other_rows(folder, ALONE, SAVED_BY, "none")[form] not in (0, REFUSED)
        assert other_rows(folder, TWO, NEWEST, "none")[form] not in (0, REFUSED)
        assert other_rows(folder, TWO, NEWEST, "hook")[form] == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [TWO, THREE, FOUR, ALONE], ids=str)
def test_tensor_parallel_ranks(ranks: Layout) -> None:
    mixed = 0 if ranks == FOUR else REFUSED
    assert other_rows(saved(FOUR), ranks, SAVED_BY, "hook") == {IN_PLACE: 0, MIXED: mixed}
    if ranks != THREE:
        assert other_rows(saved(FOUR), ranks, NEWEST, "hook") == {IN_PLACE: 0, MIXED: mixed}


# What the ranks run

FC1 = "linear_fc1.weight"
MOMENT = f"optimizer.state.exp_avg.{FC1}"

FORMS = (IN_PLACE, MIXED)
WHY_REFUSED = "The rows of W and V are mixed in"
LOADS = ((2, "under FSDP2"), (1, "without FSDP2"))


def bug(folder: Path) -> str:
    rows = save_on(folder, 2, 1)
    found = []
    for ranks, how in LOADS:
        for form, wrong in load_on(folder, ranks, 1, how == "under FSDP2").items():
            if wrong not in (0, REFUSED):
                by = f"saved by 2 ranks{form}, loaded by {ranks} {how}"
                found.append(f"{by}: {wrong} of {rows} rows are others")
    return "; ".join(found)


def save_on(folder: Path, ranks: int, tensor_parallel: int) -> int:
    """Save in each form, and the rows beside it. Returns their number."""
    return int(mt.results(save, ranks, folder, parallel=(tensor_parallel, 1))[0])


def load_on(folder: Path, ranks: int, tensor_parallel: int, fsdp2: bool) -> dict[str, int | str]:
    """By form, the number of rows that differ from the saved run's."""
    found: dict[str, int | str] = mt.results(load, ranks, folder, fsdp2, parallel=(tensor_parallel, 1))[0]
    return found


def write_as_torch_asks() -> None:
    """Up to 0.12 megatron-core calls a torch function with the arguments of torch 2.6."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from torch.distributed.checkpoint import filesystem

    write: Any = filesystem._write_item
    old = "serialization_format" not in inspect.getsource(filesystem_async)
    if old and "serialization_format" in inspect.signature(write).parameters:
        transforms = filesystem._StorageWriterTransforms()
        form = filesystem.SerializationFormat.TORCH_SAVE
        filesystem_async._write_item = lambda *item: write(transforms, *item[-4:], form)


def save(rank: int, folder: Path) -> int:
    """Save a checkpoint in each form, and the rows beside it. Returns their number."""
    from megatron.core import dist_checkpointing

    write_as_torch_asks()
    mlp, optimizer, state_dict = training(seed=1)
    for form in FORMS:
        checkpoint = folder / f"saved{form}"
        mt.make_folder(checkpoint)
        state = state_dict()
        if form:
            file_as_up_to_0_18(state)
        dist_checkpointing.save(state, str(checkpoint), ("torch_dist", 1))
    found = rows(mlp, optimizer)
    if rank == 0:
        torch.save(found, folder / TRUTH)
    return sum(map(len, found.values()))


def file_as_up_to_0_18(state: dict[str, Any]) -> None:
    """Save half of each shard as rows of W, and half as rows of V."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    (tp, dp), sizes = place()
    shards, shard = math.prod(sizes), tp * sizes[1] + dp

    def halves(factory: Any) -> Any:
        return [
            ShardedTensor.from_rank_offsets(
                factory.key, half, (0, shard + side * shards, 2 * shards), replica_id=(0, 0, 0)
            )
            for side, half in enumerate(factory.data.detach().chunk(2))
        ]

    for holds in (state["model"], *state["optimizer"]["state"].values()):
        for name, value in holds.items():
            if isinstance(value, ShardedTensorFactory):
                holds[name] = halves(value)


def place() -> tuple[tuple[int, int], tuple[int, int]]:
    """The tensor- and data-parallel rank, and the number of both."""
    from megatron.core import parallel_state as state

    tp, dp = state.get_tensor_model_parallel_group(), state.get_data_parallel_group(with_context_parallel=True)
    return (tp.rank(), dp.rank()), (tp.size(), dp.size())


def load(rank: int, folder: Path, fsdp2: bool) -> dict[str, int | str]:
    """Load as Megatron does: FSDP2 weights in place."""
    from megatron.core import dist_checkpointing

    truth = torch.load(folder / TRUTH)
    found: dict[str, int | str] = {}
    for form in FORMS:
        mlp, optimizer, state_dict = training(seed=2, fsdp2=fsdp2)
        try:
            dist_checkpointing.load(state_dict(), str(folder / f"saved{form}"))
        except BaseException as error:  # of all ranks: torch's CheckpointException, which is not an Exception
            if WHY_REFUSED not in str(error):
                raise
            found[form] = REFUSED
        else:
            own = rows(mlp, optimizer)
            found[form] = sum(int((truth[name] != own[name]).any(1).sum()) for name in truth)
    return found


def training(seed: int, fsdp2: bool = True) -> tuple[Any, Any, Callable[[], dict[str, Any]]]:
    """A SwiGLU MLP under FSDP2 and its optimizer after a step, and a function for its sharded state dict."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    torch.manual_seed(seed + 10 * place()[0][0])
    mlp = fully_sharded(swiglu()) if fsdp2 else swiglu()
    optimizer = torch.optim.Adam(mlp.parameters())
    for parameter in mlp.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()

    def state_dict() -> dict[str, Any]:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        model = mlp.sharded_state_dict(metadata={"dp_cp_group": group})
        states = optimizer.state_dict()
        # With torch 2.13 upstream does not find the states by the parameters themselves.
        local = map(local_tensor, mlp.parameters())
        ids = get_param_id_to_sharded_param_map(model, local)
        optim_state_to_sharding_state(states, ids, exclude_keys=("step",))
        return {"model": model, "optimizer": states}

    return mlp, optimizer, state_dict


def swiglu() -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=12,
        num_attention_heads=2,
        ffn_hidden_size=12,
        gated_linear_unit=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    layers = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
    return MLP(config, MLPSubmodules(**layers))


def fully_sharded(module: Any) -> Any:
    """Shard as TorchFullyShardedDataParallel does, but on CPU ranks."""
    from megatron.core import parallel_state
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
    for parameter in module.parameters():
        parameter.is_torch_fsdp2_param = True  # marks FSDP2 parameters since 0.19
    return module


def local_tensor(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def rows(mlp: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The full W of all tensor-parallel ranks, then the full V; of the weight and of a moment."""
    weight, found = mlp.linear_fc1.weight, {}
    for name, tensor in {FC1: weight, MOMENT: optimizer.state[weight]["exp_avg"]}.items():
        parts = sorted(mt.gathered((place()[0], local_tensor(tensor).tolist())))
        of_tp = [[row for (tp, _), own in parts if tp == number for row in own] for number in range(place()[1][0])]
        halves = zip(*(torch.tensor(own).chunk(2) for own in of_tp), strict=True)
        found[name] = torch.cat([half for side in halves for half in side])
    return found
