"""Rows of SwiGLU that torch FSDP2 has mixed are migrated to their places, and nothing else changes."""

from pathlib import Path

import pytest
import torch

from ckpt_patches.audit.audit import WHOLE, audit
from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.swiglu_rows import Grid
from ckpt_patches.formats.torch_dist import Tensor
from ckpt_patches.formats.torch_dist_reader import Chunked
from ckpt_patches.migrate import parts
from swiglu_checkpoints import FC1, FC2, MIXED, ONE_CHUNK, TWO_CHUNKS, saved
from test_audit_mixed_rows import FSDP2
from test_audit_repair import contents
from test_migrate_refusals import migrate, refused
from torch_dist_indexes import changed_index, loaded_by_torch


@pytest.mark.parametrize("numbered", [False, True], ids=["layers along an axis", "numbered layers"])
@pytest.mark.parametrize("ranks", FSDP2, ids=str)
def test_every_row_is_in_its_place(ranks: tuple[int, int], numbered: bool, tmp_path: Path) -> None:
    truth = saved(tmp_path / "old", *ranks, MIXED, numbered=numbered)
    before = contents(tmp_path / "old")
    found = loaded_by_torch(migrate(tmp_path / "old", tmp_path / "new"))
    assert contents(tmp_path / "old") == before
    assert found.keys() == truth.keys()
    assert [name for name, tensor in truth.items() if not torch.equal(found[name], tensor)] == []
    report = audit(tmp_path / "new")
    assert (report.verdict, report.findings) == (WHOLE, ())


def test_what_is_done_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "old", 1, 2, MIXED)
    migrate(tmp_path / "old", tmp_path / "new", "--dry-run")
    note = "rows of SwiGLU's W and V, which torch FSDP2 has mixed, are put in place in 6 tensors"
    assert f"note: {note}" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()
    migrate(tmp_path / "old", tmp_path / "new")
    said = capsys.readouterr()
    assert note in said.err
    assert "WHOLE" in said.out


def test_rows_in_place_need_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ranks, how in (((1, 2), ONE_CHUNK), ((1, 3), TWO_CHUNKS), ((2, 1), TWO_CHUNKS)):
        saved(tmp_path / str(ranks), *ranks, how)
        assert "needs nothing" in refused(capsys, tmp_path / str(ranks), tmp_path, status=0)
    saved(tmp_path / "mixed", 1, 2, MIXED)
    migrate(tmp_path / "mixed", tmp_path / "in place")
    assert "needs nothing" in refused(capsys, tmp_path / "in place", tmp_path, status=0)


def test_what_the_files_do_not_tell_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "three", 1, 3, MIXED, in_one_file=True)
    said = refused(capsys, tmp_path / "three", tmp_path)
    assert f"cannot tell whether rows of W and V are in place in {FC1}.weight, and nothing was written" in said
    assert "which data-parallel rank has saved which" in said
    stated = {"use_torch_fsdp2": True}
    saved(tmp_path / "alone", 1, 2, MIXED, arguments=stated, without=f"{FC2}.weight")
    assert "no linear_fc2 is beside it" in refused(capsys, tmp_path / "alone", tmp_path, "--damaged-as-is")


def test_other_damage_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "old", 1, 2, MIXED)
    with changed_index(tmp_path / "old") as index:
        one, other = (
            key for key in index.storage_data if key.fqn == f"{FC1}.bias" and key.offset[0] == 0 <= key.offset[1] < 24
        )
        index.storage_data[other] = index.storage_data[one]
    assert "foreign_file" in refused(capsys, tmp_path / "old", tmp_path, status=1)


def test_uneven_chunks_are_refused() -> None:
    rows: dict[tuple[int, ...], tuple[int, ...]] = {(0,): (1,), (1,): (2,), (3,): (2,), (5,): (1,)}
    extents = {at: Extent("", at[0], number) for at, (number,) in rows.items()}
    array = Chunked(Tensor(f"{FC1}.bias", "uint8", (6,), None, rows), extents)
    with pytest.raises(UserError, match="expected chunks of one shape, each of one layer"):
        parts.with_rows_in_place(array, Grid(1, 2))
