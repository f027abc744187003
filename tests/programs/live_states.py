"""The results of loads of many changed checkpoints: the live state of every rank as a digest, or an error."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainers.ranks import RankError


def by_folder(load_all: Callable[[list[str]], list[list[Any]]], folders: list[str]) -> dict[str, Any]:
    """By folder, the results of `load_all` for each rank, or {"error": "..."}.

    The same processes load all folders, unless there is an error: then halves are tried, down to single folders.
    """
    try:
        ranks = load_all(folders)
    except RankError as error:
        if len(folders) == 1:
            return {folders[0]: {"error": str(error)}}
        middle = len(folders) // 2  # bisection finds the few that fail
        return {**by_folder(load_all, folders[:middle]), **by_folder(load_all, folders[middle:])}
    return {folder: [rank[n] for rank in ranks] for n, folder in enumerate(folders)}


def digest(value: Any) -> str:
    found = hashlib.sha256()
    for part in parts(value):
        found.update(part)
    return found.hexdigest()


def parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield repr(key).encode()
            yield from parts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from parts(item)
    else:
        yield repr(value).encode()
