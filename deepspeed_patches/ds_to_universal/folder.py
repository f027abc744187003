"""Which files a checkpoint folder has, by their names; and whether one is missing."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckpt_patches.errors import UserError

# Of 16-bit training with ZeRO, of older releases, of bf16 (BF16_Optimizer writes both). Upstream takes the first found.
PREFIXES = ("zero_pp_rank_", "fp16_zero_pp_rank_", "bf16_zero_pp_rank_")
OPTIMIZER = re.compile(r"((?:fp16_|bf16_)?zero_pp_rank_)(\d+)_mp_rank_(\d+)_optim_states\.pt")
ZERO3_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
EXPERT = re.compile(r"expp_rank_.*|layer_.*_expert_.*")

UPSTREAM = "convert it with DeepSpeed's own converter: python -m deepspeed.checkpoint.ds_to_universal"


@dataclass(frozen=True)
class Folder:
    """The names in a checkpoint folder that matter."""

    path: Path
    names: tuple[str, ...]  # of all files, in natural order
    optimizer: dict[tuple[int, int], str]  # by data-parallel and model-parallel rank

    @property
    def dp_degree(self) -> int:
        return 1 + max(dp for dp, _ in self.optimizer)

    def starting_with(self, prefix: str) -> list[str]:
        return [name for name in self.names if name.startswith(prefix)]

    def zero3_models(self) -> dict[tuple[int, int], str]:
        """Stage 3: the model-states files, by data-parallel and model-parallel rank."""
        found = [(ZERO3_MODEL.fullmatch(name), name) for name in self.names]
        return {(int(match[1]), int(match[2])): name for match, name in found if match}


def look(path: Path) -> Folder:
    """What lies in the folder.

    Raises:
        UserError: it is no ZeRO checkpoint, or one of experts.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; name the one with the files of the ranks, like OUT/global_step10")
    names = sorted((entry.name for entry in path.iterdir() if entry.is_file()), key=_natural)
    experts = [name for name in names if EXPERT.fullmatch(name)]
    if experts:
        raise UserError(f"{path} has files of experts ({experts[0]}), which are not converted here; {UPSTREAM}")
    matches = [match for match in map(OPTIMIZER.fullmatch, names) if match]
    prefixes = {match[1] for match in matches}
    if not matches:
        raise UserError(f"{path} has no file like bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt: no ZeRO checkpoint")
    if len(prefixes) > 1:
        found = " and ".join(sorted(prefixes))
        raise UserError(f"{path} has files of two trainings, {found}: keep those of one")
    return Folder(path, tuple(names), {(int(match[2]), int(match[3])): match[0] for match in matches})


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


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Rank 9 before rank 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
