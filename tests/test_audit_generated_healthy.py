"""Whole checkpoints of runs with generated options, by the real DeepSpeed: none is called damaged."""

import json
from collections import Counter
from pathlib import Path

import pytest

import shared
from ckpt_patches.audit.audit import UNKNOWN, WHOLE, audit
from upstream import newest, run_json, tree

TABLE = Path(__file__).parent.parent / "docs/audit.md"
# Why one can be UNKNOWN: docs/audit.md, "Detection coverage".
REASONS = {"parameter_without_moments", "unusual", "mask_or_damage", "moment_gap", "not_read", "no_optimizer_state"}
COUNT = 108


def written(ranks: int, count: int) -> Path:
    def write(out: Path) -> None:
        options = ("--seed", str(ranks), "--ranks", str(ranks), "--count", str(count))
        run_json("zero_healthy", out, *options, tree=tree("deepspeed", newest("deepspeed")))

    return shared.once(f"healthy-{ranks}-{count}", write)


def verdicts(ranks: int, count: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for options in sorted(written(ranks, count).glob("*/options.json")):
        (folder,) = options.parent.glob("global_step*")
        report = audit(folder)
        why = {finding.kind.name for finding in report.findings if finding.kind.severity != "note"}
        assert report.verdict in (WHOLE, UNKNOWN), (folder, json.loads(options.read_text()), report.findings)
        assert why <= REASONS, (folder, why)
        found[report.verdict] += 1
    return found


def test_a_few() -> None:
    assert sum(verdicts(2, 12).values()) >= 10


@pytest.mark.slow
def test_two_hundred() -> None:
    found = verdicts(2, COUNT) + verdicts(3, COUNT)
    assert found.total() >= 200
    row = f"| {found.total()} | {found[WHOLE]} | {found[UNKNOWN]} | 0 |"
    assert row in TABLE.read_text(), f"expected in {TABLE}: {row}"
