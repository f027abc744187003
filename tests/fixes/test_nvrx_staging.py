"""nvrx_staging: NVRx saves CPU tensors as they were at the save."""

from pathlib import Path

import pytest

from trainers.lazy import nvrx_saving
from trainers.ranks import results
from upstream import proof, releases, run_json, tree

test_tensors_are_those_of_a_later_step, test_all_tensors_are_those_of_the_save = proof(
    __file__, "tensors are those of a later step, and no error"
)


# Further cases


STATE, SLACK = 64 << 20, 24 << 20  # bytes: the saved state, and a trainer's other allocations


@pytest.mark.slow
@pytest.mark.parametrize("version", releases("nvidia-resiliency-ext"))
def test_no_worker_writes_a_later_step_and_the_state_is_copied_once(version: str, tmp_path: Path) -> None:
    found = {
        delivery: run_json("nvrx_modes", _made(tmp_path / delivery), tree=tree("nvidia-resiliency-ext", version), **on)
        for delivery, on in {"none": {}, "hook": {"delivery": "hook"}}.items()
    }
    grown = found["hook"].pop("bytes")
    assert found["none"].pop("bytes") < STATE / 2
    assert STATE <= grown < STATE + SLACK
    kinds = {"persistent", "temporary", *(["shared memory"] if version == "0.6.0" else [])}
    assert found["none"] == dict.fromkeys(kinds - {"temporary"}, 48) | {"temporary": 0}
    assert found["hook"] == dict.fromkeys(kinds, 0)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# What the ranks run


def bug(folder: Path) -> str:
    torn = results(nvrx_saving.save_and_step, 1, folder / "checkpoint", {})[0]
    return f"{torn} of {nvrx_saving.TENSORS} tensors are those of a later step, and no error" if torn else ""
