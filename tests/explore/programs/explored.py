"""Shared code of the explorer's programs: it starts ranks, reports failures and hangs, and compares states."""

import argparse
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from trainers.judge import Part, State
from trainers.ranks import free_port, patience

Options = dict[str, Any]
Work = Callable[[int], Options]  # takes a rank and returns its result for JSON
Join = Callable[[int, int, int], None]  # takes rank, ranks and port, and joins the process group
FIRST, LAST = "first", "last"


class SaveFailed(Exception):
    """A save failed in a run that trains."""


def spoil(parts: Iterable[Part], what: str) -> None:
    """Change one element on the last rank, or make that rank wait forever, to test the judge."""
    if dist.get_rank() == dist.get_world_size() - 1:
        if what == "hang":
            time.sleep(10**6)
        next(part for part in parts if part.name.endswith(what)).local.view(-1)[0] += 1


# The damage to a tensor during a save: one element changes, or half of the elements are lost.
WHILE_SAVED: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "altered": lambda flat, number: flat[number % flat.numel()].add_(1),
    "zeros": lambda flat, _: flat[flat.numel() // 2 :].zero_(),
    "NaN": lambda flat, _: flat[flat.numel() // 2 :].fill_(torch.nan),
}


def saver(case: Options, tag: str, rank: int) -> Callable[..., None]:
    """Return the `torch.save` of a tag. If the case has such damage, it changes a tensor in one call on one rank."""
    save: Callable[..., None] = torch.save
    calls, wanted = itertools.count(), case["load"]
    number, ranks = wanted["file"], case["ranks"]
    if wanted["damage"] not in WHILE_SAVED or wanted["tag"] != tag:
        return save

    def save_changed(obj: Any, *args: Any, **keywords: Any) -> None:
        if (next(calls), rank) == divmod(number, ranks):
            leaves, structure = tree_flatten(obj)
            held = [at for at, one in enumerate(leaves) if isinstance(one, torch.Tensor) and one.is_floating_point()]
            for at in [at for at in held if leaves[at].numel()][number % 3 :][:1]:
                leaves[at] = leaves[at].detach().clone()  # the run's own tensor stays unchanged
                WHILE_SAVED[wanted["damage"]](leaves[at].view(-1), number)
            obj = tree_unflatten(leaves, structure)
        save(obj, *args, **keywords)

    return save_changed


def unrepaired(different: list[str], found: State, truth: State, case: Options) -> list[str]:
    """Return the differences from the truth that `repair` does not explain.

    It takes main parameters from weights. It takes moments from an older checkpoint or resets them.
    """
    saved, older = truth[case["load"]["tag"]]["saved"], truth[FIRST]["saved"]

    def is_repaired(name: str) -> bool:
        parameter, _, what = name.rpartition(".")
        if not parameter or what == "weight" or not isinstance(found.get(name), torch.Tensor):
            return False
        weight = saved.get(f"{parameter}.weight")
        others = [weight] if what in ("fp32", "copy") else [torch.zeros(()), older.get(name)]
        own = found[name]
        good = own == saved[name]
        for other in [other for other in others if other is not None]:
            good |= own == other.to(own.dtype)
        return bool(good.all())

    return [name for name in different if not is_repaired(name)]


@contextlib.contextmanager
def proof() -> Iterator[list[str]]:
    """Collect the log lines of rank 0 in which fingerprints report on the loads in this block."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("ckpt_patches")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def arguments(*commands: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=commands)
    parser.add_argument("case", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", type=int, nargs="+", help="ranks; another process starts the others")
    parser.add_argument("--port", type=int, default=free_port())
    parser.add_argument("--told", default="", help="folder of what the ranks of both processes have found")
    return parser


def on_ranks(work: Work, args: argparse.Namespace, ranks: int, join: Join, *, killed: bool = False) -> Options:
    """Return the first rank's result, or the cause if ranks failed. Kill the ranks that wait for a failed rank.

    `killed`: one of the ranks kills itself.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        told = Path(args.told or folder)
        started = args.only or range(ranks)
        processes = [context.Process(target=_rank, args=(n, ranks, args.port, told, work, join)) for n in started]
        for process in processes:
            process.start()
        if _hang(processes, told):
            return {"hangs": True}
        found = _told(told)
    if killed and -signal.SIGKILL in [process.exitcode for process in processes]:
        return {"killed": True}
    errors = [one for one in found if "error" in one]
    if not errors and any(process.exitcode for process in processes):
        return {"error": f"exit statuses {[process.exitcode for process in processes]}"}
    causes = [one for one in errors if "gloo/transport" not in one["error"]]  # skip ranks that lost their peer
    return dict([*causes, *errors, *found][0])


def _rank(rank: int, ranks: int, port: int, told: Path, work: Work, join: Join) -> None:
    """Run the work and write the result to the rank's file."""
    join(rank, ranks, port)
    try:
        found = work(rank)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        found = {"error": f"{type(error).__name__}: {error}"[:1000]}
    Path(told, f"{rank}.part").write_text(json.dumps(found))
    Path(told, f"{rank}.part").rename(Path(told, str(rank)))
    if "error" not in found:
        dist.barrier()
    os._exit("error" in found)  # a normal exit waits for Gloo's threads and a writer's process


def _told(folder: Path) -> list[Options]:
    """Return the results that ranks have written so far."""
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir()) if path.suffix != ".part"]


def _hang(processes: list[Any], told: Path) -> bool:
    """Wait for the ranks, and return whether they hang. If one fails, the others must end soon, or this kills them."""
    limit, failed = time.monotonic() + patience(60), float("inf")
    while any(process.is_alive() for process in processes):
        time.sleep(0.01)
        if any(process.exitcode for process in processes) or any("error" in one for one in _told(told)):
            failed = min(failed, time.monotonic())
        if time.monotonic() > min(limit, failed + patience(1)):
            for process in processes:
                process.kill()
                process.join()
            return failed == float("inf")
    return False
