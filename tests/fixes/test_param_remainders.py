"""param_remainders: main parameters that were stored as remainders are loaded, with remainders and without."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from ckpt_patches.audit.audit import UNKNOWN, WHOLE, audit
from trainers.lazy import mt
from upstream import called, newest_affected, proof

test_main_parameters_are_wrong_or_the_load_fails, test_main_parameters_are_those_of_the_run = proof(
    __file__, re.compile("states differ, and no error|^AssertionError")
)


# Further cases

NEWEST = newest_affected("param_remainders")[1]


def run(delivery: str, function: str, folder: Path, *arguments: object) -> str:
    """Arguments: ranks, format, whether the run keeps remainders."""
    return str(called(__file__, function, *arguments, version=NEWEST, delivery=delivery, folder=folder))


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("fully_reshardable", 1), pytest.param("torch", 2, marks=pytest.mark.slow)],
)
def test_they_load_on_other_ranks_with_remainders_and_without(kind: str, ranks: int, tmp_path: Path) -> None:
    run("none", "save_on", tmp_path, 2, kind, True)
    assert [run("hook", "load_on", tmp_path, ranks, kind, remainders) for remainders in (True, False)] == ["", ""]
    assert run("none", "load_on", tmp_path, ranks, kind, False) == "4 of 4 states differ, and no error"


@pytest.mark.slow
def test_dp_reshardable_keeps_their_type_and_loads_without_remainders(tmp_path: Path) -> None:
    run("none", "save_on", tmp_path, 2, "dp_reshardable", True)
    assert [run("hook", "load_on", tmp_path, 2, "dp_reshardable", one) for one in (True, False)] == ["", ""]


def test_main_params_are_refused_by_a_run_that_keeps_remainders(tmp_path: Path) -> None:
    run("none", "save_on", tmp_path, 2, "fully_reshardable", False)
    found = run("hook", "load_on", tmp_path, 2, "fully_reshardable", True)
    assert found.startswith("ValueError: expected remainders of main parameters")
    assert audit(tmp_path / "checkpoint").verdict == WHOLE


def test_the_audit_calls_them_unknown_and_not_damaged(tmp_path: Path) -> None:
    run("none", "save_on", tmp_path, 2, "fully_reshardable", True)
    found = audit(tmp_path / "checkpoint")
    assert found.verdict == UNKNOWN
    told = [finding for finding in found.findings if "whole numbers of 16 bits" in finding.detail]
    assert len(told) == 4  # one per parameter
    assert {finding.kind.name for finding in found.findings if finding.kind.severity != "note"} == {"not_judged"}


# What the ranks run


def bug(folder: Path) -> str:
    """Save with remainders; load with remainders and without, and compare one step later, too."""
    save_on(folder, 1, "dp_zero_gather_scatter", True)
    found = [load_on(folder, 1, "dp_zero_gather_scatter", remainders) for remainders in (False, True)]
    return "; ".join(filter(None, found))


def save_on(folder: Path, ranks: int, kind: str, remainders: bool) -> None:
    mt.results(save, ranks, folder, kind, remainders)


def load_on(folder: Path, ranks: int, kind: str, remainders: bool) -> str:
    return str(mt.results(load, ranks, folder, kind, remainders)[0])


def trained(remainders: bool, iterations: range) -> tuple[Any, Any]:
    import megatron.core.utils

    mt.use_inner_optimizer("fused")
    # Megatron passes the setting only to this release of Transformer Engine and later ones.
    megatron.core.utils._te_version = Version("2.1.0")
    model, optimizer = mt.build(precision_aware=True, settings={"store_param_remainders": remainders})
    megatron.core.utils._te_version = Version("0.0.0")
    for iteration in iterations:
        mt.step(model, optimizer, iteration)
    return model, optimizer


def save(rank: int, folder: Path, kind: str, remainders: bool) -> None:
    model, optimizer = trained(remainders, range(3))
    mt.save(kind, model, optimizer, folder / "checkpoint")
    own = main_params(model, optimizer)
    mt.step(model, optimizer, 3)
    later = mt.weights(model)
    if rank == 0:
        torch.save((own, later), folder / "states.pt")


def load(rank: int, folder: Path, kind: str, remainders: bool) -> str:
    model, optimizer = trained(remainders, range(3, 6))
    mt.load(kind, model, optimizer, folder / "checkpoint")
    saved, later = torch.load(folder / "states.pt")
    if wrong := mt.how_many_differ(saved, main_params(model, optimizer)):
        return wrong
    mt.step(model, optimizer, 3)
    return mt.how_many_differ(later, mt.weights(model))


def main_params(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The full main parameters of all ranks, in fp32, from the optimizer's memory."""
    from trainers.stub_fused_adam import joined

    own, found = mt.inner(optimizer), {}
    for name, param in model.named_parameters():
        full = torch.zeros(param.numel())
        if param in own.model_param_group_index_map:
            group, order = own.model_param_group_index_map[param]
            shard = own.optimizer.param_groups[group]["params"][order]
            kept = own.optimizer.state[shard]["master_param"]
            owned = own._get_model_param_range_map(param)["param"]
            weights = param.detach().view(-1)[owned.start : owned.end]
            full[owned.start : owned.end] = joined(weights, kept) if kept.dtype == torch.int16 else kept.detach()
        torch.distributed.all_reduce(full)
        found[name] = full
    return found
