"""nvrx_staging: what each kind of NVRx's workers writes, and the memory of the copy."""

from pathlib import Path

import pytest

from upstream import releases, run_json, tree

pytestmark = pytest.mark.slow

STATE, SLACK = 64 << 20, 24 << 20  # bytes: the saved state, and a trainer's other allocations


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
