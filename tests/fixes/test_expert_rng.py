"""expert_rng: experts on other ranks go on with their own random numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from upstream import affected, newest_affected, run_lines, shown, tree, with_fix, without_fix

RELEASES = affected("expert_rng")


@without_fix(RELEASES)
def test_ranks_go_on_with_the_random_numbers_of_other_experts(version: str, delivery: str) -> None:
    assert "for their experts than they were saved with, and no error" in shown(__file__, version, delivery)


@with_fix(RELEASES)
def test_each_rank_goes_on_with_its_own(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# Further cases

FIX = "expert_rng"
NEWEST = newest_affected(FIX)[1]
IGNORED = "RNG state will be ignored"
SEEDED = "seeded"
FSDP = ("--format", "fsdp_dtensor")


def line(
    delivery: str, what: str, folder: Path, *options: object, ranks: int = 2, version: str = NEWEST, **more: Any
) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    arguments = ["--ranks", str(ranks), *map(str, options)]
    (found,) = run_lines(
        "expert_rng", what, folder, *arguments, tree=tree("megatron-core", version), delivery=delivery, **more
    )
    return found


def save(delivery: str, folder: Path, *options: object, **on: Any) -> None:
    assert line(delivery, "save", folder, *options, **on) == {"error": ""}


def load(delivery: str, folder: Path, *options: object, **on: Any) -> tuple[list[Any], bool, str]:
    """The saved rank of each rank's expert RNG state, whether other states are the saved ones, and the warning."""
    found = line(delivery, "load", folder, *options, **on)
    assert found["error"] == ""
    assert len(found["said"]) < 2
    return found["experts"], found["model"], "".join(found["said"])


@pytest.mark.parametrize("version", ["0.17.0", "0.18.2"])
@pytest.mark.parametrize("form", [(), FSDP])
def test_earlier_releases_with_the_bug(form: tuple[str, ...], version: str, tmp_path: Path) -> None:
    """They read the arguments of a checkpoint in another place."""
    for ep in (2, 1):
        options = ("--ep", ep, *form)
        save("hook", tmp_path / str(ep), *options, version=version)
        experts = [0, 1] if ep == 2 else [0, 0]
        found, model, said = load("hook", tmp_path / str(ep), *options, version=version)
        assert ([0 if ep == 1 else own for own in found], model, said) == (experts, True, "")


@pytest.mark.parametrize("form", [(), FSDP])
def test_a_checkpoint_with_the_states_of_one_rank_is_ignored_with_a_warning(
    form: tuple[str, ...], tmp_path: Path
) -> None:
    """In fsdp_dtensor the rank is unknown: torch lets the rank that wrote the least so far write a shared key."""
    save("none", tmp_path, "--ep", 4, *form, ranks=4)
    experts, model, said = load("none", tmp_path, "--ep", 4, *form, ranks=4)
    assert (len(set(experts)), set(experts) <= {0, 1, 2, 3}, model, said) == (1, True, True, "")
    for ep in (4, 2):
        experts, model, said = load("hook", tmp_path, "--ep", ep, *form, ranks=4)
        assert (experts, model) == ([SEEDED] * 4, False)
        assert IGNORED in said
    # A run without experts loads it as upstream does.
    assert load("hook", tmp_path, "--ep", 1, *form, ranks=4) == load("none", tmp_path, "--ep", 1, *form, ranks=4)


@pytest.mark.parametrize("form", [(), FSDP])
@pytest.mark.parametrize(("ep", "ranks"), [(2, 2), (4, 4), (1, 4)])
def test_in_another_layout_states_are_ignored(ep: int, ranks: int, form: tuple[str, ...], tmp_path: Path) -> None:
    save("hook", tmp_path, "--ep", 2, *form, ranks=4)
    experts, model, said = load("hook", tmp_path, "--ep", ep, *form, ranks=ranks)
    assert (experts, model) == ([SEEDED] * ranks, False)
    assert IGNORED in said


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("form", [(), FSDP])
def test_expert_tensor_parallel_ranks_of_their_own(form: tuple[str, ...], ep: int, tmp_path: Path) -> None:
    """States are lost only with EP 4, where, at TP 2 and ETP 1, data-parallel ranks have different experts."""
    options = ("--tp", 2, "--etp", 1, "--ep", ep, *form)
    save("none", tmp_path / "none", *options, ranks=4)
    if not form:  # since 0.19 upstream loads the first rank's in fsdp_dtensor
        assert load("none", tmp_path / "none", *options, ranks=4) == ([0, 1, 0, 1], True, "")
    experts, model, said = load("hook", tmp_path / "none", *options, ranks=4)
    first, second = experts[:2]
    if ep == 4:
        assert (first, second) == (SEEDED, SEEDED)
    else:  # in fsdp_dtensor it is not known which of the ranks that share it saved it
        assert (first in (0, 2), second in (1, 3)) == (True, True)
    assert (experts, model) == ([first, second] * 2, ep != 4)
    assert (IGNORED in said) == (ep == 4)
    save("hook", tmp_path / "hook", *options, ranks=4)
    assert load("hook", tmp_path / "hook", *options, ranks=4) == ([0, 1, 2, 3], True, "")


@pytest.mark.parametrize("form", [(), FSDP])
@pytest.mark.parametrize("saved", ["none", "hook"])
def test_with_random_init_the_states_of_all_ranks_are_there(saved: str, form: tuple[str, ...], tmp_path: Path) -> None:
    save(saved, tmp_path, "--random", *form)
    assert load("hook", tmp_path, "--random", *form) == ([0, 1], True, "")
    if saved == "hook":
        assert load("hook", tmp_path, *form) == ([0, 1], True, "")


@pytest.mark.parametrize("form", [(), FSDP])
def test_without_experts_nothing_changes(form: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--ep", 1, *form)
    save("hook", tmp_path, *options)
    (first, second), *others = load("none", tmp_path, *options)
    assert (first, others) == (second, [True, ""])
    assert load("hook", tmp_path, *options) == ([first, first], True, "")


def test_what_was_saved_in_fsdp_dtensor_has_the_state_of_each_tensor_parallel_rank(tmp_path: Path) -> None:
    """With the fix, each rank loads its own state; since 0.19, upstream loads the first rank's."""
    options = ("--tp", 2, "--ep", 1, *FSDP)
    save("none", tmp_path, *options)
    assert load("none", tmp_path, *options) == ([0, 0], False, "")
    assert load("hook", tmp_path, *options) == ([0, 1], True, "")


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
    from trainers import megatron_lm

    megatron_lm.import_training()
    return "; ".join(filter(None, (in_layout(folder / str(n), *one) for n, one in enumerate(RUNS))))


def in_layout(folder: Path, ranks: int, tensor: int, expert: int, name: str) -> str:
    from trainers import megatron_training as mt

    right: list[bool] = mt.results(resume, ranks, folder, tensor, expert, name)
    wrong = [rank for rank, same in enumerate(right) if not same]
    if not wrong:
        return ""
    return (
        f"TP {tensor}, EP {expert}, {name}: {len(wrong)} of {ranks} ranks go on with other random numbers"
        " for their experts than they were saved with, and no error"
    )


def resume(rank: int, folder: Path, tensor: int, expert: int, name: str) -> bool:
    """Whether a resumed run draws the same random numbers for its experts as the saved run."""
    from trainers import megatron_lm
    from trainers import megatron_training as mt

    checkpointing = megatron_lm.import_training()
    fsdp = name == "fsdp_dtensor"  # its RNG code does not depend on Megatron-FSDP
    args = megatron_lm.arguments(folder, tensor, expert, ckpt_format=name, use_megatron_fsdp=fsdp)
    megatron_lm.start(tensor, expert)
    model = mt.tiny_model(mt.transformer_config(torch.bfloat16), torch.bfloat16, False)
    draw(rank + 1)
    megatron_lm.save(checkpointing, model, args)
    goes_on = draw()
    megatron_lm.start(tensor, expert)
    megatron_lm.load(checkpointing, model, args)
    return bool(torch.equal(goes_on, draw()))


def draw(times: int = 1) -> torch.Tensor:
    """The next random numbers for this rank's experts, drawn like those of the router and dropout."""
    from megatron.core.tensor_parallel import random

    with random.get_cuda_rng_tracker().fork(random.get_expert_parallel_rng_tracker_name()):
        for _ in range(times):
            drawn = torch.rand(8, device="cuda")
    return drawn.cpu()
