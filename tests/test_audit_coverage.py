"""Every tensor that the files hold is judged, or named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, UNCERTAIN, WHOLE, audit
from megatron_checkpoints import Configuration, written
from test_audit import copied, names
from zero_checkpoints import trained

WRITER = "0.16.2"


@pytest.fixture
def zero(tmp_path: Path) -> Path:
    return copied(trained(WRITER, "stage2")["stage2"], tmp_path)


def change(path: Path, make: Callable[[Any], object]) -> None:
    value = torch.load(path, weights_only=False)
    make(value)
    torch.save(value, path)


MODEL = "mp_rank_00_model_states.pt"
NAN = torch.full((40, 3), float("nan"))


@pytest.mark.parametrize(
    "place",
    [
        lambda value: value["module"].update(buffer=NAN.clone()),
        lambda value: value["module"].update(transposed=NAN.t()),
        lambda value: value["module"].update(inner={"list": [1, (NAN.clone(),)]}),
        lambda value: value.update(optimizer={"state": {0: {"momentum": NAN.clone()}}}),
    ],
    ids=["a buffer", "a transposed one", "a nested one", "of an optimizer"],
)
def test_a_tensor_anywhere_in_a_file_is_judged(zero: Path, place: Callable[[Any], object]) -> None:
    change(zero / MODEL, place)
    assert (audit(zero).verdict, names(audit(zero))) == (DAMAGED, {"not_finite"})


def test_a_tensor_whose_elements_do_not_lie_in_order_is_named(zero: Path) -> None:
    """A view of every other element of a storage that another tensor has a part of."""
    base = torch.ones(100)
    change(zero / MODEL, lambda value: value["module"].update(part=base[:10], strided=base[20::2]))
    report = audit(zero)
    (finding,) = [f for f in report.findings if f.kind.name == "not_judged"]
    assert (report.verdict, finding.array) == (UNCERTAIN, "module.strided")


def test_what_is_whole_stays_whole(zero: Path) -> None:
    base = torch.ones(100)
    change(zero / MODEL, lambda value: value["module"].update(tied=[base, base[:50], base.t()], empty=torch.ones(0, 3)))
    assert (audit(zero).verdict, names(audit(zero))) == (WHOLE, set())


# dp_zero_gather_scatter: the optimizer's state is an object in the sharded files

OBJECTS = [
    Configuration(version=version, ranks=2, backend=backend, format="dp_zero_gather_scatter", iterations="3")
    for version, backend in (("0.14.0", "zarr"), ("0.14.0", "torch_dist"), ("0.16.1", "torch_dist"))
]


@pytest.mark.parametrize("configuration", OBJECTS, ids=str)
def test_the_gathered_state_in_an_object_is_judged(configuration: Configuration) -> None:
    report = audit(written(configuration).whole[-1])
    assert (report.verdict, names(report)) == (WHOLE, set())
    roles = {role for shard in report.checkpoint.shards if not shard.has_rows for role in shard.streams}
    assert roles == {"master", "exp_avg", "exp_avg_sq"}
