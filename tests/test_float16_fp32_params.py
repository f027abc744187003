"""float16_fp32_params: the audit of what an optimizer that is not distributed saves."""

from pathlib import Path

import pytest

from ckpt_patches.audit.audit import WHOLE, audit
from upstream import newest_affected, run, tree

NEWEST = newest_affected("float16_fp32_params")[1]


@pytest.mark.parametrize("inner", ["torch", "fused"])
def test_it_is_whole(inner: str, tmp_path: Path) -> None:
    """torch's Adam counts the steps of each parameter, and megatron-core saves one step for all."""
    out = tmp_path / "checkpoint"
    run("float16_saving", out, "--inner", inner, "--native-fp32", tree=tree("megatron-core", NEWEST), delivery="hook")
    found = audit(out)
    assert found.verdict == WHOLE, found.findings
