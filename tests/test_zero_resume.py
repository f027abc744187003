"""A resume at any ZeRO stage is exact, from an ordinary and from a universal checkpoint, or it is refused.

What the runs find is the table of DeepSpeed in docs/resume.md.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import resume_table
import shared
from upstream import all_releases
from zero_checkpoints import convert
from zero_resumes import exact, optimizers, resumed, trained

RELEASES = ["0.19.8"]
DELIVERIES = ["none", "hook"] if all_releases() else ["hook"]
ON_RANKS = [(2, 2), (4, 2), (2, 4)] if all_releases() else [(2, 2), (2, 4)]  # saved and resumed
CASES = [f"{kind}-{groups}" for kind in resume_table.KINDS for groups in (1, 2)]
if not all_releases():
    CASES = ["stage1-2", "stage3-2"]


@functools.cache
def universal(version: str, delivery: str, ranks: int) -> tuple[Path, dict[str, str]]:
    """A folder with the universal checkpoints of trainings with ZeRO beside what they held; what each raised, or ""."""
    folder = trained(version, delivery, *CASES, ranks=ranks)
    cases = [case for case, one in optimizers(folder).items() if case in universal_cases() and "Optimizer" in one]

    def make(out: Path) -> None:
        sources = [folder / case / "global_step2" for case in cases]
        errors = convert(out, *sources, version=version, delivery=delivery)
        for case in cases:
            if not errors[case]:
                (out / case / "converted").mkdir()
                for path in [path for path in (out / case).iterdir() if path.name != "converted"]:
                    path.rename(out / case / "converted" / path.name)
                (out / case / "truth.pt").symlink_to(folder / case / "truth.pt")
        (out / "errors.json").write_text(json.dumps(errors))

    made = shared.once(f"zero-universal-{version}-{delivery}-{ranks}-{len(CASES)}", make)
    return made, json.loads((made / "errors.json").read_text())


def universal_cases() -> list[str]:
    """Without ZeRO there is no such format."""
    return [case for case in CASES if not case.startswith("stage0")]


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", RELEASES)
def test_a_resume_is_exact_or_refused(
    version: str, delivery: str, record_property: Callable[[str, object], None]
) -> None:
    rows = [row for saved, ranks in ON_RANKS for row in resumes(version, delivery, saved, ranks)]
    record_property("zero", [{**row, "version": version, "delivery": delivery} for row in rows])
    for row in rows:
        refused = row["format"] == "ordinary" and row["saved"] != row["ranks"] and not row["case"].startswith("stage0")
        if refused:
            assert row["result"].startswith(f"died: {resume_table.OTHER_RANKS}"), row
        elif delivery == "hook":
            assert row["result"] == "exact", row


def resumes(version: str, delivery: str, saved: int, ranks: int) -> list[dict[str, Any]]:
    """A row for every case and format."""
    folder = trained(version, delivery, *CASES, ranks=saved)
    folders = {("ordinary", case): folder / case for case in CASES}
    died = {
        key: f"died: {optimizers(folder)[key[1]]}"
        for key, path in folders.items()
        if not path.joinpath("truth.pt").exists()
    }
    results = dict(zip(folders, resumed(version, delivery, *folders.values(), ranks=ranks), strict=True))
    made, errors = universal(version, delivery, saved)
    converted = {("universal", case): made / case for case, error in errors.items() if not error}
    found = resumed(version, delivery, *converted.values(), ranks=ranks, tag="converted")
    results.update(zip(converted, found, strict=True))
    died.update({("universal", case): f"conversion died: {error}" for case, error in errors.items() if error})
    words = {**{key: result_of(one, saved == ranks) for key, one in results.items()}, **died}
    return [
        {"case": case, "format": name, "saved": saved, "ranks": ranks, "result": words[name, case]}
        for name, cases in (("ordinary", CASES), ("universal", universal_cases()))
        for case in cases
        if (name, case) in words
    ]


def result_of(found: dict[str, Any], same_ranks: bool) -> str:
    """In words. On another number of ranks gradients round differently: there the next losses are near, not equal."""
    if "error" in found:
        return f"died: {found['error']}"
    if found["different"]:
        return f"differs: {len(found['different'])} after the load"
    if exact(found) or (not same_ranks and found["losses"] == pytest.approx(found["expected"], rel=0.02)):
        return "exact"
    return f"differs: {len(found['different_end'])} two steps later"


def test_the_page_says_what_each_case_gave() -> None:
    row = {"version": "0.18.4", "format": "ordinary", "saved": 2, "ranks": 4}
    refused = f"died: {resume_table.OTHER_RANKS} 2 but"
    results = {"stage1": ("exact", "exact"), "stage2": (refused, refused), "stage0": ("exact", "died: KeyError: 0")}
    rows = [
        {**row, "case": f"{kind}-{groups}", "delivery": delivery, "result": result}
        for kind, both in results.items()
        for groups in (1, 2)
        for delivery, result in zip(("hook", "none"), both, strict=True)
    ]
    page = resume_table.zero({"test": rows})
    assert "|  | ordinary, 2 to 4 |" in page
    assert "| bf16, stage 1 | exact |" in page
    assert "| bf16, stage 2 | refused |" in page
    assert "| bf16, without ZeRO | exact (upstream: KeyError) |" in page
    assert "| fp16, stage 3 | not run |" in page
