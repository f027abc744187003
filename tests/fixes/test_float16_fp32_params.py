"""float16_fp32_params: fp32 parameters among bf16 ones are saved and loaded without the distributed optimizer."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from ckpt_patches.audit.audit import WHOLE, audit
from explore.spaces import plainer
from explore.test_explore import SMALL
from trainers.lazy import mt
from upstream import newest_affected, proof, run_json, tree

test_the_save_or_the_load_fails, test_a_resume_goes_on_bit_for_bit = proof(
    __file__, re.compile("^(AssertionError|ValueError: Param id|KeyError)")
)


# Further cases

NEWEST = newest_affected("float16_fp32_params")[1]


@pytest.mark.parametrize("inner", ["torch", "fused"])
def test_it_is_whole(inner: str, tmp_path: Path) -> None:
    """The verdict is WHOLE: torch's Adam counts steps per parameter, megatron-core saves one."""
    case = plainer(SMALL["megatron"], [{"run": {"optimizer": "whole", "fp32_norms": True, "inner": inner}}])
    (tmp_path / "case.json").write_text(json.dumps(case))
    on = tree("megatron-core", NEWEST)
    run_json("explore_megatron", "train", tmp_path / "case.json", tmp_path / "run", tree=on, delivery="hook")
    found = audit(tmp_path / "run" / "first")
    assert found.verdict == WHOLE, found.findings


# What the ranks run


def resume(rank: int, folder: Path) -> str:
    """Save after three steps, load into another run, and compare both two steps later."""
    from trainers import judge
    from trainers.megatron_state import Run, live

    mt.use_inner_optimizer("fused")
    make = partial(mt.build, native_fp32=True, settings={"use_distributed_optimizer": False})
    model, optimizer = make()
    for iteration in range(3):
        mt.step(model, optimizer, iteration)
    mt.save("default", model, optimizer, folder)
    resumed, of_resumed = make()
    mt.step(resumed, of_resumed, 9)
    mt.load("default", resumed, of_resumed, folder)
    for iteration in range(3, 5):
        mt.step(model, optimizer, iteration)
        mt.step(resumed, of_resumed, iteration)
    expected, found = (live(Run(*one, None)) for one in ((model, optimizer), (resumed, of_resumed)))
    different = judge.different(expected, found)
    return f"{len(different)} of {len(expected)} states differ, and no error" if different else ""


def bug(folder: Path) -> str:
    return str(mt.results(resume, 1, folder / "checkpoint")[0])
