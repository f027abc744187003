"""universal_stage_settings: pipeline stages of other settings are not converted to a checkpoint that has the first's.

The fix is only in patches for upstream: with this package, what `universal_converter` hands over to refuses them.
"""

from pathlib import Path
from typing import Any

import torch

from trainers.lazy import dt
from upstream import affected, called, with_fix, without_fix
from zero_checkpoints import PERMISSIVE, convert

AFFECTED = affected("universal_stage_settings")
DECAYS = [0.0, 0.1]  # of the two stages


def trained(version: str, out: Path) -> Path:
    found = called(__file__, "on_stages", "save", version=version, delivery="none", folder=out / "run", env=PERMISSIVE)
    assert found == DECAYS
    return out / "run" / "global_step2"


@without_fix(AFFECTED)
def test_all_stages_get_the_first_ones_settings(version: str, delivery: str, tmp_path: Path) -> None:
    """Upstream converts them, and the last stage silently goes on without weight decay."""
    source = trained(version, tmp_path)
    assert convert(tmp_path / "made", source, version=version, delivery=delivery) == {"run": ""}
    (tmp_path / "made" / "run").rename(source.with_name("universal"))
    folder = tmp_path / "run"
    found = called(__file__, "on_stages", "load", version=version, delivery="none", folder=folder, env=PERMISSIVE)
    assert found == [DECAYS[0], DECAYS[0]]


@with_fix(AFFECTED)
def test_they_are_refused(version: str, delivery: str, tmp_path: Path) -> None:
    (error,) = convert(tmp_path / "made", trained(version, tmp_path), version=version, delivery=delivery).values()
    assert "weight_decay" in error
    assert "a universal checkpoint has the param groups of the first pipeline stage alone" in error
    assert not (tmp_path / "made").exists()


# What the ranks run

STAGES = 2


def on_stages(folder: Path, what: str) -> list[float]:
    """Train two pipeline stages and save, or load what was converted. Returns each stage's weight decay."""
    return dt.results(save if what == "save" else load, STAGES, folder)


def save(rank: int, folder: Path) -> float:
    run = engine(weight_decay=0.1 * rank, universal=False)
    samples = torch.ones(1, dt.HIDDEN, dtype=next(run.module.parameters()).dtype)
    run.train_batch(iter([(samples, torch.ones(1, 1))] * 2))
    dt.save(run, folder)
    return float(dt.groups_of(run)[0]["weight_decay"])


def load(rank: int, folder: Path) -> float:
    run = engine(weight_decay=0.5, universal=True)
    dt.load(run, folder, dt.UNIVERSAL)
    return float(dt.groups_of(run)[0]["weight_decay"])


def engine(weight_decay: float, *, universal: bool) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = deepspeed.PipelineModule(
        dt.layers_of(dt.Tiny()), STAGES, loss_fn=dt.loss, partition_method="uniform", activation_checkpoint_interval=0
    )
    config = dt.config(1, universal, dt.BF16, dt.zero(1), {"gradient_accumulation_steps": 2, "steps_per_print": 10})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
