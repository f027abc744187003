"""save all experts in `--ckpt-format torch`"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainers import cases, megatron_lm, show
from trainers import megatron_training as mt

# Ranks; TP, EP, ETP and CP sizes. All releases have the bug in the first layout.
LAYOUTS = ((6, 2, 3, 1, 1), (2, 2, 1, 1, 1), (2, 1, 1, 1, 2), (4, 1, 2, 2, 1), (4, 2, 2, 1, 1))


def run(folder: Path) -> str:
    megatron_lm.import_training()
    return "; ".join(filter(None, (in_layout(folder / str(n), *one) for n, one in enumerate(cases(LAYOUTS)))))


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
        written = noted(lambda: megatron_lm.save(checkpointing, model, args, optimizer))
    except RuntimeError as error:
        return str(error), "", [], 0
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


def noted(save: Callable[[], None]) -> list[str]:
    """The names of the files that `torch.save` writes during a call."""
    written, torch_save = [], torch.save

    def save_and_note(what: Any, path: Any) -> None:
        written.append(str(path))
        torch_save(what, path)

    torch.save = save_and_note
    try:
        save()
    finally:
        torch.save = torch_save
    return written


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


if __name__ == "__main__":
    show(run, "each file is written by one rank, and loads as it was saved")
