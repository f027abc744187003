"""float16_fp32_params: the audit of a non-distributed optimizer's save."""

import json
from pathlib import Path

import pytest

from ckpt_patches.audit.audit import WHOLE, audit
from explore.spaces import plainer
from test_explore import SMALL
from upstream import newest_affected, run_json, tree

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
