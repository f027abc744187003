"""What the explorer's programs share: ranks whose failures and hangs are reported, and the comparison of two states."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from ckpt_patches.demo.ranks import free_port
from patience import seconds

Options = dict[str, Any]
State = dict[str, Any]
Work = Callable[[int], Options]  # of a rank; what it has found, as JSON
Join = Callable[[int, int, int], None]  # rank, ranks and port: becomes that rank of a process group
FIRST, LAST = "first", "last"


class SaveFailed(Exception):
    """Of a run that trains."""


class Part(NamedTuple):
    """What this rank holds of a tensor: `local` is a view of its memory."""

    name: str  # of the parameter, and of what it is: "weight", "fp32", or a state of the optimizer
    local: torch.Tensor  # flat
    where: torch.Tensor | int  # the indices of these elements in the whole flat tensor, or that of the first one
    numel: int  # of the whole


def of_ranks(parts: Iterable[Part]) -> list[list[Part]]:
    """The parts of every rank, copied."""
    return gathered([part._replace(local=part.local.detach().clone()) for part in parts])


def whole(parts: list[list[Part]]) -> State:
    """The tensors of all ranks by name, the same on each rank if all is well. What no rank has of one is NaN.

    Own parts come last: of what each rank has for itself they are this rank's.
    """
    found: State = {}
    for of_rank in [*parts, parts[dist.get_rank()]]:
        for name, local, where, numel in of_rank:
            fill = torch.nan if local.is_floating_point() else -1
            full = found.setdefault(name, torch.full((numel,), fill, dtype=local.dtype))
            full[_at(where, local)] = local
    return found


def _at(where: torch.Tensor | int, local: torch.Tensor) -> torch.Tensor | slice:
    return where if isinstance(where, torch.Tensor) else slice(where, where + local.numel())


def put(parts: Iterable[Part], state: State) -> None:
    """Set this rank's memory to a state."""
    with torch.no_grad():
        for name, local, where, _ in parts:
            local.copy_(state[name][_at(where, local)])


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_any_rank(names: Iterable[str]) -> list[str]:
    return sorted({name for names_of_rank in gathered(list(names)) for name in names_of_rank})


def different(found: State, expected: State) -> list[str]:
    return [key for key in sorted({*found, *expected}) if not alike(found.get(key), expected.get(key))]


def alike(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and bool(one.view(torch.uint8).equal(other.view(torch.uint8)))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return float(one) == float(other)
    return repr(one) == repr(other)


def is_nothing(*states: Any) -> bool:
    """Zeros are what a fresh optimizer may have, or not have yet."""
    given = [state for state in states if state is not None]
    return all(
        not state.any() if isinstance(state, torch.Tensor) else state in ([], 0.0, [0.0], [1.0]) for state in given
    )


def spoil(parts: Iterable[Part], what: str) -> None:
    """For tests of the judge: change one element on the last rank, or let it wait for ever."""
    if dist.get_rank() == dist.get_world_size() - 1:
        if what == "hang":
            time.sleep(10**6)
        next(part for part in parts if part.name.endswith(what)).local.view(-1)[0] += 1


def add_one(flat: torch.Tensor, number: int) -> None:
    flat[number % flat.numel()] += 1


# What may become of a tensor while it is saved: one element is another one, or half of them are lost.
WHILE_SAVED: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "altered": add_one,
    "zeros": lambda flat, _: flat[flat.numel() // 2 :].zero_(),
    "NaN": lambda flat, _: flat[flat.numel() // 2 :].fill_(torch.nan),
}


def saver(case: Options, tag: str, rank: int) -> Callable[..., None]:
    """The `torch.save` of a tag; it changes a tensor in the call and on the rank of a number, if the case has that."""
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
                leaves[at] = leaves[at].detach().clone()  # that of the run stays as it is
                WHILE_SAVED[wanted["damage"]](leaves[at].view(-1), number)
            obj = tree_unflatten(leaves, structure)
        save(obj, *args, **keywords)

    return save_changed


def unrepaired(different: list[str], found: State, truth: State, case: Options) -> list[str]:
    """Of what differs from the truth, what `repair` does not state: it takes main parameters from weights, and moments
    from an older checkpoint, or resets them."""
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
    """What fingerprints prove of the loads in this block: lines of the log of rank 0."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("ckpt_patches")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class Ranks(NamedTuple):
    """Which ranks this process starts. Another one may start the others, in another environment."""

    of: int  # all
    only: Sequence[int]
    port: int
    told: str  # the folder of what they have found, or "" for one of this process
    killed: bool = False  # one of them is, by itself


def arguments(*commands: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=commands)
    parser.add_argument("case", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", type=int, nargs="+", help="ranks; another process starts the others")
    parser.add_argument("--port", type=int, default=free_port())
    parser.add_argument("--told", default="", help="folder of what the ranks of both processes have found")
    return parser


def ranks_of(args: argparse.Namespace, count: int, *, killed: bool = False) -> Ranks:
    return Ranks(count, args.only or range(count), args.port, args.told, killed)


def on_ranks(work: Work, ranks: Ranks, join: Join) -> Options:
    """What the first rank has found; where ranks have failed, the cause. Who waits for a failed one is ended."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        told = Path(ranks.told or folder)
        processes = [context.Process(target=_rank, args=(rank, ranks, told, work, join)) for rank in ranks.only]
        for process in processes:
            process.start()
        if _hang(processes, told):
            return {"hangs": True}
        found = _told(told)
    if ranks.killed and -signal.SIGKILL in [process.exitcode for process in processes]:
        return {"killed": True}
    errors = [one for one in found if "error" in one]
    if not errors and any(process.exitcode for process in processes):
        return {"error": f"exit statuses {[process.exitcode for process in processes]}"}
    causes = [one for one in errors if "gloo/transport" not in one["error"]]  # not of a rank that lost another one
    return dict([*causes, *errors, *found][0])


def _rank(rank: int, ranks: Ranks, told: Path, work: Work, join: Join) -> None:
    """What came of it, in a file of the rank."""
    join(rank, ranks.of, ranks.port)
    try:
        found = work(rank)
    except BaseException as error:  # as torch's CheckpointException is
        found = {"error": f"{type(error).__name__}: {error}"[:1000]}
    Path(told, f"{rank}.part").write_text(json.dumps(found))
    Path(told, f"{rank}.part").rename(Path(told, str(rank)))
    if "error" not in found:
        dist.barrier()
    os._exit("error" in found)  # Gloo leaves threads behind, and a writer's process would be waited for


def _told(folder: Path) -> list[Options]:
    """What ranks have found by now."""
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir()) if path.suffix != ".part"]


def _hang(processes: list[Any], told: Path) -> bool:
    """Wait for the ranks; where one fails the others end soon, or are ended."""
    limit, failed = time.monotonic() + seconds(60), float("inf")
    while any(process.is_alive() for process in processes):
        time.sleep(0.01)
        if any(process.exitcode for process in processes) or any("error" in one for one in _told(told)):
            failed = min(failed, time.monotonic())
        if time.monotonic() > min(limit, failed + seconds(1)):
            for process in processes:
                process.kill()
                process.join()
            return failed == float("inf")
    return False
