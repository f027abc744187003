"""Save with a record of fingerprints, load into another run, and prove it: dcp_loading.py FOLDER CASES.json RANKS

CASES is a list of {"save": …, "load": …, "idiom": …}; the first two are dcp_saving.py's `Case`. Four ranks save, and
RANKS load. Prints the result of each loading rank for each case: "verified", or the error.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ckpt_patches import fingerprint
from dcp_saving import RANKS, Case, begin, damaged, optimizer_of, trained
from trainers.ranks import free_port, results

RECORD = "ckpt_patches_fingerprint"


def case_of(plain: dict[str, Any]) -> Case:
    return Case(**{"name": "", **plain, "damage": tuple(plain.get("damage", ()))})


def save(case: Case, path: Path) -> None:
    model, optimizer = trained(case)
    record = fingerprint.of_training(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    damaged(state, case.damage)
    dcp.save({**state, RECORD: record}, checkpoint_id=path)


def load(case: Case, idiom: str, path: Path) -> str:
    """The result of the proof on this rank."""
    torch.manual_seed(7)
    model, _ = trained(replace(case, steps=0))
    optimizer = optimizer_of(model, case)
    state: dict[str, Any] = {RECORD: ""}
    if idiom == "raw":  # the template has no state, so none is loaded
        state.update(model=model.state_dict(), optimizer=optimizer.state_dict())
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        weights, states = get_state_dict(model, optimizer)
        state.update(model=weights, optimizer=states)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    with torch.no_grad():
        changed(idiom, model, optimizer)
    try:
        fingerprint.prove(model, optimizer, None if idiom == "no_record" else state[RECORD])
    except fingerprint.FingerprintError as error:
        return str(error)
    return "verified"


def changed(idiom: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Change one element on one rank, the buffer, or the step, or drop a moment on one rank."""
    model = getattr(model, "module", model)
    if idiom == "buffer":
        model.positions[0] = 9.0
    if idiom in ("weight", "moment") and dist.get_rank() == dist.get_world_size() - 1:
        tensors = [
            p if idiom == "weight" else optimizer.state[p]["exp_avg"] for p in optimizer.param_groups[0]["params"]
        ]
        parts = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
        next(part for part in parts if part.numel()).view(-1)[-1] += 1.0
    if idiom == "no_moment" and dist.get_rank() == 1:
        for states in optimizer.state.values():
            del states["exp_avg"]
    if idiom == "step":
        for states in optimizer.state.values():
            states["step"] += 1


def save_all(rank: int, port: int, folder: str, cases: list[dict[str, Any]]) -> None:
    begin(rank, RANKS, port)
    for number, case in enumerate(cases):
        save(case_of(case["save"]), Path(folder, str(number)))


def load_all(rank: int, ranks: int, port: int, folder: str, cases: list[dict[str, Any]]) -> list[str]:
    begin(rank, ranks, port)
    said = []
    for number, case in enumerate(cases):
        said.append(load(case_of(case["load"]), case.get("idiom", "usual"), Path(folder, str(number))))
    return said


if __name__ == "__main__":
    folder, cases, ranks = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3])
    results(save_all, RANKS, free_port(), folder, cases)
    print(json.dumps(results(load_all, ranks, ranks, free_port(), folder, cases)))
