"""param_remainders: main parameters that were stored as remainders are loaded, with remainders and without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from ckpt_patches.audit.audit import UNKNOWN, WHOLE, audit
from upstream import affected, newest_affected, run_lines, shown, tree, with_fix, without_fix

RELEASES = affected("param_remainders")


@without_fix(RELEASES)
def test_main_parameters_are_wrong_or_the_load_fails(version: str, delivery: str) -> None:
    found = shown(__file__, version, delivery)
    assert "tensors differ, and no error" in found or found.startswith("AssertionError")


@with_fix(RELEASES)
def test_main_parameters_are_those_of_the_run(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# Further cases

NEWEST = newest_affected("param_remainders")[1]


def line(delivery: str, what: str, folder: Path, kind: str, *options: str, ranks: int = 2) -> dict[str, object]:
    where = {"tree": tree("megatron-core", NEWEST), "delivery": delivery}
    (found,) = run_lines("param_remainders", what, folder, "--ranks", str(ranks), "--format", kind, *options, **where)
    return found


@pytest.mark.parametrize("kind", ["fully_reshardable", pytest.param("torch", marks=pytest.mark.slow)])
def test_they_load_on_other_ranks_with_remainders_and_without(kind: str, tmp_path: Path) -> None:
    assert line("none", "save", tmp_path, kind, "--remainders") == {"differ": [], "error": ""}
    ranks = 1 if kind == "fully_reshardable" else 2
    for options in (("--remainders",), ()):
        assert line("hook", "load", tmp_path, kind, *options, ranks=ranks) == {"differ": [], "error": ""}
    assert len(line("none", "load", tmp_path, kind, ranks=ranks)["differ"]) == 4  # type: ignore[arg-type]


@pytest.mark.slow
def test_dp_reshardable_keeps_their_type_and_loads_without_remainders(tmp_path: Path) -> None:
    line("none", "save", tmp_path, "dp_reshardable", "--remainders")
    for options in (("--remainders",), ()):
        assert line("hook", "load", tmp_path, "dp_reshardable", *options) == {"differ": [], "error": ""}


def test_main_params_are_refused_by_a_run_that_keeps_remainders(tmp_path: Path) -> None:
    line("none", "save", tmp_path, "fully_reshardable")
    found = line("hook", "load", tmp_path, "fully_reshardable", "--remainders")
    assert str(found["error"]).startswith("ValueError: expected remainders of main parameters")
    assert audit(tmp_path / "fully_reshardable").verdict == WHOLE


def test_the_audit_calls_them_unknown_and_not_damaged(tmp_path: Path) -> None:
    line("none", "save", tmp_path, "fully_reshardable", "--remainders")
    found = audit(tmp_path / "fully_reshardable")
    assert found.verdict == UNKNOWN
    told = [finding for finding in found.findings if "whole numbers of 16 bits" in finding.detail]
    assert len(told) == 4  # one per parameter
    assert {finding.kind.name for finding in found.findings if finding.kind.severity != "note"} == {"not_judged"}


# What the ranks run


def bug(folder: Path) -> str:
    from trainers import megatron_training as mt

    found = []
    for number, (saved, resumed) in enumerate([(True, False), (True, True)]):
        found += mt.results(resume, 1, folder / str(number), saved, resumed)
    return "; ".join(filter(None, found))


def resume(rank: int, folder: Path, saved: bool, resumed: bool) -> str:
    """Save after three steps, load, and compare the main parameters, then the weights one step later."""
    from trainers import megatron_training as mt

    model, optimizer = trained(saved, range(3))
    mt.save("dp_zero_gather_scatter", model, optimizer, folder)
    of_other, other = trained(resumed, range(3, 6))
    mt.load("dp_zero_gather_scatter", of_other, other, folder)
    different = not_equal(main_params(optimizer), main_params(other))
    for one, its_optimizer in ((model, optimizer), (of_other, other)):
        mt.step(one, its_optimizer, 3)
    different += not_equal(mt.weights(model), mt.weights(of_other))
    return f"{len(different)} of 8 tensors differ, and no error" if different else ""


def trained(remainders: bool, iterations: range) -> tuple[Any, Any]:
    import megatron.core.utils

    from trainers import megatron_training as mt

    mt.use_inner_optimizer("fused")
    # Megatron passes the setting only to this release of Transformer Engine and later ones.
    megatron.core.utils._te_version = Version("2.1.0")
    model, optimizer = mt.build(precision_aware=True, settings={"store_param_remainders": remainders})
    megatron.core.utils._te_version = Version("0.0.0")
    for iteration in iterations:
        mt.step(model, optimizer, iteration)
    return model, optimizer


def main_params(optimizer: Any) -> dict[str, torch.Tensor]:
    """The main parameters in fp32, from the optimizer's memory."""
    from trainers import megatron_training as mt
    from trainers.stub_fused_adam import joined

    found: dict[str, torch.Tensor] = {}
    own: Any = mt.inner(optimizer).optimizer
    for number, param in enumerate(param for group in own.param_groups for param in group["params"]):
        kept = own.state[param]["master_param"]
        found[str(number)] = joined(param.detach(), kept) if kept.dtype == torch.int16 else kept.detach().clone()
    return found


def not_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in one.items() if not torch.equal(tensor.flatten(), other[name].flatten())]
