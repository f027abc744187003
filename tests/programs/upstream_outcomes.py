"""A pytest plugin that runs upstream's own tests on CPU ranks and writes the outcome of each test.

    python upstream_outcomes.py RANKS ARGUMENT...     pytest with these arguments, on that many ranks of megatron-core

Environment: UPSTREAM_OUTCOMES is the output file, with a line of JSON per finished test. UPSTREAM_STAND_IN=1 installs
the GPU stub for megatron-core. UPSTREAM_SECONDS limits a test: a rank may wait for a failed one.
"""

import importlib
import inspect
import json
import multiprocessing
import os
import signal
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STAND_IN = os.environ.get("UPSTREAM_STAND_IN") == "1"
if STAND_IN:
    from ckpt_patches.demo import fake_gpu

    fake_gpu.install()

SECONDS = int(os.environ.get("UPSTREAM_SECONDS", "60"))
# The imports of DeepSpeed's ranks are loaded once; the ranks are forked.
PRELOAD = os.environ.get("UPSTREAM_PRELOAD", "").split(",")
# Loaded in a Megatron process before it forks. The first collective under the GPU stub imports torch._dynamo.
IMPORTED = ("megatron.core.optimizer", "megatron.training", "torch._dynamo")
# The failed part of a test decides: setup and teardown give an error, the call a failure.
ERROR = "error"
REASON_CHARACTERS = 160
# Upstream's session downloads data sets that no test here reads, and continues if this import fails.
DOWNLOAD = "tests.test_utils.python_scripts.download_unit_tests_dataset"


class TooLong(Exception):
    """A test took longer than its limit."""


if not hasattr(typing, "override"):  # Python 3.12 has it; Megatron-LM's scripts need it
    import typing_extensions

    vars(typing)["override"] = typing_extensions.override


def pytest_configure() -> None:
    sys.modules[DOWNLOAD] = types.ModuleType(DOWNLOAD)
    vars(sys.modules[DOWNLOAD])["download_and_extract_asset"] = no_download
    signal.signal(signal.SIGALRM, too_long)
    multiprocessing.set_forkserver_preload(PRELOAD)


def no_download(**_: object) -> None:
    raise ImportError("nothing is downloaded here")


def too_long(*_: object) -> None:
    raise TooLong(f"took longer than {SECONDS} seconds")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Limit each test's time. Upstream decides what a test sees of the tests before it."""
    seen.clear()
    result = yield
    tell(item.nodeid, *outcome())
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)


seen: dict[str, tuple[str, str]] = {}  # the running test's outcomes by part: setup, call, teardown


def pytest_runtest_logreport(report: Any) -> None:
    seen[report.when] = (report.outcome, reason(report))


def pytest_collectreport(report: Any) -> None:
    """Record a file that fails to import, or is skipped."""
    if report.outcome != "passed":
        tell(report.nodeid, ERROR if report.outcome == "failed" else report.outcome, reason(report))


def outcome() -> tuple[str, str]:
    """The outcome of the complete test, and why it did not pass."""
    for when, (found, why) in seen.items():
        if found == "failed":
            return ("failed" if when == "call" else ERROR), why
        if found == "skipped":
            return found, why
    return "passed", ""


def reason(report: Any) -> str:
    """The last line of an error, or the reason of a skip."""
    if report.outcome == "passed" or not report.longrepr:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[-1])[:REASON_CHARACTERS]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    return lines[0 if crash else -1].strip()[:REASON_CHARACTERS]


def tell(test: str, found: str, why: str) -> None:
    path = Path(os.environ["UPSTREAM_OUTCOMES"])
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, "outcome": found, "reason": why}) + "\n")


def main(ranks: int, arguments: list[str]) -> None:
    """Fork the ranks after the imports, so that these happen once. The exit status of pytest is not used here."""
    for module in IMPORTED:
        importlib.import_module(module)
    import torch

    from ckpt_patches.demo import megatron_training

    megatron_training.without_transformer_engine()
    megatron_training.use_inner_optimizer("fused")
    take_local_layers()
    torch.set_num_threads(1)
    started = [start(rank, ranks, arguments) for rank in range(ranks)]
    for process in started:
        os.waitpid(process, 0)


def take_local_layers() -> None:
    """Replace Transformer Engine's layers, which need a GPU, by megatron-core's own."""
    from megatron.core.models.gpt import gpt_layer_specs

    local = gpt_layer_specs.get_gpt_layer_local_spec
    known = inspect.signature(local).parameters

    def layers(*arguments: Any, **settings: Any) -> Any:
        return local(*arguments, **{name: value for name, value in settings.items() if name in known})

    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = layers


def start(rank: int, ranks: int, arguments: list[str]) -> int:
    """Fork a rank with its own files; return its process ID."""
    if process := os.fork():
        return process
    outcomes = os.environ["UPSTREAM_OUTCOMES"]
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ["UPSTREAM_OUTCOMES"] = f"{outcomes}.{rank}"
    log = os.open(f"{outcomes}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from ckpt_patches.demo import keeper, megatron_training

    keeper.end_with_parent()
    megatron_training.fork_keeper_of_results()
    pytest.main([*arguments, "--basetemp", f"{outcomes}.folders/rank{rank}"])
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
