"""The one-pass converter writes the same output as the installed DeepSpeed's (fixed) converter."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_patches.cli import main
from ckpt_patches.convert.convert import convert
from deepspeed_patches.ds_to_universal import Options
from universal import both, changed, distinct, environment, files, ours, parallel, summary
from upstream import all_releases, newest, releases, run_json, tree
from zero_checkpoints import convert as convert_upstream
from zero_checkpoints import dp768, losses, trained

NEWEST = newest("deepspeed")
RELEASES = [pytest.param(v, id=v) for v in ("0.16.2", NEWEST)]
if all_releases():
    RELEASES = releases("deepspeed")

# Releases in between write the same. In some (0.17.6) `safe_get_full_fp32_param` returns nothing: no true values.
WRITERS = ("0.16.2", NEWEST)
# Checkpoints of stages 1 and 2, and of stage 3.
FLAT = ["bf16_optimizer", "stage2", "stage1_fp16"] + (["stage1", "stage2_fp16"] if all_releases() else [])
ZERO3 = ["stage3"] + (["stage3_fp16"] if all_releases() else [])


@pytest.mark.slow
@pytest.mark.parametrize("version", RELEASES)
def test_of_real_trainings(version: str, tmp_path: Path) -> None:
    """Every file, entry, dtype and bit equals upstream's, for both bf16 optimizers, fp16, and groups of stage 3."""
    writer = version if version in WRITERS else "0.16.2"
    kinds = [*FLAT, *([*ZERO3, "stage3_groups"] if version == NEWEST else [])]  # earlier ones may write padding as data
    checkpoints = trained(writer, *kinds)
    assert both(tmp_path, *checkpoints.values(), version=version) == {kind: [] for kind in kinds}


@pytest.mark.slow
@pytest.mark.parametrize("version", RELEASES)
def test_of_tensor_and_pipeline_parallel_models(version: str, tmp_path: Path) -> None:
    """Output equals upstream's for tied, replicated, averaged, row-parallel, vocabulary and sub-parameters."""
    cases = ["megatron", "fused"]
    if version == NEWEST:  # earlier ones mix these up, or leave out weights without optimizer state
        cases += ["megatron_fp16", "fused_counted", "fused_uneven", "zero3_uneven"]
    checkpoints = parallel(*cases)
    assert both(tmp_path, *checkpoints.values(), version=version) == {case: [] for case in cases}


@pytest.mark.slow
def test_of_the_dp768_report(tmp_path: Path) -> None:
    """Output equals upstream's with partition 348, padding 1024, hundreds of ranks per parameter; and for ZeRO-3."""
    checkpoints = dp768()
    assert both(tmp_path, *checkpoints.values(), version=NEWEST) == {"dp768": [], "dp768_stage3": []}


RESUMED = [("bf16_optimizer", 2)]
if all_releases():
    # With 4 ranks, one would own nothing of stage 1's second group, and DeepSpeed fails (`steps[0]`).
    RESUMED += [("stage1", 3), ("stage2", 2), ("stage3", 4), ("stage1_fp16", 2), ("stage3_fp16", 2)]


@pytest.mark.parametrize(("kind", "ranks"), RESUMED)
def test_deepspeed_resumes_from_it(kind: str, ranks: int, tmp_path: Path) -> None:
    """On another number of ranks, the state is the saved one, and losses are bit-equal to upstream's conversion."""
    source = trained(NEWEST, *FLAT, *ZERO3)[kind]
    assert convert_upstream(tmp_path / "upstream", source, version=NEWEST, delivery="hook") == {kind: ""}
    ours(source, tmp_path / "ours" / kind)
    resumed = {}
    for by in ("upstream", "ours"):
        arguments = ("resume", source.parent, "--tag", tmp_path / by / kind, "--ranks", str(ranks))
        found = run_json("zero_resuming", *arguments, tree=tree("deepspeed", NEWEST), delivery="hook")
        resumed[by] = found[str(source.parent)]
    assert resumed["ours"] == resumed["upstream"]
    assert resumed["ours"]["different"] == []
    assert resumed["ours"]["losses"] == pytest.approx(losses(source), rel=0.01)  # bf16 has 8 bits


# Interfaces


@pytest.fixture(scope="module")
def source() -> Path:
    return parallel("megatron")["megatron"]


def test_as_a_module_a_command_and_a_function(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {how: tmp_path / how / "universal" for how in ("module", "command", "function")}
    ours(source, folders["module"])
    command = [str(Path(sys.executable).with_name("ckpt-patches")), "to-universal", str(source), "--output"]
    folders["command"].parent.mkdir()
    done = subprocess.run(
        [*command, str(folders["command"])], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d [KMG]?i?B in \d+ files", done.stdout)
    assert done.stdout.splitlines()[1:] == [
        "values were copied and not judged: ckpt-patches audit does that",
        'to load it: "checkpoint": {"load_universal": true} and tag universal',
    ]
    found = convert(source, folders["function"], Options(workers=1))
    assert (found.files, found.files_before) == (distinct(folders["function"]), 0)
    assert files(folders["module"]) == files(folders["command"]) == files(folders["function"])
    for folder in folders.values():
        assert (folder.parent / "latest_universal").read_text() == "universal"
    assert main(["to-universal", "--input_folder", str(source), "--output_folder", str(folders["function"])]) == 2
    assert "exists" in capsys.readouterr().err


UPSTREAMS = ("--no-strict", "--inject-missing-state", "--keep-temp-folder", "--direct=on")
USAGE = {
    **{f"a --output new {option}": f"no option {option.partition('=')[0]}" for option in UPSTREAMS},
    "--output new": "expected one folder of a checkpoint, PATH",
    "a --input-folder b --output new": "expected one folder of a checkpoint, PATH",
}


@pytest.mark.parametrize("arguments", USAGE)
def test_usage(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options of upstream's converter alone are in the hand-over alone."""
    with pytest.raises(SystemExit):
        main(["to-universal", *arguments.split()])
    assert USAGE[arguments] in capsys.readouterr().err


def test_the_summary_for_programs(source: Path, tmp_path: Path) -> None:
    found = summary(source, tmp_path / "universal")
    written = files(tmp_path / "universal")
    assert found["files"] == len(written)
    assert 0 < found["bytes"] < sum(map(len, written.values()))
    assert 0 < found["plan_seconds"] < found["seconds"]
    assert found["rate"] > 0


def test_neither_torch_nor_deepspeed_is_imported(source: Path, tmp_path: Path) -> None:
    """Neither is imported: both take longer than the plan, and DeepSpeed's import runs code of other packages."""
    program = (
        "import sys; from deepspeed_patches.ds_to_universal import convert; convert(*sys.argv[1:]);"
        "print(sorted({'torch', 'deepspeed'} & sys.modules.keys()))"
    )
    arguments = [sys.executable, "-c", program, str(source), str(tmp_path / "universal")]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_universal_info_may_be_missing_where_no_parameter_is_parallel(tmp_path: Path) -> None:
    """Without it, as with Transformers and Accelerate, the output equals that of --inject_missing_state."""
    folder = without_info(trained(NEWEST, *FLAT, *ZERO3)["bf16_optimizer"], tmp_path)
    outputs = {option: tmp_path / f"universal{option}" for option in ("", "--inject_missing_state")}
    for option, output in outputs.items():
        ours(folder, output, *filter(None, [option]))
    assert files(outputs[""]) == files(outputs["--inject_missing_state"])
    name = "mp_rank_00_model_states.pt"
    assert (outputs[""] / name).read_bytes() == (folder / name).read_bytes()


def test_of_several_tensor_parallel_ranks_it_is_injected_on_demand(tmp_path: Path) -> None:
    folder = without_info(parallel("fused")["fused"], tmp_path)
    refused = ours(folder, tmp_path / "universal", check=False)
    assert refused.returncode == 2
    assert "--inject_missing_state" in refused.stderr
    ours(folder, tmp_path / "universal", "--inject_missing_state")


def without_info(source: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(source, tmp_path / "without" / source.name)
    for path in folder.glob("mp_rank_*_model_states.pt"):
        changed(path, lambda state: state.pop("universal_checkpoint_info"))
    return folder
