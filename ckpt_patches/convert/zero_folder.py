"""Whether a checkpoint folder is one to convert: of one training, with the files of all ranks."""

import re
from collections.abc import Iterable
from pathlib import Path

from ckpt_patches.errors import UserError
from ckpt_patches.formats import zero
from ckpt_patches.formats.zero import Folder

UPSTREAM = "convert it with DeepSpeed's own converter: python -m deepspeed.checkpoint.ds_to_universal"


def look(path: Path) -> Folder:
    """What lies in the folder.

    Raises:
        UserError: it is no ZeRO checkpoint, or its experts are without a ZeRO optimizer.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; name the one with the files of the ranks, like OUT/global_step10")
    folder = zero.look(path)
    if not folder.optimizer and folder.experts:
        raise UserError(
            f"{path} has files of experts ({folder.experts[0]}) and none of a ZeRO optimizer, which a universal "
            "checkpoint is made of"
        )
    if not folder.optimizer:
        raise UserError(f"{path} has no file like bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt: no ZeRO checkpoint")
    if len(folder.prefixes) > 1:
        found = " and ".join(sorted(folder.prefixes))
        raise UserError(f"{path} has files of two trainings, {found}: keep those of one")
    return folder


def check_complete(folder: Folder, found: Iterable[tuple[int, int]], dp_degree: int, mp_degree: int, like: str) -> None:
    """Every rank has its file, and there is none of a rank that was not.

    Raises:
        UserError: it names the first rank without, or one too many.
    """
    found = set(found)
    expected = {(dp, mp) for dp in range(dp_degree) for mp in range(mp_degree)}
    for (dp, mp), what in (
        *((rank, "is missing") for rank in sorted(expected - found)),
        *((rank, "does not belong here") for rank in sorted(found - expected)),
    ):
        name = _renamed(like, dp, mp)
        more = max(len(expected - found), len(found - expected)) - 1
        others = f", and {more} more" if more > 0 else ""
        raise UserError(
            f"{folder.path / name} {what}{others}: expected files of {dp_degree} data-parallel times {mp_degree} "
            "model-parallel ranks"
        )


def _renamed(name: str, dp: int, mp: int) -> str:
    return re.sub(r"pp_rank_\d+_mp_rank_\d+", f"pp_rank_{dp}_mp_rank_{mp:02d}", name)
