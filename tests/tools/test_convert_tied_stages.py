"""A parameter of two pipeline stages is converted if its values agree, with the real DeepSpeed."""

import functools
import re
import shutil
from pathlib import Path

import pytest
import torch

from ckpt_patches.audit.audit import WHOLE, audit
from ckpt_patches.audit.judging.record_checksums import update_checksum
from ckpt_patches.convert.convert import Options, convert
from ckpt_patches.errors import UserError
from ckpt_patches.formats import torch_file
from crafted_files import delete, with_other_value
from upstream import newest, once, run_json, tree

pytestmark = pytest.mark.slow

NEWEST = newest("deepspeed")
TIED = "tied_modules.embedding.weight"
OPTIONS = Options(workers=1)
RANKS = 4  # two stages of two data-parallel ranks


@functools.cache
def trained() -> Path:
    def write(out: Path) -> None:
        out.mkdir()
        run_json("tied_stages", "train", out, str(RANKS), tree=tree("deepspeed", NEWEST), delivery="hook")

    return once("tied-stages", write)


def test_it_converts_and_loads_on_another_number_of_ranks(tmp_path: Path) -> None:
    out = shutil.copytree(trained(), tmp_path / "out")
    assert audit(out / "global_step2").verdict == WHOLE
    convert(out / "global_step2", out / "universal", OPTIONS)

    truth = torch.load(out / "truth.pt")
    found = {f"{path.parent.name}.{path.stem}": torch.load(path) for path in (out / "universal/zero").glob("*/*.pt")}
    states = {key: value["param"] for key, value in found.items() if isinstance(value, dict)}
    assert states.keys() == truth.keys()
    assert [key for key in truth if not states[key].equal(truth[key])] == []
    assert audit(out / "universal").verdict == WHOLE
    for ranks in (2, RANKS):
        assert run_json("tied_stages", "load", out, str(ranks), tree=tree("deepspeed", NEWEST), delivery="hook") == []


@pytest.mark.parametrize("state", ["exp_avg_sq", "fp32"])
def test_stages_that_differ_are_an_error_with_both(state: str, tmp_path: Path) -> None:
    """Different values, here of the embedding's first element on the last rank, are an error with both stages."""
    folder = shutil.copytree(trained() / "global_step2", tmp_path / "global_step2")
    (path,) = folder.glob("*zero_pp_rank_1_mp_rank_01_optim_states.pt")
    own = torch_file.read(path, trust=True).value["optimizer_state_dict"]
    masters, states = own["single_partition_of_fp32_groups"], own["base_optimizer_state"]["state"]
    with path.open("r+b") as written:
        written.seek((masters[0] if state == "fp32" else states[0][state]).offset)
        written.write(b"\1\2\3\4")
    for record in audit(folder).checkpoint.records:
        update_checksum(record)
    with pytest.raises(
        UserError, match=rf"zero/{TIED}/{state}\.pt: expected .* in .*_mp_rank_00_.* and .*_mp_rank_01_"
    ):
        convert(folder, tmp_path / "universal", OPTIONS)
    assert not (tmp_path / "universal").exists()


def test_averages_of_two_stages_are_not_compared(tmp_path: Path) -> None:
    """Averages of two stages are refused: only a pattern states which is right."""
    info = {"parameter_to_average_patterns": [re.escape(TIED)]}
    folder = shutil.copytree(trained() / "global_step2", tmp_path / "global_step2")
    for path in folder.glob("mp_rank_*_model_states.pt"):
        value = torch.load(path, weights_only=False)
        value["universal_checkpoint_info"] |= info
        torch.save(value, path)
    said = f"{TIED}: expected pipeline stages to hold the same values, found averaged ones of 2 stages; no pattern of "
    with pytest.raises(UserError, match=re.escape(said)):
        convert(folder, tmp_path / "universal", OPTIONS)


def test_a_state_that_one_stage_alone_holds_is_missed(tmp_path: Path) -> None:
    folder = shutil.copytree(trained() / "global_step2", tmp_path / "global_step2")
    optimizer = ("optimizer_state_dict", "base_optimizer_state", "state")
    for path in folder.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt"):
        with_other_value(path, lambda value: delete(value, (*optimizer, 0, "exp_avg_sq")))
    with pytest.raises(UserError, match="exp_avg_sq"):
        convert(folder, tmp_path / "universal", OPTIONS)
