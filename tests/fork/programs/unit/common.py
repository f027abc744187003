"""`DistributedTest` on CPU ranks, in place of the module of this name in DeepSpeed's tests, which no release brings.

A plugin of pytest, too (`-p unit.common`): a test of such a class runs on `world_size` processes, which are forked, so
that torch and DeepSpeed are imported once. It fails with what the first rank says that fails.
"""

import multiprocessing
import multiprocessing.connection
import os
import traceback
from collections.abc import Mapping
from typing import Any

import pytest

SECONDS = 120  # for a test; a rank may wait for one that has failed otherwise


class DistributedTest:
    """Tests of several ranks: of a class, or by the mark `world_size` of a test."""

    is_dist_test = True
    world_size = 2


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not getattr(pyfuncitem.cls, "is_dist_test", False):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    mark = pyfuncitem.get_closest_marker("world_size")
    _on_ranks(pyfuncitem.obj, arguments, mark.args[0] if mark else pyfuncitem.cls.world_size)
    return True


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "world_size(ranks): of this test")


def _on_ranks(test: Any, arguments: Mapping[str, Any], ranks: int) -> None:
    from trainers.deepspeed_training import prepare
    from trainers.ranks import free_port

    prepare()
    port, context = free_port(), multiprocessing.get_context("fork")
    processes, waiting = [], []
    for rank in range(ranks):
        hears, says = context.Pipe(duplex=False)
        processes.append(context.Process(target=_rank, args=(says, rank, ranks, port, test, arguments)))
        processes[-1].start()
        says.close()
        waiting.append(hears)
    try:
        while waiting:
            ended = multiprocessing.connection.wait(waiting, SECONDS)
            errors = list(map(_heard, ended)) or [f"no rank has ended in {SECONDS} seconds"]
            for error in filter(None, errors):
                pytest.fail(error, pytrace=False)
            waiting = [hears for hears in waiting if hears not in ended]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _heard(hears: Any) -> str:
    """What a rank says in the end: its error, or nothing."""
    try:
        return str(hears.recv())
    except EOFError:
        return "a rank ended without a word"


def _rank(says: Any, rank: int, ranks: int, port: int, test: Any, arguments: Mapping[str, Any]) -> None:
    import deepspeed
    import torch

    of_the_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in of_the_rank.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    error = ""
    try:
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        test(**arguments)
    except BaseException:
        error = f"rank {rank}: {traceback.format_exc()}"
    says.send(error)
    if not error:
        torch.distributed.barrier()
    os._exit(0)  # Gloo and DeepSpeed leave threads behind
