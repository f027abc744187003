"""universal_stage_settings: pipeline stages of other settings are not converted to a checkpoint that has the first's.

The fix is only in patches for upstream: with this package, what `universal_converter` hands over to refuses them.
"""

from pathlib import Path

from upstream import affected, run_json, tree, with_fix, without_fix
from zero_checkpoints import PERMISSIVE, convert

AFFECTED = affected("universal_stage_settings")
DECAYS = [0.0, 0.1]  # of the two stages


def trained(version: str, out: Path) -> Path:
    found = run_json("stage_settings", "train_and_save", out / "run", tree=tree("deepspeed", version), env=PERMISSIVE)
    assert found == DECAYS
    return out / "run" / "global_step2"


@without_fix(AFFECTED)
def test_all_stages_get_the_first_ones_settings(version: str, delivery: str, tmp_path: Path) -> None:
    """Upstream converts them, and the last stage silently goes on without weight decay."""
    source = trained(version, tmp_path)
    assert convert(tmp_path / "made", source, version=version, delivery=delivery) == {"run": ""}
    (tmp_path / "made" / "run").rename(source.with_name("universal"))
    found = run_json("stage_settings", "load", tmp_path / "run", tree=tree("deepspeed", version), env=PERMISSIVE)
    assert found == [DECAYS[0], DECAYS[0]]


@with_fix(AFFECTED)
def test_they_are_refused(version: str, delivery: str, tmp_path: Path) -> None:
    (error,) = convert(tmp_path / "made", trained(version, tmp_path), version=version, delivery=delivery).values()
    assert "weight_decay" in error
    assert "a universal checkpoint has the param groups of the first pipeline stage alone" in error
    assert not (tmp_path / "made").exists()
