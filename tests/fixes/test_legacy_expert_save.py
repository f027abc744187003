"""legacy_expert_save: all experts are saved in `--ckpt-format torch`, each file by one rank."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from trainers.lazy import megatron_lm, mt
from upstream import affected, called, newest_affected, shown, with_fix, without_fix

RELEASES = affected("legacy_expert_save")


@without_fix(RELEASES)
def test_files_of_experts_are_missing_or_written_by_several_ranks(version: str, delivery: str) -> None:
    found = shown(__file__, version, delivery)
    assert "files are never written, and no error" in found


@with_fix(RELEASES)
def test_each_file_is_written_once_and_loads_as_it_was_saved(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# Further cases

FIX = "legacy_expert_save"
NEWEST = newest_affected(FIX)[1]
FILE = "iter_0000001/mp_rank_00/model_optim_rng.pt"


def on_two(what: str, delivery: str, folder: Path, **options: int) -> tuple[list[str], list[bool]]:
    """Save or load a `torch` checkpoint on two ranks. Returns each rank's error, and whether it has its own weights."""
    found = called(__file__, "caught", what, options, version=NEWEST, delivery=delivery, folder=folder, layout=[2])
    errors, right = zip(*found, strict=True)
    return [*errors], [*right]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pt"))


@pytest.mark.parametrize("experts", [6, 0])
def test_a_checkpoint_with_files_that_ranks_wrote_over_is_refused(tmp_path: Path, experts: int) -> None:
    """With ETP 2 and TP 1 saved, a checkpoint with experts is refused: their two parts share one file."""
    assert on_two("save", "none", tmp_path, experts=experts, saved_etp=2) == (["", ""], [True, True])
    assert files(tmp_path) == [FILE]
    assert on_two("load", "none", tmp_path)[1] == [True, True]  # without a check of the parts
    errors, right = on_two("load", "hook", tmp_path)
    assert right == [not experts] * 2
    for error in errors if experts else ():
        assert "expected a file for each part of the experts, found 1 files for 2 parts" in error
        assert "(TP 1, EP 1, ETP 2)" in error


def test_a_save_that_would_write_over_them_is_refused_before_it_writes(tmp_path: Path) -> None:
    errors, _ = on_two("save", "hook", tmp_path, etp=2)
    assert ["Save with --ckpt-format torch_dist." in error for error in errors] == [True, True]
    assert files(tmp_path) == []


@pytest.mark.parametrize("version", [NEWEST, pytest.param("0.17.1", marks=pytest.mark.slow)])
def test_context_parallel_ranks_have_files_of_their_own_of_the_layer_wise_optimizer(
    version: str, tmp_path: Path
) -> None:
    def found(delivery: str, cp: int = 2, *, lost: bool = False) -> dict[str, Any]:
        folder = tmp_path / f"{delivery}-{cp}-{lost}"
        on: dict[str, Any] = {"version": version, "delivery": delivery, "folder": folder, "layout": [2]}
        errors, wrong = zip(*called(__file__, "resume_layer_wise", cp, lost, **on), strict=True)
        names = sorted(path.name for path in folder.rglob("layer_wise*"))
        return {"errors": [*errors], "files": names, "wrong": [*wrong]}

    both = [f"layer_wise_optimizer_{rank}.pt" for rank in (0, 1)]
    without = found("none")
    assert without["files"] == both[:1]
    # States of the other rank, or a file that both wrote at once.
    assert any(without["wrong"]) or any(without["errors"])
    assert found("hook") == {"errors": ["", ""], "files": both, "wrong": [0, 0]}
    with pytest.raises(AssertionError, match=both[1]):
        found("hook", lost=True)
    for delivery in ("none", "hook"):  # without context parallelism the names are the same
        assert found(delivery, 1) == {"errors": ["", ""], "files": both, "wrong": [0, 0]}


# What the ranks run

# Ranks; TP, EP, ETP and CP sizes. All releases have the bug in the first layout.
LAYOUTS = ((6, 2, 3, 1, 1), (2, 2, 1, 1, 1), (2, 1, 1, 1, 2), (4, 1, 2, 2, 1), (4, 2, 2, 1, 1))


def bug(folder: Path) -> str:
    megatron_lm.import_training()
    return "; ".join(filter(None, (in_layout(folder / str(n), *one) for n, one in enumerate(LAYOUTS))))


def in_layout(folder: Path, ranks: int, *layout: int) -> str:
    found = mt.results(resume, ranks, folder, *layout)
    errors = [error for error, *_ in found]
    if all(errors):
        return ""  # refused
    names = "TP {}, EP {}, ETP {}, CP {}".format(*layout)
    files = {own for _, own, _, _ in found}
    written = [name for *_, names_of_rank, _ in found for name in names_of_rank]
    if absent := files - set(written):
        return f"{names}: {len(absent)} of {len(files)} files are never written, and no error"
    if any(written.count(name) > 1 for name in files):
        return f"{names}: {ranks} ranks write {len(files)} files, several of them the same at once"
    wrong = sum(differing for *_, differing in found)
    return f"{names}: {wrong} loaded tensors differ from the saved ones" if wrong else ""


def resume(rank: int, folder: Path, *layout: int) -> tuple[str, str, list[str], int]:
    """Save a run, and load it into another one if each file was written exactly once.

    Returns:
        An error; the name of this rank's file; the files that this rank wrote; the number of different
        weights, main parameters and moments.
    """
    checkpointing = megatron_lm.import_training()
    args = arguments(folder, *layout)
    mt.use_inner_optimizer("fused")
    megatron_lm.start(*layout)
    model, optimizer = build()
    train(model, optimizer)
    try:
        with mock.patch("torch.save", wraps=torch.save) as saving:
            megatron_lm.save(checkpointing, model, args, optimizer)
    except RuntimeError as error:
        return str(error), "", [], 0
    written = [str(call.args[1]) for call in saving.call_args_list]
    own = checkpointing.get_checkpoint_name(str(folder), 1)
    by_all = [name for names in mt.gathered(written) for name in names]
    if not all(by_all.count(name) == 1 for name in mt.gathered(own)):
        return "", own, written, 0
    resumed, of_resumed = build()
    megatron_lm.load(checkpointing, resumed, args, of_resumed)
    pairs = zip(state(model, optimizer), state(resumed, of_resumed), strict=True)
    return "", own, written, sum(not torch.equal(live, loaded) for live, loaded in pairs)


def arguments(folder: Path, *layout: int) -> Any:
    """The arguments for `--ckpt-format torch` with a distributed optimizer."""
    *sizes, context = layout
    return megatron_lm.arguments(
        folder,
        *sizes,
        context_parallel_size=context,
        data_parallel_size=torch.distributed.get_world_size() // sizes[0] // context,
        num_experts=sizes[1],
        ckpt_format="torch",
        use_dist_ckpt=False,
        use_distributed_optimizer=True,
    )


def build() -> tuple[Any, Any]:
    return mt.build(make_model=mt.dense_and_expert)


def train(model: Any, optimizer: Any) -> None:
    """Set weights that depend on the tensor- and expert-parallel rank, and take a step."""
    from megatron.core import parallel_state as mpu

    ranks = {
        "dense": (mpu.get_tensor_model_parallel_rank(), 0),
        "expert": (mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_model_parallel_rank()),
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor, expert = next(own for part, own in ranks.items() if part in name)
            parameter.add_(1 + tensor + 10 * expert)
    optimizer.reload_model_params()
    sample = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).cuda()
    mt.update(model, optimizer, lambda: model(sample).float().pow(2).mean())


def state(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """The weights, and this rank's shards of main parameters and moments."""
    found = [parameter.detach().float() for parameter in model.parameters()]
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            for main in group["params"]:
                moments = one.optimizer.state[main]
                found += [main.detach(), moments["exp_avg"], moments["exp_avg_sq"]]
    return found


def caught(rank: int, folder: Path, what: str, options: dict[str, int]) -> tuple[str, bool]:
    """Save or load a model whose weights are all 7, with other numbers of expert-tensor-parallel ranks if asked."""
    checkpointing, etp = megatron_lm.import_training(), options.get("etp", 1)
    more = {"ckpt_format": "torch", "use_dist_ckpt": False, "num_experts": options.get("experts", 6)}
    args = megatron_lm.arguments(folder, 1, 1, etp, **more)
    args.expert_tensor_parallel_size = options.get("saved_etp", etp)
    megatron_lm.start(1, 1, etp)
    model = mt.tiny_model(mt.transformer_config(torch.bfloat16), torch.bfloat16, False)
    try:
        if what == "save":
            mt.set_weights(model, {name: torch.full_like(p, 7) for name, p in model.named_parameters()})
            megatron_lm.save(checkpointing, model, args)
        else:
            megatron_lm.load(checkpointing, model, args)
    except RuntimeError as error:
        return str(error), False
    return "", all(bool((p == 7).all()) for p in model.parameters())


def resume_layer_wise(rank: int, folder: Path, context: int, lost: bool) -> tuple[str, int]:
    """Save and load the layer-wise distributed optimizer. Returns an error, and how many own states differ.

    With `lost` the second file is deleted before the load.
    """
    from trainers import layer_wise, megatron_lm
    from trainers.judge import alike
    from trainers.megatron_state import Run, kind_of, parts

    checkpointing = megatron_lm.import_training()
    args = megatron_lm.arguments(
        folder, 1, 1, ckpt_format="torch", use_dist_ckpt=False, optimizer="dist_muon",
        use_layer_wise_distributed_optimizer=True, context_parallel_size=context, data_parallel_size=2 // context,
    )  # fmt: skip
    megatron_lm.start(1, 1, None, context)

    settings = {"use_distributed_optimizer": False}
    start = partial(mt.build, make_model=two_alike, settings=settings, make_optimizer=layer_wise.make)
    model, optimizer = start()
    mt.step(model, optimizer, 0)
    megatron_lm.save(checkpointing, model, args, optimizer)
    resumed, of_resumed = start()
    if lost and rank == 1:
        next(folder.rglob("layer_wise_optimizer_1.pt")).unlink()
    try:
        megatron_lm.load(checkpointing, resumed, args, of_resumed)
    except (RuntimeError, SystemExit) as error:  # a file that two ranks wrote at once
        return type(error).__name__, 0
    runs = (Run(model, optimizer, None), Run(resumed, of_resumed, None))
    own, loaded = ({part.name: part.local for part in parts(run)} for run in runs)  # of this rank alone
    return "", sum(not alike(loaded.get(name), own[name]) for name in own if kind_of(name) != "weight")


def two_alike(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
    """A model in which each rank has a matrix and a bias of equal shapes."""
    return mt.tiny_model(config, dtype, native_fp32, hidden=16, out=16)
