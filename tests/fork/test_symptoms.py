"""`ckpt-patches explain TEXT` finds the page for what a user sees, with any run's paths and numbers."""

import importlib
import json
import pickle
import re
from pathlib import Path

import pytest

from ckpt_patches.cli import symptoms
from ckpt_patches.engine.fix import load
from ckpt_patches.formats import damages
from registered import FIXES
from small_tree import command, one_line, python
from upstream import REPOSITORY

pytestmark = pytest.mark.quick

KNOWN = {page.name: page for page in symptoms.known()}
ERRORS = [pytest.param(name, error, id=f"{name}-{error[:40]}") for name in KNOWN for error in KNOWN[name].errors]


def found(text: str) -> list[str]:
    return [answer.name for answer in symptoms.search(text)]


@pytest.mark.parametrize("name", FIXES)
def test_a_fix_is_found_by_its_symptom(name: str) -> None:
    assert name in found(load(name).symptom)


def of_another_run(error: str) -> str:
    """The error with other numbers, folders and quotes, after a rank and a traceback."""
    text = re.sub(r"(?<=[ (\[_-])\d+(?=[ )\]._,-])", "77", error) if not error.startswith("KeyError: 0") else error
    text = re.sub(r"(?:\.\.\.|…)/", "/scratch/someone/", text)
    frames = '[rank3]:   File "/opt/venv/lib/python3.12/site-packages/train.py", line 77, in <module>\n    main()\n'
    return f"Traceback (most recent call last):\n{frames}[rank3]: {text.replace('…', 'worker')}\n"


@pytest.mark.parametrize(("name", "error"), ERRORS)
def test_a_page_is_found_by_each_of_its_error_texts(name: str, error: str) -> None:
    assert name in found(error)
    assert name in found(of_another_run(error))


def test_the_tools_pages_have_error_texts() -> None:
    topics = {page.name for page in KNOWN.values() if page.is_topic and page.errors}
    assert topics == {"audit", "ds_to_universal", "limits", "migrate"}
    assert all(not page.is_topic or answer for page in KNOWN.values() for answer in page.errors.values())


@pytest.mark.parametrize("keep", [0, 7, 100, 2000])
def test_the_error_of_torch_for_a_cut_file_leads_to_the_audit(keep: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"weight": torch.ones(1000)}, tmp_path / "model.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:keep])
    with pytest.raises((RuntimeError, EOFError, pickle.UnpicklingError)) as raised:
        torch.load(tmp_path / "cut.pt", weights_only=False)
    assert found(f"{type(raised.value).__name__}: {raised.value}")[0] == "audit"


def test_the_error_of_torch_for_a_state_that_is_not_saved_is_answered(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dcp = importlib.import_module("torch.distributed.checkpoint")
    dcp.save({"optimizer": {"state": {"used.weight.step": torch.ones(1)}}}, checkpoint_id=tmp_path / "save")
    state = {"optimizer": {"state": {name: torch.ones(1) for name in ("used.weight.step", "unused.weight.step")}}}
    with pytest.raises(dcp.api.CheckpointException, match="Missing key") as raised:
        dcp.load(state, checkpoint_id=tmp_path / "save")
    assert symptoms.search(str(raised.value))[0].why.startswith("not by this package; a parameter that had no gradient")


DP_SIZE = (
    "deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 8 but the "
    "current world size is 4. Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not "
    "currently supported."
)
ZERO_SIZE = (
    "size mismatch for base.lora_A.weight: copying a param with shape torch.Size([0]) from checkpoint, the shape in "
    "current model is torch.Size([16, 8])."
)
NO_STATE = "RuntimeError: Missing key in checkpoint state_dict: optimizer.state.unused.weight.step."


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("KeyError: 'step'", "torch_adam_step"),
        ("AttributeError: `np.product` was removed; module 'numpy' has no attribute 'product'", "numpy2_product"),
        ("TypeError: 'NoneType' object is not subscriptable", "dp_zero_instances"),
        ("[rank0]: RuntimeError: narrow(): length must be non-negative.", "universal_tensor_paddings"),
        ("experts draw the same random numbers", "expert_rng"),
        ("training hangs in an asynchronous save", "async_dead_worker"),
        ("experts count their steps from 1", "chained_group_steps"),
        # what tools answer
        (DP_SIZE, "ds_to_universal"),
        ("AssertionError: ckpt seems a bogus DeepSpeed checkpoint folder", "ds_to_universal"),
        ("Required universal_checkpoint_info state is missing in checkpoint", "ds_to_universal"),
        ("universal_checkpoint_info", "ds_to_universal"),
        ("CheckpointingException: Cannot find a default strategy for: ('load_sharded', 'zarr', 1)", "migrate"),
        ("ShardedTensor.flattened_range is not supported", "migrate"),
        ("PytorchStreamReader failed reading zip archive: failed finding central directory", "audit"),
        (f"RuntimeError: Error(s) in loading state_dict for Peft:\n\t{ZERO_SIZE}", "audit"),
        ("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", "audit"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'out/checkpoint-4/trainer_state.json'", "audit"),
        # what nothing here answers
        (NO_STATE, "limits"),
        ("RuntimeError: Missing key in checkpoint state_dict: optimizer.state.exp_avg", "limits"),
        ("KeyError: 'optimizer'", "limits"),
        ("RuntimeError: Expected 2 entries in state dict, but got 4.", "limits"),
        ("Cannot merge two lists with different lengths (4 and 2, encountered at key 'optimizer')", "limits"),
        (NO_STATE.removeprefix("RuntimeError: "), "limits"),
        ("AssertionError: dict_keys(['embedding', 'decoder'])", "limits"),
        (
            '  File "megatron/core/x.py", line 88, in _get_dp_tp_mesh\neinops.EinopsError: Error while processing',
            "limits",
        ),
        # fixes of this release
        ("Exception: Optimizer was not in train mode when step is called.", "dcp_touched_state"),
        ("KeyError: 'betas'", "dcp_empty_group"),
        ("group 2 has no 'step', and another group has", "chained_group_steps"),
        ("CheckpointingException: Invalid access pattern for ShardedTensor(key='x')", "sharding_check_on_all_ranks"),
        # words and questions
        ("overhead", "install"),
        ("what does it cost", "install"),
        ("turn one fix off", "install"),
        ("hang", "async_dead_worker"),
        ("UNKNOWN", "audit"),
        ("what does UNKNOWN mean", "audit"),
        ("security", "ds_to_universal"),
        ("untrusted checkpoints", "ds_to_universal"),
        ("pin in a Dockerfile", "container"),
        ("send the fix upstream", "patches"),
        ("which of my checkpoints can I resume from", "resume_from"),
        ("convert DP=768 ZeRO to universal", "ds_to_universal"),
        ("loss spike", "incident"),
        ("grad norm spikes", "incident"),
        ("grad norm spikes after resume", "incident"),
        ("diverge", "incident"),
        ("is my checkpoint corrupted?", "audit"),
        ("checkpoint is truncated after a crash", "incident"),
        ("loss went up after resuming", "incident"),
        ("how do I resume on fewer GPUs", "other_ranks"),
        ("PytorchStreamReader", "audit"),
        ("out of memory while saving", "limits"),
        ("OOM", "limits"),
        ("prove a resume", "fingerprint"),
        ("Hugging Face", "other_ranks"),
        ("torch 2.11 and Bridge 0.6", "compatibility"),
        ("RNG state will be ignored", "expert_rng"),
        ("how do I verify a resume", "fingerprint"),
        ("is my stack covered", "compatibility"),
        ("run it on Kubernetes", "launchers"),
        ("old Megatron checkpoint", "migrate"),
        ("lost_moment", "lost_moment"),
        ("unusual", "unusual"),
    ],
)
def test_the_best_comes_first(text: str, first: str) -> None:
    assert found(text)[0] == first


def test_several_fixes_for_one_error() -> None:
    assert {*found("KeyError: 'exp_avg'")} >= {"dp_zero_empty_state", "universal_optimizer_states"}
    assert {*found("Weights only load failed")} >= {"torch_load_weights_only", "fast_writer_load"}
    unsupported = "WeightsUnpickler error: Unsupported global: GLOBAL deepspeed.runtime.zero.config.ZeroStageEnum"
    assert {*found(unsupported)} >= {"torch_load_weights_only", "fast_writer_load"}
    assert {*found("start (4) + length (128) exceeds dimension size (100)")} >= {"zero3_universal_save"}


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity)",
        "ModuleNotFoundError: No module named 'flash_attn'",
        "KeyError: 'foo'",
        "KeyError: 12",
        "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled system error",
        "AssertionError: Torch not compiled with CUDA enabled",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.json'",
        "ValueError: optimizer got an empty parameter list",
        "how do I bake bread",
        "a\nb\n\n",
        "'' ''",
    ],
)
def test_nothing_is_found(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize("text", ["exp_avg", "KeyError", "checkpoint", "PytorchStreamReader failed"])
def test_there_are_five_answers_at_most(text: str) -> None:
    assert 1 <= len(found(text)) <= 5


def test_a_tool_comes_first_and_what_nothing_answers_last() -> None:
    assert found("PytorchStreamReader failed") == ["audit", "legacy_expert_save"]
    index = "IndexError: list index out of range"
    assert found(index) == ["universal_empty_group", "limits"]
    of_torch = f'  File "torch/distributed/checkpoint/state_dict.py", line 888, in _unflatten_optim_state_dict\n{index}'
    assert found(of_torch) == ["limits", "universal_empty_group"]


def test_an_answer_has_what_matches() -> None:
    (first, *_) = symptoms.search("[rank0]: KeyError: 'exp_avg'")
    assert first.matched == "error text: KeyError: 'exp_avg'"
    (first, *_) = symptoms.search(load("hybrid_offload_resume").symptom)
    assert first.matched == ""  # its symptom is shown


def test_an_error_of_a_fix_leads_to_its_switch() -> None:
    error = "expected remainders of main parameters, found main parameters in the checkpoint: resume with"
    first = symptoms.search(f"ValueError: {error} store_param_remainders=False")[0]
    assert first.name == "param_remainders"
    assert "CKPT_PATCHES_SKIP=param_remainders" in first.why


def test_each_kind_of_finding_is_explained() -> None:
    for kind in damages.KINDS.values():
        (answer,) = symptoms.search(kind.name)
        assert (answer.name, answer.page) == (kind.name, "findings")
        assert answer.why == f"{kind.severity}: {kind.meaning}; {kind.remedy}"


def test_the_command_lists_the_pages_each_with_a_line() -> None:
    done = command("explain", "KeyError: 'exp_avg'")
    assert (done.returncode, done.stderr) == (0, "")
    for fix in ("dp_zero_empty_state", "universal_optimizer_states"):
        assert re.search(rf"^{fix} +{re.escape(load(fix).symptom)}$", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1] == "ckpt-patches explain dp_zero_empty_state prints its page"
    assert command("explain", "KeyError:", "'exp_avg'").stdout == done.stdout
    as_json = json.loads(command("explain", "--json", "KeyError: 'exp_avg'").stdout)
    assert as_json["answers"][0]["name"] == "dp_zero_empty_state"


def test_the_command_exits_with_1_if_no_page_answers() -> None:
    done = command("explain", "KeyError: 'foo'")
    assert (done.returncode, done.stdout) == (1, "")
    text = "ckpt-patches: no page has these words: KeyError: 'foo'; ckpt-patches explain has all names\n"
    assert done.stderr == text
    close = command("explain", "dp_zero_empty_stat").stderr
    assert close == "ckpt-patches: no page has these words: dp_zero_empty_stat; did you mean dp_zero_empty_state?\n"


def test_a_name_is_read_with_either_sign() -> None:
    assert command("explain", "resume-from").stdout == command("explain", "resume_from").stdout


@pytest.mark.parametrize("name", ["to-universal", "Audit", "docs/guides/audit.md", "repair", "DP_ZERO_EMPTY_STATE"])
def test_a_page_is_known_by_other_names(name: str) -> None:
    page = {"to-universal": "ds_to_universal", "DP_ZERO_EMPTY_STATE": "dp_zero_empty_state"}.get(name, "audit")
    assert command("explain", name).stdout == command("explain", page).stdout
    assert json.loads(command("explain", "--json", name).stdout)["answers"][0]["name"] == page


def test_a_colored_error_is_found() -> None:
    assert found("\x1b[1;31mKeyError: \x1b[0m\x1b[32m'exp_avg'\x1b[0m") == found("KeyError: 'exp_avg'") != []


def test_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1\n" * 1_000_000 + "[rank0]: KeyError: 'step'\nlast line\n")
    done = command("explain", str(log))
    assert "torch_adam_step" in done.stdout
    assert done.stderr == f"ckpt-patches: {log}: its last 4.0 MiB are searched, of 6.7 MiB\n"
    log.write_bytes(b"PK\x03\x04\x00\x00")
    done = command("explain", str(log))
    assert "ckpt-patches audit" in one_line(done)
    log.unlink()
    assert one_line(command("explain", str(log))) == f"ckpt-patches: {log}: No such file or directory"


@pytest.mark.parametrize("letters", ["a", "a-", "a/", "~.", "1.", "_1", "word "])
def test_a_line_of_any_length_takes_no_long_time(letters: str) -> None:
    line = letters * (1 << 20)
    assert found(f"{line}\nKeyError: 'step'\n")[0] == "torch_adam_step"
    assert found(f"KeyError: 'step' {line}")[0] == "torch_adam_step"
    assert found(f"{line} KeyError: 'step'")[0] == "torch_adam_step"
    assert len(found(line)) <= 5


@pytest.mark.parametrize("letters", ["a", "_", "a-", "1.", "a/"])
def test_nor_do_many_long_lines(letters: str) -> None:
    """A line for each number, so that none is left out as a repetition."""
    lines = "\n".join(f"{letters * (1990 // len(letters))}x{'ab'[n % 2] * (n // 2)}" for n in range(2000))
    assert found(f"{lines}\nKeyError: 'step'\n")[0] == "torch_adam_step"


def test_a_log_from_standard_input() -> None:
    code = (
        "import io, sys; sys.stdin = io.StringIO('step 1\\n' * 5000 + \"[rank0]: KeyError: 'step'\\n\")\n"
        "from ckpt_patches.cli import main\nmain(['explain', '-'])\n"
        "assert not {'torch', 'numpy', 'megatron', 'deepspeed'} & sys.modules.keys()\n"
    )
    done = python("-c", code, tree=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "torch_adam_step" in done.stdout
