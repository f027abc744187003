"""`ckpt-patches explain "ERROR TEXT"` finds the fix by the error that a user sees, with any run's paths and numbers."""

import re

import pytest

from ckpt_patches.cli import symptoms
from ckpt_patches.engine.fix import load
from registered import FIXES
from small_tree import command, one_line, python
from upstream import REPOSITORY

pytestmark = pytest.mark.quick

KNOWN = {symptom.fix: symptom for symptom in symptoms.known()}
ERRORS = [pytest.param(fix, error, id=f"{fix}-{error[:40]}") for fix in KNOWN for error in KNOWN[fix].errors]


def found(text: str) -> list[str]:
    return [match.fix for match in symptoms.search(text)]


@pytest.mark.parametrize("name", FIXES)
def test_a_fix_is_found_by_its_symptom(name: str) -> None:
    assert name in found(load(name).symptom)


def of_another_run(error: str) -> str:
    """The error with other numbers, folders and quotes, after a rank and a traceback."""
    text = re.sub(r"(?<=[ (\[_-])\d+(?=[ )\]._,-])", "77", error) if not error.startswith("KeyError: 0") else error
    text = re.sub(r"(?:\.\.\.|…)/", "/scratch/someone/", text)
    frames = '[rank3]:   File "/opt/venv/lib/python3.12/site-packages/train.py", line 77, in <module>\n    main()\n'
    return f"Traceback (most recent call last):\n{frames}[rank3]: {text.replace('…', 'worker')}\n"


@pytest.mark.parametrize(("fix", "error"), ERRORS)
def test_a_fix_is_found_by_each_error_text_of_its_page(fix: str, error: str) -> None:
    assert fix in found(error)
    assert fix in found(of_another_run(error))


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("KeyError: 'step'", "torch_adam_step"),
        ("AttributeError: `np.product` was removed; module 'numpy' has no attribute 'product'", "numpy2_product"),
        ("TypeError: 'NoneType' object is not subscriptable", "dp_zero_instances"),
        ("[rank0]: RuntimeError: narrow(): length must be non-negative.", "universal_tensor_paddings"),
        ("experts draw the same random numbers", "expert_rng"),
        ("training hangs in an asynchronous save", "async_dead_worker"),
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


def test_the_command_lists_the_fixes_with_their_symptoms() -> None:
    done = command("explain", "KeyError: 'exp_avg'")
    assert (done.returncode, done.stderr) == (0, "")
    for fix in ("dp_zero_empty_state", "universal_optimizer_states"):
        assert load(fix).symptom in done.stdout
    assert done.stdout.splitlines()[-1].startswith("ckpt-patches explain ")
    assert command("explain", "KeyError:", "'exp_avg'").stdout == done.stdout


def test_the_command_exits_with_1_if_no_fix_is_found() -> None:
    done = command("explain", "KeyError: 'foo'")
    assert done.returncode == 1
    assert done.stderr == ("ckpt-patches: no fix has a symptom with these words; ckpt-patches list has all symptoms\n")


def test_one_word_is_the_name_of_a_page() -> None:
    assert one_line(command("explain", "steps")) == "ckpt-patches: no page steps; ckpt-patches explain has all names"


def test_a_log_from_standard_input() -> None:
    code = (
        "import io, sys; sys.stdin = io.StringIO('step 1\\n' * 5000 + \"[rank0]: KeyError: 'step'\\n\")\n"
        "from ckpt_patches.cli import main\nmain(['explain', '-'])\n"
        "assert not {'torch', 'numpy', 'megatron', 'deepspeed'} & sys.modules.keys()\n"
    )
    done = python("-c", code, tree=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "torch_adam_step" in done.stdout
