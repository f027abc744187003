"""No checkpoint of any format is called WHOLE while a tensor has detectably wrong elements.

In each tensor, one element, a quarter, or all become NaN, infinity, zero, or another tensor's elements, with correct
checksums. docs/reference/findings.md defines what must be found: NaN and infinity everywhere except in padding; zeros
and other tensors' elements if another array of the same parameter contradicts them.
"""

import math
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ckpt_patches.audit.audit import UNKNOWN, WHOLE, audit
from ckpt_patches.formats import torch_file
from ckpt_patches.formats.dtypes import item_size
from every_checkpoint import EVERY, Place, put, tensors
from test_audit import names
from upstream import all_releases

FLOATS = ("float32", "float64", "bfloat16", "float16")
NAN, INFINITY, ZERO, FOREIGN = "nan", "infinity", "zero", "another tensor's"
EXTENTS = {"one": (1 / 2, 0.0), "a quarter": (1 / 4, 1 / 4), "all": (0.0, 1.0)}  # begin, length; at least one element
CHANGES = [(extent, value) for extent in EXTENTS for value in (NAN, ZERO, INFINITY, FOREIGN)]
MASTER, AVG, SQ = "master", "exp_avg", "exp_avg_sq"
LARGE = 1e-15  # first moments above this have a nonzero square
FAR = 4  # units
RUN = 8  # elements: shorter runs of zeros can occur by chance
ALIGNMENT = 64  # elements; of parameters in Megatron's buckets

Values: TypeAlias = "npt.NDArray[np.float64]"
Key = tuple[object, ...]  # identifies a parameter, or its part in one file


def values(dtype: str, data: bytes) -> Values:
    found: Values = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).double().numpy()
    return found


class Change(NamedTuple):
    """New values for elements of a tensor."""

    place: Place
    begin: int
    new: bytes

    @property
    def end(self) -> int:
        return self.begin + len(self.new) // item_size(self.place.dtype)

    def __str__(self) -> str:
        return f"{self.place.path.name} {self.place.name} {self.place.first} [{self.begin}, {self.end})"


class Checkpoint:
    """A checkpoint's tensors. Their names in the files determine which are compared, and where padding is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places = [place for place in tensors(folder) if place.dtype in FLOATS]
        self.data = {place: place.data() for place in self.places}
        self.is_universal = (folder / "zero").is_dir()
        self.is_zero = bool(list(folder.glob("*_optim_states.pt")))
        self.states: dict[Key, dict[str, Place]] = {}
        for place in self.places:
            if role := role_of(place):
                self.states.setdefault(key_of(place), {})[role] = place
        self.files = {path: torch_file.read(path, trust=True).value for path in folder.glob("*.pt")}
        self.models = {path: value for path, value in self.files.items() if path.name.endswith("model_states.pt")}
        self.weights = {self.parameter(place): place for place in self.places if not role_of(place)}

    def parameter(self, place: Place) -> object:
        """The key of a weight in `weights`."""
        if self.is_zero:
            return mp_of(place), place.name
        return re.sub(r"/[\d.]+$", "", place.name)  # zarr: the chunk's label

    def weight_of(self, place: Place) -> Place | None:
        """A weight that the main parameters of a place round to; None if they have no weight."""
        if self.is_universal:
            own = self.weights.get(f"module.{place.path.parent.name}")
            return own if len(self.models) == 1 else None
        if self.is_zero:
            mp = mp_of(place)
            is_stage_3 = any(path.name.startswith("zero_pp_rank") for path in self.models)
            has_experts = any("expert" in path.name for path in self.models)
            own = next((p for (at, name), p in self._of_zero() if at == mp and name in self._trained(p)), None)
            return None if has_experts or is_stage_3 else own
        return self.weights.get(re.sub(r"^optimizer\.state\.\w+\.", "", str(self.parameter(place))))

    def is_compared(self, place: Place) -> bool:
        """Whether main parameters are compared with a weight."""
        if self.is_universal:
            is_trained = (self.folder / "zero" / place.name.removeprefix("module.") / "fp32.pt").exists()
            return len(self.models) == 1 and place.path in self.models and is_trained
        if self.is_zero:
            return self.weight_of(place) is not None and place.name in self._trained(place)
        own = f"optimizer.state.exp_avg.{self.parameter(place)}"
        return any(self.parameter(state) == own for state in self.places)

    def _of_zero(self) -> Iterator[tuple[Any, Place]]:
        return ((key, place) for key, place in self.weights.items() if isinstance(key, tuple))

    def _trained(self, place: Place) -> set[str]:
        shapes = self.models.get(place.path, {}).get("param_shapes") or []
        return {f"module.{name}" for group in shapes for name in group}

    def meant(self, place: Place) -> list[tuple[int, int]]:
        """The ranges of parameters' elements; all others are padding."""
        group = re.search(r"(?:state|fp32_flat_groups|single_partition_of_fp32_groups)\.(\d+)", place.name)
        if is_bucket(place):
            is_gap = len(place.first) == 1 and place.first[0] % ALIGNMENT > 0
            return [] if is_gap else [(0, place.numel)]
        if not self.is_zero or not role_of(place) or group is None:
            return [(0, place.numel)]
        state = self.files[place.path]["optimizer_state_dict"]
        if "param_slice_mappings" in state:
            fragments = [address.fields for address in state["param_slice_mappings"][int(group[1])].values()]
            return [(f["start"], f["start"] + f["numel"]) for f in fragments]
        return list(self._shares(place, int(group[1])))

    def _shares(self, place: Place, group: int) -> Iterator[tuple[int, int]]:
        """Stage 3: equal shares of each parameter of a group; the last ranks may have less."""
        rank, mp = re.findall(r"rank_(\d+)", place.path.name)
        model = next(self.folder.glob(f"zero_pp_rank_0_mp_rank_{mp}_model_states.pt"))
        ranks, begin = len(list(self.folder.glob(f"*mp_rank_{mp}_optim_states.pt"))), 0
        for shape in self.files[model]["param_shapes"][group].values():
            each = -(-math.prod(shape) // ranks)
            own = min(each, max(0, math.prod(shape) - int(rank) * each))
            yield begin, begin + own
            begin += each

    def must_be_told(self, change: Change) -> bool:
        """Whether the audit must find a change, by docs/reference/findings.md."""
        place, (before, after) = change.place, self.before_and_after(change)
        ranges, role = self.meant(place), role_of(place)
        is_meant = np.zeros(place.numel, np.bool_)
        for begin, end in ranges:
            is_meant[begin:end] = True
        changed = is_meant & (before != after)
        if not role and not self.is_compared(place) and not np.isnan(after).any():
            return False  # infinity can be right in a tensor that the run does not train
        if not np.isfinite(after[is_meant]).all() or (role == SQ and (after[is_meant] < 0).any()):
            return True
        if is_bucket(place):
            return False
        if not role:
            return self.is_compared(place) and bool((changed & are_far(before, after, place.dtype)).any())
        zeroed = changed & (after == 0)
        weight = self.weight_of(place) if role == MASTER else None
        if weight is not None:
            return bool((is_meant & are_far(before, after, weight.dtype)).any())
        others = self.states[key_of(place)]
        if not {AVG, SQ} <= others.keys():  # a frozen weight
            return False
        avg, sq = (values(others[one].dtype, self.data[others[one]]) for one in (AVG, SQ))
        is_moving = zeroed & (np.abs(avg[: place.numel]) > LARGE) & (sq[: place.numel] > 0)
        if role == MASTER:  # zeros all over can be right
            ranges = [(begin, end) for begin, end in ranges if not (after[begin:end] == 0).all()]
        return longest_run(is_moving, ranges) >= RUN

    def before_and_after(self, change: Change) -> tuple[Values, Values]:
        before = values(change.place.dtype, self.data[change.place])
        after = before.copy()
        after[change.begin : change.end] = values(change.place.dtype, change.new)
        return before, after

    def changes(self, place: Place, chosen: Iterable[tuple[str, str]]) -> Iterator[Change]:
        size = item_size(place.dtype)
        for extent, value in chosen:
            first, length = EXTENTS[extent]
            begin = int(first * place.numel)
            end = begin + max(int(length * place.numel), 1)
            new = self._bytes(place, value)
            if new is not None and new[begin * size : end * size] != self.data[place][begin * size : end * size]:
                yield Change(place, begin, new[begin * size : end * size])

    def _bytes(self, place: Place, value: str) -> bytes | None:
        """As many bytes as the tensor has, of a kind of value; None without a different tensor of this dtype."""
        if value != FOREIGN:
            number = {NAN: math.nan, INFINITY: -math.inf, ZERO: 0.0}[value]
            one: bytes = torch.tensor([number], dtype=getattr(torch, place.dtype)).view(torch.uint8).numpy().tobytes()
            return one * place.numel
        others = [p for p in self.places if p.dtype == place.dtype and self.data[p] != self.data[place]]
        others.sort(key=lambda other: (other.numel != place.numel, other.numel < place.numel))
        if not others:
            return None
        found: bytes = self.data[others[0]] * place.numel
        return found[: place.nbytes]


def role_of(place: Place) -> str:
    """The role of an optimizer state; empty for all other tensors."""
    if place.path.parent.parent.name == "zero":
        return {"fp32.pt": MASTER, "exp_avg.pt": AVG, "exp_avg_sq.pt": SQ}.get(place.path.name, "")
    if place.path.parent.name == "zero":  # a copy of a rank's groups beside a universal checkpoint's parameters
        return ""
    name = re.sub(r"/[\d.]+$", "", place.name)
    found = re.search(r"^optimizer\.state\.(fp32_param|param|exp_avg_sq|exp_avg)\.", name)
    found = found or re.search(r"\b(fp32_flat_groups|single_partition_of_fp32_groups)\.\d+$", name)
    found = found or re.search(r"\.(param|exp_avg_sq|exp_avg)$", name)
    return "" if found is None else found[1] if found[1] in (AVG, SQ) else MASTER


def mp_of(place: Place) -> str:
    """The tensor- or pipeline-parallel rank in a ZeRO file's name; empty for an expert's file."""
    found = re.search(r"mp_rank_\d+", place.path.name)
    return "" if found is None else found[0]


def key_of(place: Place) -> Key:
    """A key shared by the three states of a parameter or a group."""
    if place.path.parent.parent.name == "zero":
        return (place.path.parent,)
    if found := re.search(r"(?:groups|state)\.(\d+)(?:\.exp_avg|\.exp_avg_sq)?$", place.name):
        return place.path, found[1]
    return re.sub(r"\b(fp32_param|param|exp_avg_sq|exp_avg)\b", "*", place.name, count=1), place.first


def are_far(one: Values, other: Values, dtype: str) -> npt.NDArray[np.bool_]:
    """Whether numbers differ by more than the units of a dtype that rounding and its slack can make."""
    rounded = [torch.from_numpy(found).float().to(getattr(torch, dtype)).float().numpy() for found in (one, other)]
    unit = max(torch.finfo(getattr(torch, dtype)).eps, torch.finfo(torch.float32).eps)
    largest, smallest = np.maximum(*map(np.abs, rounded)), torch.finfo(getattr(torch, dtype)).tiny
    return np.asarray(np.abs(rounded[0] - rounded[1]) > FAR * unit * np.maximum(largest, smallest))


def is_bucket(place: Place) -> bool:
    """Whether a tensor is a Megatron bucket, of many parameters."""
    return "bucket_idx" in place.name or "(bfloat16, " in place.name


def longest_run(chosen: npt.NDArray[np.bool_], ranges: list[tuple[int, int]]) -> int:
    """The most consecutive chosen elements in one of the ranges."""
    parts = ["".join("x" if one else " " for one in chosen[begin:end]) for begin, end in ranges]
    return max((len(run) for part in parts for run in part.split()), default=0)


def sampled(places: list[Place]) -> list[tuple[Place, list[tuple[str, str]]]]:
    """All tensors with all changes; in the default run a few, with three of the changes each."""
    if all_releases():
        return [(place, CHANGES) for place in places]
    chosen = places[:: max(len(places) // 8, 1)]
    return [(p, [CHANGES[(5 * n + k) % len(CHANGES)] for k in (0, 3, 7)]) for n, p in enumerate(chosen)]


@pytest.mark.parametrize("name", [name for name, kind in EVERY.items() if kind.default or all_releases()])
def test_what_can_be_told_of_any_tensor_is_not_called_whole(name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EVERY[name].path, tmp_path / "checkpoint"))
    report = audit(folder, workers=1)
    may_be_odd = {"odd_in_bucket"} if name.endswith("buckets") else set()  # their padding is not initialized
    assert names(report) <= may_be_odd
    assert report.verdict == WHOLE or (report.verdict == UNKNOWN and may_be_odd)
    checkpoint = Checkpoint(folder)
    assert len(checkpoint.places) > 10
    missed, told = [], 0
    for place, chosen in sampled(checkpoint.places):
        before = place.path.read_bytes()
        for change in checkpoint.changes(place, chosen):
            if checkpoint.must_be_told(change):
                put(place, change.new, change.begin)
                told += 1
                if audit(folder, workers=1).verdict == WHOLE:
                    missed.append(str(change))
                place.path.write_bytes(before)
    assert missed == []
    assert told >= 5
