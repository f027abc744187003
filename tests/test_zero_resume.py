"""A resume at any ZeRO stage is exact, from an ordinary and from a universal checkpoint, or it is refused.

What the runs find is the table of DeepSpeed in docs/resume.md.
"""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import resume_table
import shared
import zero_checkpoints
from recorded_results import read
from upstream import all_releases, numbers, runnable
from zero_checkpoints import convert
from zero_resumes import exact, optimizers, resumed, trained

# All are on the page. The default run has the newest alone, and few of its cases.
ALL_RELEASES = runnable("deepspeed")
RELEASES = ALL_RELEASES if all_releases() else ALL_RELEASES[:1]
DELIVERIES = ["none", "hook"] if all_releases() else ["hook"]
CASES = [f"{kind}-{groups}" for kind in resume_table.KINDS for groups in (1, 2)]
if not all_releases():
    CASES = ["stage1-2", "stage3-2"]


@dataclass(frozen=True)
class Layout:
    """On how many ranks a run saves, and another one resumes; both on so many nodes, which LOCAL_RANK tells apart."""

    saved: int
    ranks: int
    nodes: int = 1


FORMATS = ("ordinary", "universal")
ALL_LAYOUTS = [Layout(2, 2), Layout(4, 2), Layout(2, 4), Layout(4, 4, nodes=2)]
LAYOUTS = ALL_LAYOUTS if all_releases() else [Layout(2, 2), Layout(2, 4)]
KEYS = ("case", "format", "saved", "ranks", "nodes", "delivery")


@functools.cache
def universal(version: str, delivery: str, ranks: int, nodes: int) -> tuple[Path, dict[str, str]]:
    """A folder with the universal checkpoints of trainings with ZeRO beside what they held; what each raised, or ""."""
    folder = trained(version, delivery, *CASES, ranks=ranks, nodes=nodes)
    cases = [case for case in universal_cases() if (folder / case / "truth.pt").exists()]

    def make(out: Path) -> None:
        sources = [with_layers(version, folder / case, out / "sources" / case) / "global_step2" for case in cases]
        errors = convert(out, *sources, version=version, delivery=delivery)
        for case in cases:
            if not errors[case]:
                (out / case / "converted").mkdir()
                for path in [path for path in (out / case).iterdir() if path.name != "converted"]:
                    path.rename(out / case / "converted" / path.name)
                (out / case / "truth.pt").symlink_to(folder / case / "truth.pt")
        (out / "errors.json").write_text(json.dumps(errors))

    made = shared.once(f"zero-universal-{version}-{delivery}-{ranks}-{nodes}-{len(CASES)}", make)
    return made, json.loads((made / "errors.json").read_text())


def with_layers(version: str, folder: Path, copy: Path) -> Path:
    """The checkpoint as that release's converter takes it: up to 0.13 with the files of layers that pipelines have."""
    if numbers(version) >= (0, 14):
        return folder
    shutil.copytree(folder, copy)
    zero_checkpoints.with_layers(copy / "global_step2")
    return copy


def universal_cases() -> list[str]:
    """Without ZeRO there is no such format."""
    return [case for case in CASES if not case.startswith("stage0")]


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", RELEASES)
def test_a_resume_is_exact_or_refused(
    version: str, delivery: str, record_property: Callable[[str, object], None]
) -> None:
    on = {"version": version, "delivery": delivery}
    rows = [{**row, **on} for layout in LAYOUTS for row in resumes(version, delivery, layout)]
    record_property("zero", rows)
    for row in rows:
        assert as_it_should_be(row), row


def as_it_should_be(row: dict[str, Any]) -> bool:
    """With the fixes a resume is exact, or refused where upstream resumes on as many ranks alone, or a named limit."""
    if row["delivery"] == "none" or resume_table.limit(row):
        return True
    if row["format"] == "ordinary" and row["saved"] != row["ranks"] and partitioned(row):
        return bool(row["result"].startswith(f"died: {resume_table.OTHER_RANKS}"))
    return bool(row["result"] == "exact")


def partitioned(row: dict[str, Any]) -> bool:
    """Whether each rank saves its part of the states: with ZeRO, and in bf16 without it where BF16_Optimizer runs."""
    kind = row["case"].rpartition("-")[0]
    return not kind.startswith("stage0") or (kind == "stage0" and numbers(row["version"]) < (0, 17, 6))


@pytest.mark.skipif(all_releases(), reason="such a run writes the record anew, and then the page")
def test_every_case_was_run_and_none_is_wrong_with_the_fixes() -> None:
    rows = [row for found in read(resume_table.ZERO).values() for row in found]
    assert [row for row in rows if not as_it_should_be(row)] == []
    kinds = [(kind, name) for kind in resume_table.KINDS for name in FORMATS[: 1 if "stage0" in kind else 2]]
    for version in {row["version"] for row in rows}:
        found = {tuple(row[key] for key in KEYS) for row in rows if row["version"] == version}
        assert found == {
            (f"{kind}-{groups}", name, *dataclasses.astuple(layout), delivery)
            for kind, name in kinds
            for groups in (1, 2)
            for layout in ALL_LAYOUTS
            for delivery in ("none", "hook")
        }
    assert {row["version"] for row in rows} == set(ALL_RELEASES)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_weight_that_is_wrong_on_one_rank_alone_is_found(rank: int) -> None:
    folder = trained(RELEASES[0], "hook", *CASES) / "stage1-2"
    (found,) = resumed(RELEASES[0], "hook", folder, spoil=rank)
    assert found["different"] == ["scale.weight"]
    assert not exact(found)


def resumes(version: str, delivery: str, layout: Layout) -> list[dict[str, Any]]:
    """A row for every case and format."""
    folder = trained(version, delivery, *CASES, ranks=layout.saved, nodes=layout.nodes)
    on: dict[str, Any] = {"ranks": layout.ranks, "nodes": layout.nodes}
    untrained = {case: error for case, error in optimizers(folder).items() if not (folder / case / "truth.pt").exists()}
    folders = {("ordinary", case): folder / case for case in CASES if case not in untrained}
    results = dict(zip(folders, resumed(version, delivery, *folders.values(), **on), strict=True))
    made, errors = universal(version, delivery, layout.saved, layout.nodes)
    converted = {("universal", case): made / case for case, error in errors.items() if not error}
    if converted:
        found = resumed(version, delivery, *converted.values(), **on, tag="converted")
        results.update(zip(converted, found, strict=True))
    died = {("universal", case): f"conversion died: {error}" for case, error in errors.items() if error}
    died.update({(name, case): f"training died: {untrained[case]}" for name in FORMATS for case in untrained})
    same_ranks = layout.saved == layout.ranks
    words = {**{key: result_of(one, same_ranks) for key, one in results.items()}, **died}
    words = {key: word.replace(str(shared.folder()), "") for key, word in words.items()}  # of this run alone
    return [
        {"case": case, "format": name, **dataclasses.asdict(layout), "result": words[name, case]}
        for name, cases in zip(FORMATS, (CASES, universal_cases()), strict=True)
        for case in cases
        if (name, case) in words
    ]


def result_of(found: dict[str, Any], same_ranks: bool) -> str:
    """In words. On another number of ranks gradients round differently: there the next losses are near, not equal."""
    if "error" in found:
        return f"{'died' if found.get('different') != [] else 'training died'}: {found['error']}"
    if found["different"]:
        settings = all(name.startswith("group ") for name in found["different"])
        if settings and result_of({**found, "different": []}, same_ranks) == "exact":
            return f"differs in settings: {', '.join(found['different'])}"
        return f"differs: {len(found['different'])} after the load"
    if exact(found) or (not same_ranks and found["losses"] == pytest.approx(found["expected"], rel=0.02)):
        return "exact"
    return f"differs: {len(found['different_end'])} two steps later"


@pytest.mark.parametrize(
    ("different", "end", "result"),
    [
        ([], [], "exact"),
        ([], ["steps"], "differs: 1 two steps later"),
        (["group 0", "group 1"], [], "differs in settings: group 0, group 1"),
        (["group 0"], ["steps"], "differs: 1 after the load"),
        (["group 0", "steps"], [], "differs: 2 after the load"),
        (["w1.fp32"], ["w1.fp32"], "differs: 1 after the load"),
    ],
)
def test_what_came_of_a_resume_in_words(different: list[str], end: list[str], result: str) -> None:
    found = {"different": different, "different_end": end, "losses": [1.0], "expected": [1.0]}
    assert result_of(found, same_ranks=True) == result


def page_row(**found: object) -> dict[str, Any]:
    row = {"version": "0.18.4", "format": "ordinary", "saved": 2, "ranks": 4, "nodes": 1, "delivery": "hook"}
    return {**row, **found}


def test_the_page_has_what_each_case_gave() -> None:
    refused = f"died: {resume_table.OTHER_RANKS} 2 but"
    results = {"stage1": ("exact", "exact"), "stage2": (refused, refused), "stage0": ("exact", "died: KeyError: 0")}
    rows = [
        page_row(case=f"{kind}-{groups}", delivery=delivery, result=result)
        for kind, both in results.items()
        for groups in (1, 2)
        for delivery, result in zip(("hook", "none"), both, strict=True)
    ]
    blocks = resume_table.zero({"test": rows})
    assert blocks["deepspeed"].splitlines() == [
        "**With the fixes**, 0.18.4: exact, except",
        "",
        "- *refused*: bf16 stage 2: 0.18.4",
    ]
    assert blocks["deepspeed without"].splitlines() == [
        "| training | ordinary, other ranks |",
        "|---|---|",
        "| bf16 without ZeRO | KeyError |",
        "| bf16 stage 1 | exact |",
        "| bf16 stage 2 | refused |",
    ]


@pytest.mark.parametrize(
    ("result", "word"),
    [
        ("differs: 3 after the load", "differs"),
        ("differs in settings: group 0", "differs"),
        ("died: KeyError: 0", "KeyError"),
        ("training died: KeyError: 0", "KeyError (training)"),
        ("conversion died: KeyError: 0", "KeyError (conversion)"),
    ],
)
def test_the_page_shows_what_is_wrong_with_the_fixes(result: str, word: str) -> None:
    exceptions = resume_table.zero({"test": [page_row(case="stage1-1", result=result)]})["deepspeed"]
    assert f"- **{word}**: bf16 stage 1: 0.18.4" in exceptions.splitlines()


def test_the_page_names_a_limit_of_upstream_and_its_releases() -> None:
    crash = "training died: IndexError: list index out of range"
    rows = [page_row(case="stage1-2", result=crash, version=version) for version in ("0.17.5", "0.17.6", "0.18.3")]
    assert [bool(resume_table.limit(row)) for row in rows] == [False, True, False]
    assert resume_table.zero({"test": rows})["deepspeed"].splitlines()[2:] == [
        "- **IndexError (training)**: bf16 stage 1: 0.17.5, 0.18.3",
        "- *no step*: bf16 stage 1: 0.17.6",
    ]
    page = resume_table.PAGE.read_text(encoding="utf-8")
    assert all(f"- *{limit.word}*: " in page for limit in resume_table.LIMITS)


@pytest.mark.parametrize("result", ["differs: 3 after the load", "differs in settings: group 0"])
def test_nothing_that_differs_after_a_load_is_taken_for_a_limit(result: str) -> None:
    rows = [
        page_row(case=f"{kind}-2", result=result, version=version, format=name)
        for kind in resume_table.KINDS
        for version in ALL_RELEASES
        for name in FORMATS
    ]
    assert not any(resume_table.limit(row) for row in rows)
