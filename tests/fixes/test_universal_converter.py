"""universal_converter: where DeepSpeed's converter is called, ours writes the files, unless a switch says otherwise."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import universal
import upstream
from trainers.lazy import dt
from upstream import TIMEOUT, affected, in_place, run, run_json, tree, with_fix, without_fix
from zero_checkpoints import PERMISSIVE, convert, converted, crafted, differences, element_counts, losses, trained

VERSIONS = ("0.15.4", "0.16.9", "0.17.6", "0.18.9", "0.19.8")
WRITERS = {"0.17.6": "0.16.9"}  # 0.17.6 itself raises IndexError in a training where ranks are without parameters
SKIP = {"CKPT_PATCHES_SKIP": "universal_converter"}
OURS = "converts in place of DeepSpeed's converter, which CKPT_PATCHES_SKIP=universal_converter runs"
BEGIN, UPSTREAMS = "Convert DeepSpeed Checkpoint to Universal Checkpoint", "*** 2. Merging slices"
# By how the converter is called, how it comes to ours. What is `__main__` by its path is not edited by the hook.
CALLS = {"module": "hook", "script": "in place", "imported": "hook"}


@pytest.fixture
def checkpoint(version: str) -> Path:
    """A checkpoint of a real training with ZeRO-2 on 8 ranks."""
    return trained(WRITERS.get(version, version), "stage2")["stage2"]


def called(
    how: str,
    version: str,
    source: Path,
    output: Path,
    *options: str,
    delivery: str = "",
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Call DeepSpeed's converter, of a tree that is edited by the hook, or in place and then without a hook's help."""
    root, delivery = tree("deepspeed", version), delivery or CALLS[how]
    env = PERMISSIVE if delivery == "none" else {"CKPT_PATCHES": "warn", **(env or {})}
    if how == "imported":
        folders = (source, "--output", output.parent)
        return run("convert", *folders, "--handed-over", tree=root, delivery=delivery, env=env)
    arguments: tuple[str | Path, ...] = ("--input_folder", source, "--output_folder", output, *options)
    return run("converter_as", how, *arguments, tree=root, delivery=delivery, env=env, check=False)


@without_fix(affected("universal_converter"))
def test_upstreams_converter_writes_the_files(version: str, delivery: str, checkpoint: Path, tmp_path: Path) -> None:
    """They can fail at this checkpoint by other bugs, such as that of universal_tensor_paddings."""
    done = called("module", version, checkpoint, tmp_path / "stage2", delivery=delivery)
    assert (BEGIN in done.stdout, OURS in done.stderr) == (True, False)


@with_fix(affected("universal_converter"))
def test_ours_writes_the_files_and_says_so(version: str, delivery: str, checkpoint: Path, tmp_path: Path) -> None:
    done = called("module", version, checkpoint, tmp_path / "stage2", delivery=delivery)
    assert done.returncode == 0, done.stderr
    assert (BEGIN in done.stdout, OURS in done.stderr) == (False, True)
    assert differences(converted(tmp_path / "stage2"), checkpoint) == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("how", CALLS)
def test_ours_writes_the_same_files_as_its_command(how: str, version: str, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "called" / checkpoint.parent.name
    done = called(how, version, checkpoint, output)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(OURS) == 1
    assert UPSTREAMS not in done.stdout
    universal.ours(checkpoint, tmp_path / "command" / checkpoint.parent.name, version=version)
    assert universal.files(tmp_path / "called") == universal.files(tmp_path / "command")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("switch", [SKIP, {"CKPT_PATCHES": "off"}], ids=["skipped", "off"])
@pytest.mark.parametrize("how", ["script", "imported in place"])
def test_switches_are_read_when_main_starts(
    how: str, switch: dict[str, str], version: str, checkpoint: Path, tmp_path: Path
) -> None:
    """Also in a tree that was edited before: upstream's text writes what it wrote."""
    output, root = tmp_path / "upstream" / "stage2", tree("deepspeed", version)
    if how == "script":
        done = called(how, version, checkpoint, output, env=switch)
    else:
        arguments = (checkpoint, "--output", output.parent, "--handed-over")
        done = run("convert", *arguments, tree=root, delivery="in place", env={"CKPT_PATCHES": "warn", **switch})
    assert done.returncode == 0, done.stderr
    assert OURS not in done.stderr
    assert UPSTREAMS in done.stdout
    universal.ours(checkpoint, tmp_path / "ours" / "stage2", version=version)
    found = universal.differences([(output, tmp_path / "ours" / "stage2")], version)
    assert list(found.values()) == [[]]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_hook_skips_it(version: str, checkpoint: Path, tmp_path: Path) -> None:
    done = called("module", version, checkpoint, tmp_path / "stage2", env=SKIP)
    assert done.returncode == 0, done.stderr
    assert OURS not in done.stderr
    assert UPSTREAMS in done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_upstreams_runs_where_this_package_was_removed(version: str, checkpoint: Path, tmp_path: Path) -> None:
    """Python reads no .pth file here, which is what an uninstall takes away; torch's folder is named."""
    root = in_place(tree("deepspeed", version))
    script = root / "deepspeed" / "checkpoint" / "ds_to_universal.py"
    arguments = ["--input_folder", str(checkpoint), "--output_folder", str(tmp_path / "stage2")]
    path = os.pathsep.join(map(str, (root, Path(torch.__file__).parents[1])))
    done = subprocess.run(
        [sys.executable, "-S", script, *arguments],
        env={**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    line = "ckpt-patches: DeepSpeed's own converter runs; ours cannot be imported: No module named 'ckpt_patches'"
    assert done.stderr.splitlines().count(line) == 1
    assert UPSTREAMS in done.stdout
    assert (tmp_path / "stage2" / "zero" / "w1.weight" / "fp32.pt").exists()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_error_is_the_callers(version: str, checkpoint: Path, tmp_path: Path) -> None:
    """No fall back to upstream's text: a program ends with one line and 2, and a caller of `main` gets an exception."""
    (tmp_path / "stage2").mkdir()
    (tmp_path / "stage2" / "other").touch()
    message = f"{tmp_path / 'stage2'} exists; name another output folder, or remove it"
    for how in ("module", "script"):
        done = called(how, version, checkpoint, tmp_path / "stage2")
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == f"ds_to_universal: {message}"
        assert UPSTREAMS not in done.stdout
    arguments = (checkpoint, "--output", tmp_path, "--handed-over")
    found = run_json("convert", *arguments, tree=tree("deepspeed", version), delivery="hook")
    assert found == {"stage2": f"UserError: {message}"}
    assert universal.files(tmp_path) == {"stage2/other": b""}


# What only upstream's converter gets wrong

# On 8 ranks: of w1.weight's 9 elements ranks 0 to 3 hold 2 each and rank 4 the last; ranks 5, 6, 7 write 1, 2, 2 more.
WITH_PADDING = {"w1.weight": 14, "w1.bias": 7, "ln.weight": 7, "ln.bias": 7, "w2.weight": 7, "w2.bias": 7, "scale": 7}


@pytest.mark.parametrize("delivery", ["none", "hook", "in place"])
@pytest.mark.parametrize("version", ["0.15.4", "0.19.2"])
def test_padding_of_zero_3_is_no_data(version: str, delivery: str, tmp_path: Path) -> None:
    """Up to 0.19.2 upstream silently counts the ranks past a parameter's end as if they held elements of it."""
    source = trained("0.16.2", "stage3")["stage3"]
    assert convert(tmp_path, source, version=version, delivery=delivery) == {"stage3": ""}
    found = converted(tmp_path / "stage3")
    if delivery == "none":
        assert element_counts(found) == WITH_PADDING
    else:
        assert differences(found, source) == []


@pytest.mark.parametrize("delivery", ["none", "hook"])
def test_zero_3_resumes_on_another_number_of_ranks(delivery: str, tmp_path: Path) -> None:
    """4 ranks resume what 8 saved. DeepSpeed splits tensors by their stored length."""
    source, root = trained("0.16.2", "stage3")["stage3"], tree("deepspeed", "0.16.2")
    assert convert(tmp_path, source, version="0.16.2", delivery=delivery) == {"stage3": ""}
    arguments = ("resume", source.parent, "--tag", tmp_path / "stage3", "--ranks", "4")
    resumed = run_json("zero_resuming", *arguments, tree=root, delivery=delivery)[str(source.parent)]
    if delivery == "none":
        assert "RuntimeError: The size of tensor a (9) must match the size of tensor b (16)" in resumed["error"]
        return
    assert resumed["different"] == []
    assert resumed["losses"] == pytest.approx(losses(source), rel=0.01)  # bf16 has a precision of 8 bits


@pytest.mark.parametrize("delivery", ["none", "hook", "in place"])
@pytest.mark.parametrize("version", ["0.15.4", "0.19.3"])
def test_slices_of_tensor_parallel_ranks_at_zero_3(version: str, delivery: str, tmp_path: Path) -> None:
    """Up to 0.19.3 upstream silently takes the ranks' slices for partitions of one slice."""
    source = tmp_path / "slices" / "global_step2"
    on: dict[str, Any] = {"version": version, "delivery": "none", "folder": source.parent, "env": PERMISSIVE}
    slices = torch.tensor(upstream.called(__file__, "slices", **on))
    assert convert(tmp_path / "made", source, version=version, delivery=delivery) == {"slices": ""}
    found = converted(tmp_path / "made" / "slices")["weight"]["fp32"]
    assert found.flatten().equal(slices.flatten()) is (delivery != "none")


def test_upstreams_options_are_accepted(tmp_path: Path) -> None:
    """Those of no meaning say nothing. `--no_strict` and `--inject_missing_state` mean what they mean there."""
    source, options = crafted("megatron"), ("--num_extract_workers", "3", "--num_merge_workers", "3")
    done = called("module", VERSIONS[-1], source, tmp_path / "all", *options, "--keep_temp_folder")
    assert done.returncode == 0, done.stderr
    universal.ours(source, tmp_path / "command" / "all")
    assert universal.files(tmp_path / "all") == universal.files(tmp_path / "command" / "all")
    bare = universal_info_removed(source, tmp_path / "bare")
    refused = called("module", VERSIONS[-1], bare, tmp_path / "refused")
    assert "has no universal_checkpoint_info" in refused.stderr
    injected = called("module", VERSIONS[-1], bare, tmp_path / "injected", "--inject_missing_state")
    assert "has no universal_checkpoint_info" not in injected.stderr


def universal_info_removed(source: Path, to: Path) -> Path:
    """A copy of a checkpoint whose training program put in no universal_checkpoint_info."""
    shutil.copytree(source, to)
    for path in to.glob("mp_rank_*_model_states.pt"):
        universal.changed(path, lambda state: state.pop("universal_checkpoint_info"))
    return to


# What the ranks run

SLICES = 2


def slices(folder: Path) -> list[list[float]]:
    """Train and save at ZeRO-3 on two tensor-parallel ranks. Returns each one's slice of the weight in memory."""
    return dt.results(save_slice, SLICES, folder)


def save_slice(rank: int, folder: Path) -> list[float]:
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    torch.manual_seed(rank)
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=SLICES, num_dp=1)
    run: Any = deepspeed.initialize(
        model=(model := torch.nn.Linear(dt.HIDDEN, 2, bias=False)),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config=dt.config(1, False, dt.BF16, dt.zero(3)),
        mpu=PipelineParallelGrid(topology=topology),
    )[0]
    run.backward(run(torch.ones(1, dt.HIDDEN, dtype=torch.bfloat16)).float().pow(2).mean())
    run.step()
    dt.save(run, folder)
    values: list[float] = run.optimizer.fp32_partitioned_groups_flat[0].tolist()
    return values
