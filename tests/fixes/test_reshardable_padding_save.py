"""reshardable_padding_save: the real megatron-core saves buckets with padding beyond the end of one rank's shard."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trainers.lazy import mt
from upstream import affected, called, newest, newest_affected, numbers, tree, with_fix, without_fix

FIX = "reshardable_padding_save"
AFFECTED = affected(FIX)
NEWEST = newest_affected(FIX)[1]
NVRX = "nvidia-resiliency-ext"
EMPTY = ("small bucket", "gap", "rank without parameters")


def cases(version: str) -> tuple[str, ...]:
    """The cases whose save fails. Up to 0.14 the end padding is saved as well, and no gap extends beyond it."""
    return ("shared embedding", *EMPTY) if numbers(version) >= (0, 15) else EMPTY


def run(
    what: str, version: str, delivery: str, folder: Path, *names: str, ranks: int = 4, kind: str = ""
) -> dict[str, str]:
    """`save` or `load` each case in the format of buckets or in `kind`, or save and load a `local` checkpoint.

    Returns what differs, or the error.
    """
    kind = kind or ("dp_reshardable" if numbers(version) >= (0, 15) else "fully_sharded_bucket_space")
    arguments = (what, ranks, kind, names)
    on: dict[str, Any] = {"folder": folder, "path": [tree(NVRX, newest(NVRX))] if what == "local" else []}
    found: dict[str, str] = called(__file__, "each", *arguments, version=version, delivery=delivery, **on)
    return found


@without_fix(AFFECTED)
def test_upstream_fails_to_save(version: str, delivery: str, tmp_path: Path) -> None:
    found = run("save", version, delivery, tmp_path, "plain", *cases(version))
    assert found.pop("plain") == ""
    assert run("load", version, delivery, tmp_path, "plain") == {"plain": ""}
    words = {"shared embedding": "out of bounds chunk", **dict.fromkeys(EMPTY, "empty bucket encountered")}
    assert all(words[case] in result for case, result in found.items()), found


@with_fix(AFFECTED)
def test_a_resume_is_bit_equal(version: str, delivery: str, tmp_path: Path) -> None:
    exact = dict.fromkeys(("plain", *cases(version)), "")
    assert run("save", version, delivery, tmp_path, *exact) == exact
    assert run("load", version, delivery, tmp_path, *exact) == exact


@with_fix(AFFECTED)
def test_a_local_checkpoint_loads(version: str, delivery: str, tmp_path: Path) -> None:
    exact = dict.fromkeys(("plain", *cases(version)), "")
    assert run("local", version, delivery, tmp_path, *exact) == exact


@pytest.mark.slow
def test_on_another_number_of_ranks(tmp_path: Path) -> None:
    exact = dict.fromkeys(("plain", *cases(NEWEST)), "")
    run("save", NEWEST, "hook", tmp_path, *exact, ranks=2)
    assert run("load", NEWEST, "hook", tmp_path, *exact) == exact


@pytest.mark.slow
def test_a_checkpoint_that_was_saved_without_the_fix_loads(tmp_path: Path) -> None:
    run("save", NEWEST, "none", tmp_path, "plain")
    assert run("load", NEWEST, "hook", tmp_path, "plain") == {"plain": ""}


# What the ranks run

# The parameters of each case, in the order of their creation: the last is the first in the buffer; its bucket size.
CASES: dict[str, tuple[dict[str, tuple[int, ...]], int | None]] = {
    # One bucket, with padding at its end.
    "plain": ({}, None),
    # A shared embedding has its own bucket. The bucket before it ends in the gap that aligns the next parameter.
    "shared embedding": ({"shared_embedding": (20, 16), "first": (33,)}, None),
    # A bucket in which the last rank's shard is only padding.
    "small bucket": ({"first": (33,)}, 1000),
    # On four ranks the second rank's shard is only the gap between two parameters.
    "gap": ({"second": (30,), "first": (30,)}, 40),
    # So few parameters that the second of four ranks owns only the gap between the two.
    "rank without parameters": ({"first": (30, 1)}, None),
}
FEW = "rank without parameters"


def each(folder: Path, what: str, ranks: int, kind: str, names: list[str]) -> dict[str, str]:
    from trainers.ranks import RankError

    found = {}
    for case in names:
        try:
            found[case] = mt.results(RUNS[what], ranks, folder / case, case, kind)[0]
        except RankError as error:
            found[case] = str(error)
    return found


def save(rank: int, folder: Path, case: str, kind: str) -> str:
    mt.save_and_keep(rank, kind, folder, build(case), steps=3)
    return ""


def load(rank: int, folder: Path, case: str, kind: str) -> str:
    return mt.load_kept(kind, folder, build(case))


def local(rank: int, folder: Path, case: str, kind: str) -> str:
    """Save into a local checkpoint, go on, and go back to it."""
    mt.use_inner_optimizer("fused")
    model, optimizer = build(case)()
    for iteration in range(3):
        mt.step(model, optimizer, iteration)
    saved, checkpoint = mt.everything(model, optimizer), mt.saved_locally(kind, model, optimizer)
    mt.step(model, optimizer, 3)
    mt.load_local(kind, model, optimizer, checkpoint)
    return mt.how_many_differ(saved, mt.everything(model, optimizer))


RUNS = {"save": save, "load": load, "local": local}


def build(case: str) -> Callable[[], tuple[Any, Any]]:
    parameters, bucket_size = CASES[case]

    def network(config: Any, dtype: Any, native_fp32: bool) -> Any:
        import torch
        from megatron.core.transformer.module import MegatronModule

        class Net(MegatronModule):
            def __init__(self) -> None:
                super().__init__(config)
                for name, shape in parameters.items():
                    parameter = torch.nn.Parameter(torch.randn(shape))
                    parameter.shared_embedding = name == "shared_embedding"
                    self.register_parameter(name, parameter)
                self.a = torch.nn.Linear(16, 1 if case == FEW else 64, bias=case != FEW)
                self.b = torch.nn.Identity() if case == FEW else torch.nn.Linear(64, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.b(torch.relu(self.a(x)))
                for name in parameters:
                    out = out + self.get_parameter(name).float().pow(2).sum().to(out.dtype) * 0.01
                return out

        return Net().to(dtype)

    return partial(mt.build, make_model=network, bucket_size=bucket_size)
