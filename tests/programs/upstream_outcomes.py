"""A plugin of pytest under which upstream's own tests run on CPU ranks; it writes what became of each test.

    python upstream_outcomes.py RANKS ARGUMENT...     pytest with these arguments, on that many ranks of megatron-core

In the environment, UPSTREAM_OUTCOMES names the file: a line of JSON for each test, as it ends. With UPSTREAM_STAND_IN=1
megatron-core believes in a GPU. UPSTREAM_SECONDS ends a test that takes longer: a rank may wait for one that failed.
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
# What DeepSpeed's ranks import is imported once; they are forked.
PRELOAD = os.environ.get("UPSTREAM_PRELOAD", "").split(",")
# By a Megatron process before it is forked; torch._dynamo is what the first collective under the stand-in imports.
IMPORTED = ("megatron.core.optimizer", "megatron.training", "torch._dynamo")
# The part of a test that did not pass decides: setup and teardown end in an error, the call in a failure.
ERROR = "error"
REASON_CHARACTERS = 160
# Upstream's session downloads data sets that no test here reads; it goes on where this cannot be imported.
DOWNLOAD = "tests.test_utils.python_scripts.download_unit_tests_dataset"


class TooLong(Exception):
    """A test took longer than it may."""


if not hasattr(typing, "override"):  # of Python 3.12, which Megatron-LM's scripts ask for
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
    """Each test has its seconds; what it sees of the tests before it is up to upstream."""
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


seen: dict[str, tuple[str, str]] = {}  # of the test that runs, by its part: setup, call, teardown


def pytest_runtest_logreport(report: Any) -> None:
    seen[report.when] = (report.outcome, reason(report))


def pytest_collectreport(report: Any) -> None:
    """A file that does not import, or says that it is to be left out."""
    if report.outcome != "passed":
        tell(report.nodeid, ERROR if report.outcome == "failed" else report.outcome, reason(report))


def outcome() -> tuple[str, str]:
    """Of the whole test, and why it did not pass."""
    for when, (found, why) in seen.items():
        if found == "failed":
            return ("failed" if when == "call" else ERROR), why
        if found == "skipped":
            return found, why
    return "passed", ""


def reason(report: Any) -> str:
    """The last line of an error, or what a skip says."""
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
    """The ranks are forked, so that the packages are imported once; the exit status of pytest says nothing here."""
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
    """Where a test asks for the layers of Transformer Engine, which needs a GPU, it gets megatron-core's own."""
    from megatron.core.models.gpt import gpt_layer_specs

    local = gpt_layer_specs.get_gpt_layer_local_spec
    known = inspect.signature(local).parameters

    def layers(*arguments: Any, **settings: Any) -> Any:
        return local(*arguments, **{name: value for name, value in settings.items() if name in known})

    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = layers


def start(rank: int, ranks: int, arguments: list[str]) -> int:
    """Fork a rank, with files of its own; its process."""
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
