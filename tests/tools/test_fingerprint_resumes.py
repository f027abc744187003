"""No false alarm: a resume of every optimizer in every format is exact, and verified by the record of the save."""

from pathlib import Path
from typing import Any

import pytest

from megatron_resumes import INNER_OPTIMIZERS, exact, refused_by_upstream, resumes
from upstream import all_releases, newest_by_default, releases

pytestmark = pytest.mark.slow

ON = {"CKPT_PATCHES_FINGERPRINT": "1"}


def cases() -> list[Any]:
    """Release, inner optimizer, and the number of ranks that resume two ranks' save."""
    return [
        pytest.param(*release.values, inner, ranks, id=f"{release.id}-{inner}-{ranks}")
        for release in newest_by_default(releases("megatron-core"))
        for inner in INNER_OPTIMIZERS
        for ranks in (2, 4)
        if all_releases() or (inner, ranks) == ("fused", 4)
    ]


@pytest.mark.parametrize(("version", "inner", "ranks"), cases())
def test_every_exact_resume_is_verified_whole(version: str, inner: str, ranks: int, tmp_path: Path) -> None:
    rows, log = resumes(version, inner, "hook", ranks, tmp_path, env=ON)
    resumed = [row for row in rows if row["optimizer"] not in refused_by_upstream(inner)]
    assert [row for row in resumed if not exact(row)] == []
    assert log.count("resume verified: ") == len([row for row in resumed if row["format"] != "torch"])
    assert log.count("not verified: the optimizer's state: this state dict is not one that") == log.count(
        "resume not v"
    )
