"""What loads of many changed checkpoints come to: the live state of every rank as a digest, or an error."""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ckpt_patches.demo.ranks import RankError


def by_folder(load_all: Callable[[list[str]], list[list[Any]]], folders: list[str]) -> dict[str, Any]:
    """What `load_all` returns of each rank, by folder, or {"error": "..."}.

    All are loaded by the same processes if none of them is an error, else each by processes of its own.
    """
    try:
        ranks = load_all(folders)
    except RankError as error:
        if len(folders) == 1:
            return {folders[0]: {"error": str(error)}}
        middle = len(folders) // 2  # the few that fail are found by halves
        return {**by_folder(load_all, folders[:middle]), **by_folder(load_all, folders[middle:])}
    return {folder: [rank[n] for rank in ranks] for n, folder in enumerate(folders)}


def print_differences(results: Callable[[], list[list[str]]]) -> None:
    """A line of JSON: the names that rank 0 has found, and the first line of the error that a rank has raised."""
    line: dict[str, Any] = {"differ": [], "error": ""}
    try:
        line["differ"] = results()[0]
    except RankError as error:
        line["error"] = str(error).splitlines()[0]
    print(json.dumps(line), flush=True)


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
