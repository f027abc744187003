"""Save and resume every optimizer of a megatron-core release in every format."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from upstream import all_releases, checkpoint_formats, run, tree

PLAIN = ["plain", "precision-aware"]
HYBRID = [
    "-".join(word for word in ("hybrid", fraction, *words) if word)
    for fraction, *words in itertools.product(("0.0", "0.5", "1.0"), ("", "precision-aware"), ("", "overlap"))
]
# Two optimizers that round differently share the parameters; the split depends on the data-parallel size.
SPLIT_DIFFERS = ("fused", "hybrid-0.5", 4)
ROUNDING = 1e-6
# In the default run; `pytest --every-release` runs all.
SOME_HYBRID = ["hybrid-0.0", "hybrid-0.5", "hybrid-0.5-precision-aware-overlap", "hybrid-1.0-precision-aware"]


OPTIMIZERS = PLAIN + (HYBRID if all_releases() else SOME_HYBRID)
INNER_OPTIMIZERS = ["fused", "torch"]


def exact(row: Mapping[str, Any]) -> bool:
    """Whether a resume restored the saved state and took the same steps, up to rounding if their arithmetic changes."""
    if row["result"] == "bit-equal":
        return True
    split = (row["inner"], "-".join(row["optimizer"].split("-")[:2]), row["ranks"]) == SPLIT_DIFFERS
    size, _, loaded = row["result"].removeprefix("differs by ").partition(",")
    return split and loaded == " the loaded state is bit-equal" and float(size) < ROUNDING


def refused_by_upstream(inner: str) -> set[str]:
    """The optimizers that upstream cannot build."""
    return set() if inner == "fused" else {"precision-aware"}


class Resumes(NamedTuple):
    """The results of resumes."""

    rows: list[dict[str, Any]]  # one for each optimizer and format
    log: str  # of all ranks


def resumes(
    version: str, inner: str, delivery: str, ranks: int, folder: Path, *, env: Mapping[str, str] | None = None
) -> Resumes:
    """Save on two ranks with every optimizer in every format, and resume each."""
    done = run(
        "exact_resume",
        folder / "out",
        *(
            "--formats",
            ",".join(checkpoint_formats(version)),
            "--inner",
            inner,
            "--optimizers",
            ",".join(OPTIMIZERS),
            "--resume-ranks",
            str(ranks),
        ),
        tree=tree("megatron-core", version),
        delivery=delivery,
        env=env,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == len(checkpoint_formats(version)) * len(OPTIMIZERS)
    return Resumes(rows, done.stderr)
