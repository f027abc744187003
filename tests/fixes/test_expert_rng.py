"""expert_rng: experts on other ranks go on with their own random numbers."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.lazy import megatron_lm, mt
from upstream import called, newest, newest_affected, proof, tree

test_ranks_go_on_with_the_random_numbers_of_other_experts, test_each_rank_goes_on_with_its_own = proof(
    __file__, "for their experts than they were saved with, and no error"
)


# Further cases

FIX = "expert_rng"
NEWEST = newest_affected(FIX)[1]
NVRX = "nvidia-resiliency-ext"
IGNORED = "RNG state will be ignored"
SEEDED = "seeded"
TORCH_DIST: dict[str, Any] = {}
FSDP = {"format": "fsdp_dtensor"}
each_format = pytest.mark.parametrize("form", [TORCH_DIST, FSDP], ids=str)


def run(what: str, delivery: str, folder: Path, ranks: int, version: str, options: dict[str, Any]) -> Any:
    on: dict[str, Any] = {"version": version, "delivery": delivery, "folder": folder, "layout": [ranks]}
    return called(__file__, what, options, **on)


def save(delivery: str, folder: Path, *, ranks: int = 2, version: str = NEWEST, **options: Any) -> None:
    folder.mkdir(exist_ok=True)
    run("save_drawn", delivery, folder, ranks, version, options)


def load(
    delivery: str, folder: Path, *, ranks: int = 2, version: str = NEWEST, **options: Any
) -> tuple[list[Any], bool, str]:
    """The saved rank of each rank's expert RNG state, whether other states are the saved ones, and the warning."""
    experts, model, said = zip(*run("load_drawn", delivery, folder, ranks, version, options), strict=True)
    assert len(said[0]) < 2
    return [*experts], all(model), "".join(said[0])


@pytest.mark.parametrize("version", ["0.17.0", "0.18.2"])
@each_format
def test_earlier_releases_with_the_bug(form: dict[str, Any], version: str, tmp_path: Path) -> None:
    """They read the arguments of a checkpoint in another place."""
    for ep in (2, 1):
        save("hook", tmp_path / str(ep), ep=ep, version=version, **form)
        experts = [0, 1] if ep == 2 else [0, 0]
        found, model, said = load("hook", tmp_path / str(ep), ep=ep, version=version, **form)
        assert ([0 if ep == 1 else own for own in found], model, said) == (experts, True, "")


@each_format
def test_a_checkpoint_with_the_states_of_one_rank_is_ignored_with_a_warning(
    form: dict[str, Any], tmp_path: Path
) -> None:
    """In fsdp_dtensor the rank is unknown: torch lets the rank that wrote the least so far write a shared key."""
    save("none", tmp_path, ep=4, ranks=4, **form)
    experts, model, said = load("none", tmp_path, ep=4, ranks=4, **form)
    assert (len(set(experts)), set(experts) <= {0, 1, 2, 3}, model, said) == (1, True, True, "")
    for ep in (4, 2):
        experts, model, said = load("hook", tmp_path, ep=ep, ranks=4, **form)
        assert (experts, model) == ([SEEDED] * 4, False)
        assert IGNORED in said
    # A run without experts loads it as upstream does.
    assert load("hook", tmp_path, ep=1, ranks=4, **form) == load("none", tmp_path, ep=1, ranks=4, **form)


@each_format
@pytest.mark.parametrize(("ep", "ranks"), [(2, 2), (4, 4), (1, 4)])
def test_in_another_layout_states_are_ignored(ep: int, ranks: int, form: dict[str, Any], tmp_path: Path) -> None:
    save("hook", tmp_path, ep=2, ranks=4, **form)
    experts, model, said = load("hook", tmp_path, ep=ep, ranks=ranks, **form)
    assert (experts, model) == ([SEEDED] * ranks, False)
    assert IGNORED in said


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2, 4])
@each_format
def test_expert_tensor_parallel_ranks_of_their_own(form: dict[str, Any], ep: int, tmp_path: Path) -> None:
    """States are lost only with EP 4, where, at TP 2 and ETP 1, data-parallel ranks have different experts."""
    options: dict[str, Any] = {"tp": 2, "etp": 1, "ep": ep, "ranks": 4, **form}
    save("none", tmp_path / "none", **options)
    if not form:  # since 0.19 upstream loads the first rank's in fsdp_dtensor
        assert load("none", tmp_path / "none", **options) == ([0, 1, 0, 1], True, "")
    experts, model, said = load("hook", tmp_path / "none", **options)
    first, second = experts[:2]
    if ep == 4:
        assert (first, second) == (SEEDED, SEEDED)
    else:  # in fsdp_dtensor it is not known which of the ranks that share it saved it
        assert (first in (0, 2), second in (1, 3)) == (True, True)
    assert (experts, model) == ([first, second] * 2, ep != 4)
    assert (IGNORED in said) == (ep == 4)
    save("hook", tmp_path / "hook", **options)
    assert load("hook", tmp_path / "hook", **options) == ([0, 1, 2, 3], True, "")


@each_format
@pytest.mark.parametrize("saved", ["none", "hook"])
def test_with_random_init_the_states_of_all_ranks_are_there(saved: str, form: dict[str, Any], tmp_path: Path) -> None:
    save(saved, tmp_path, random=True, **form)
    assert load("hook", tmp_path, random=True, **form) == ([0, 1], True, "")
    if saved == "hook":
        assert load("hook", tmp_path, **form) == ([0, 1], True, "")


@each_format
def test_without_experts_nothing_changes(form: dict[str, Any], tmp_path: Path) -> None:
    options: dict[str, Any] = {"ep": 1, **form}
    save("hook", tmp_path, **options)
    (first, second), *others = load("none", tmp_path, **options)
    assert (first, others) == (second, [True, ""])
    assert load("hook", tmp_path, **options) == ([first, first], True, "")


def test_what_was_saved_in_fsdp_dtensor_has_the_state_of_each_tensor_parallel_rank(tmp_path: Path) -> None:
    """With the fix, each rank loads its own state; since 0.19, upstream loads the first rank's."""
    options: dict[str, Any] = {"tp": 2, "ep": 1, **FSDP}
    save("none", tmp_path, **options)
    assert load("none", tmp_path, **options) == ([0, 0], False, "")
    assert load("hook", tmp_path, **options) == ([0, 1], True, "")


@pytest.mark.parametrize("delivery", ["none", "hook"])
def test_local_checkpoints_keep_the_state_of_each_rank(delivery: str, tmp_path: Path) -> None:
    on: dict[str, Any] = {"layout": [2], "folder": tmp_path, "path": [tree(NVRX, newest(NVRX))]}
    assert called(__file__, "resume", {"format": "local"}, version=NEWEST, delivery=delivery, **on) == [0, 1]


@pytest.mark.parametrize("delivery", ["none", "hook"])
def test_a_format_with_a_file_for_each_rank(delivery: str, tmp_path: Path) -> None:
    save(delivery, tmp_path, format="torch")
    assert load("hook", tmp_path, format="torch") == ([0, 1], True, "")


# What the ranks run

# Number of ranks, tensor-parallel size, expert-parallel size, format.
RUNS = (
    (2, 1, 2, "torch_dist"),
    (4, 1, 4, "torch_dist"),
    (4, 2, 2, "torch_dist"),
    (2, 1, 2, "fsdp_dtensor"),
    (4, 1, 4, "fsdp_dtensor"),
    (4, 2, 2, "fsdp_dtensor"),
)


def bug(folder: Path) -> str:
    megatron_lm.import_training()
    return "; ".join(filter(None, (in_layout(folder / str(n), *one) for n, one in enumerate(RUNS))))


def in_layout(folder: Path, ranks: int, tensor: int, expert: int, name: str) -> str:
    folder.mkdir()
    whose = mt.results(resume, ranks, folder, {"tp": tensor, "ep": expert, "format": name})
    wrong = [rank for rank, saved in enumerate(whose) if saved != rank]
    if not wrong:
        return ""
    return (
        f"TP {tensor}, EP {expert}, {name}: {len(wrong)} of {ranks} ranks go on with other random numbers"
        " for their experts than they were saved with, and no error"
    )


def resume(rank: int, folder: Path, options: dict[str, Any]) -> Any:
    """Save and load. Returns whose random numbers come next for the experts."""
    context = save_drawn(rank, folder, options)
    torch.distributed.barrier()
    return load_drawn(rank, folder, options, context)[0]


EXPERTS, MODEL = "expert-parallel-rng", "model-parallel-rng"


def draw(times: int = 1, name: str = EXPERTS) -> torch.Tensor:
    """The next random numbers for this rank's experts, drawn like those of the router and dropout."""
    from megatron.core.tensor_parallel import random

    with random.get_cuda_rng_tracker().fork(name):
        for _ in range(times):
            drawn = torch.rand(8, device="cuda")
    return drawn.cpu()


def peek() -> dict[str, torch.Tensor]:
    """The next random numbers of each stream; the states are restored, so they are drawn again."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    found = {name: draw(1, name) for name in (EXPERTS, MODEL)}
    get_cuda_rng_tracker().set_states(states)
    return found


def begin(folder: Path, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Options: `tp`, `ep`, `etp`; `random`: with --data-parallel-random-init; `format`, or "local" in its place."""
    checkpointing = megatron_lm.import_training()
    layout = options.get("tp", 1), options.get("ep", 2), options.get("etp")
    name, more = options.get("format", "torch_dist"), {"data_parallel_random_init": options.get("random", False)}
    if name == "local":
        name, more = "torch_dist", {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_algo": "atomic"}
    more |= {"ckpt_format": name, "use_dist_ckpt": name != "torch", "use_megatron_fsdp": name == "fsdp_dtensor"}
    args = megatron_lm.arguments(folder / "run", *layout, **more)
    megatron_lm.start(*layout)
    return checkpointing, mt.tiny_model(mt.transformer_config(torch.bfloat16), torch.bfloat16, False), args


class InMemory:
    """A stub of nvidia-resiliency-ext's manager of local checkpoints, for one rank."""

    local_ckpt_dir = "memory"
    iteration = -1

    def save(self, state_dict: Any, iteration: int, is_async: bool) -> None:
        self.state_dict, self.iteration = state_dict, iteration

    def load(self) -> tuple[Any, str]:
        return self.state_dict, "in memory"

    def find_latest(self) -> int:
        return self.iteration


def save_drawn(rank: int, folder: Path, options: dict[str, Any]) -> Any:
    """Save a run whose ranks have drawn random numbers, and beside it those that come next. Returns a context."""
    checkpointing, model, args = begin(folder, options)
    draw(rank + 1)
    draw(3, MODEL)
    context = {"local_checkpoint_manager": InMemory()} if options.get("format") == "local" else None
    if context:
        checkpointing.get_args = lambda: args
        checkpointing.save_checkpoint(1, [model], None, None, 0, context, non_persistent_ckpt=True)
    else:
        megatron_lm.save(checkpointing, model, args)
    torch.save(peek(), folder / f"{rank}.pt")
    return context


def load_drawn(rank: int, folder: Path, options: dict[str, Any], context: Any = None) -> tuple[Any, bool, list[str]]:
    """Whose random numbers come next for the experts, whether the model's are the saved ones, and the output."""
    checkpointing, model, args = begin(folder, options)
    seeded = peek()[EXPERTS]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        megatron_lm.load(checkpointing, model, args, checkpointing_context=context)
    saved = [torch.load(folder / f"{n}.pt") for n in range(len(list(folder.glob("*.pt"))))]
    found = peek()
    same = [n for n, numbers in enumerate(saved) if torch.equal(numbers[EXPERTS], found[EXPERTS])]
    whose = next(iter([rank] if rank in same else same), SEEDED if torch.equal(seeded, found[EXPERTS]) else None)
    lines = [line for line in said.getvalue().splitlines() if "RNG" in line]
    return whose, torch.equal(saved[rank % options.get("tp", 1)][MODEL], found[MODEL]), lines
