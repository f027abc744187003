"""scheduler_weight_decay: the first iteration after a resume has the weight decay that the flag asks for."""

from pathlib import Path

from test_resume_param_groups import Run, differences, programs
from upstream import affected, with_fix, without_fix

AFFECTED = affected("scheduler_weight_decay")
SAVED: Run = {"do": "save", "name": "x"}
RESUMED: Run = {"do": "load", "name": "x", "weight_decay": [0.2, 0.2], "keep": "checkpoint"}


def wrong(version: str, delivery: str, folder: Path) -> list[str]:
    """The settings of the resumed run's param groups that are not the saved ones, now and at the end of the run."""
    saved, loaded = programs(version, delivery, folder, [SAVED, RESUMED])
    return differences(saved, loaded)


@without_fix(AFFECTED)
def test_the_first_iteration_has_the_weight_decay_of_the_options(version: str, delivery: str, tmp_path: Path) -> None:
    found = wrong(version, delivery, tmp_path)
    assert found
    assert all(setting.endswith("/now") for setting in found)


@with_fix(AFFECTED)
def test_each_iteration_has_the_weight_decay_of_the_checkpoint(version: str, delivery: str, tmp_path: Path) -> None:
    assert wrong(version, delivery, tmp_path) == []
