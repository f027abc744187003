"""SwiGLU rows mixed by torch FSDP2: the audit finds them if the files show it, and reports no other rows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, audit
from ckpt_patches.cli import main
from ckpt_patches.formats.torch_dist import COMMON
from crafted_files import names
from swiglu_checkpoints import FC1, FC2, MIXED, ONE_CHUNK, STATES, TWO_CHUNKS, saved
from torch_dist_indexes import changed_index

STATED = [None, {"use_torch_fsdp2": True}]  # arguments of the run
FSDP2 = [(1, 2), (2, 2), (1, 3), (2, 3), (1, 4)]  # tensor- and data-parallel ranks
WITH_ROWS = [f"{state}{FC1}.{of}" for state in STATES for of in ("weight", "bias")]


@pytest.mark.parametrize("arguments", STATED, ids=str)
@pytest.mark.parametrize("ranks", FSDP2, ids=str)
def test_mixed_rows_are_found(ranks: tuple[int, int], arguments: dict[str, Any] | None, tmp_path: Path) -> None:
    saved(tmp_path / "mixed", *ranks, MIXED, arguments=arguments)
    report = audit(tmp_path / "mixed")
    assert (report.verdict, names(report)) == (DAMAGED, {"mixed_rows"})
    detail = "saved by {} tensor-parallel and {} data-parallel ranks".format(*ranks)
    assert {(found.array, found.detail) for found in report.findings} == {(name, detail) for name in WITH_ROWS}


@pytest.mark.parametrize("arguments", STATED, ids=str)
@pytest.mark.parametrize("ranks", FSDP2, ids=str)
def test_rows_in_place_are_whole(ranks: tuple[int, int], arguments: dict[str, Any] | None, tmp_path: Path) -> None:
    how = TWO_CHUNKS if ranks[1] % 2 else ONE_CHUNK
    saved(tmp_path / "in-place", *ranks, how, arguments=arguments)
    report = audit(tmp_path / "in-place")
    assert (report.verdict, report.findings) == (WHOLE, ())


@pytest.mark.parametrize("arguments", [None, {"use_torch_fsdp2": False}, {}], ids=str)
@pytest.mark.parametrize("tensor_parallel", [1, 4])
def test_tensor_parallel_ranks_alone_are_whole(
    tensor_parallel: int, arguments: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Chunks of tensor-parallel ranks, one of W and one of V each, are WHOLE."""
    saved(tmp_path / "healthy", tensor_parallel, 1, TWO_CHUNKS, arguments=arguments)
    assert audit(tmp_path / "healthy").verdict == WHOLE


def test_other_shards_of_rows_are_not_taken_for_those_of_fsdp2(tmp_path: Path) -> None:
    """Rows are not mixed if the run's arguments exclude FSDP2, or an unaffected release saved them."""
    saved(tmp_path / "stated", 1, 2, MIXED, arguments={"use_torch_fsdp2": False})
    saved(tmp_path / "newer", 1, 2, MIXED)
    (common := tmp_path / "newer" / COMMON).unlink()
    assert audit(tmp_path / "stated").verdict == WHOLE
    assert "mixed_rows" not in names(audit(common.parent))


@pytest.mark.parametrize("how", [MIXED, TWO_CHUNKS])
def test_what_the_files_do_not_tell_is_unknown(how: str, tmp_path: Path) -> None:
    """An odd number of ranks in one file is UNKNOWN; with an even one, the number of chunks shows mixed rows."""
    saved(tmp_path / "three", 1, 3, how, in_one_file=True)
    report = audit(tmp_path / "three")
    assert (report.verdict, names(report)) == (UNKNOWN, {"not_judged"})
    assert {found.array for found in report.findings} == set(WITH_ROWS)
    assert "which data-parallel rank has saved which" in report.findings[0].detail
    saved(tmp_path / "four", 1, 4, MIXED, in_one_file=True)
    assert names(audit(tmp_path / "four")) == {"mixed_rows"}


@pytest.mark.parametrize(("arguments", "verdict"), [(STATED[1], UNKNOWN), (None, WHOLE)], ids=str)
def test_without_linear_fc2_it_is_unknown_where_fsdp2_is_stated(
    arguments: dict[str, Any] | None, verdict: str, tmp_path: Path
) -> None:
    saved(tmp_path / "alone", 1, 2, MIXED, arguments=arguments, without=f"{FC2}.weight")
    report = audit(tmp_path / "alone")
    assert report.verdict == verdict, report.findings
    assert all("no linear_fc2 is beside it" in found.detail for found in report.findings)


def test_an_ungated_mlp_is_whole(tmp_path: Path) -> None:
    """An MLP whose `linear_fc1` has as many rows as `linear_fc2` has columns has no mixed rows."""
    saved(tmp_path / "ungated", 1, 2, MIXED)
    with changed_index(tmp_path / "ungated") as index:
        for name in [name for name in index.state_dict_metadata if FC2 in name]:
            entry = index.state_dict_metadata[name]
            entry.size = torch.Size((*entry.size[:-1], 2 * entry.size[-1]))
    assert "mixed_rows" not in names(audit(tmp_path / "ungated"))


def test_repair_and_migrate_refuse_them_and_name_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mixed"
    saved(path, 1, 2, MIXED)
    for command, status in (("repair", 2), ("migrate", 1)):
        assert main([command, str(path), "--output", str(tmp_path / "new")]) == status
        assert "load it with the fix fsdp2_swiglu_rows on as many ranks" in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
