"""float16_fp32_params: the audit of a non-distributed optimizer's save."""

from pathlib import Path

import pytest

from ckpt_patches.audit.audit import WHOLE, audit
from upstream import newest_affected, run, tree

NEWEST = newest_affected("float16_fp32_params")[1]


@pytest.mark.parametrize("inner", ["torch", "fused"])
def test_it_is_whole(inner: str, tmp_path: Path) -> None:
    """The verdict is WHOLE: torch's Adam counts steps per parameter, megatron-core saves one."""
    out = tmp_path / "checkpoint"
    run("float16_saving", out, "--inner", inner, "--native-fp32", tree=tree("megatron-core", NEWEST), delivery="hook")
    found = audit(out)
    assert found.verdict == WHOLE, found.findings
