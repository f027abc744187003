"""Compare universal checkpoints entry by entry: files, types, numbers, and tensors bit for bit.

same_universal.py EXPECTED:FOUND...      prints the differences of each pair, as JSON
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def compare(expected: Path, found: Path) -> list[str]:
    names, others = files(expected), files(found)
    different = [f"missing: {name}" for name in sorted(names - others)]
    different += [f"not in upstream's: {name}" for name in sorted(others - names)]
    for name in sorted(names & others):
        if name.endswith(".pt"):
            one, other = (torch.load(folder / name, weights_only=False) for folder in (expected, found))
            different += [f"{name}{where}" for where in differences(one, other)]
        elif (expected / name).read_bytes() != (found / name).read_bytes():
            different.append(name)
    return different


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    if type(one) is not type(other):
        return [f"{where}: {type(one).__name__}, {type(other).__name__}"]
    if isinstance(one, torch.Tensor):
        return [] if same_tensor(one, other) else [f"{where}: {one.dtype}{list(one.shape)}, {other}"]
    if isinstance(one, dict):
        if list(one) != list(other):
            return [f"{where}: keys {list(one)}, {list(other)}"]
        return [found for key in one for found in differences(one[key], other[key], f"{where}[{key!r}]")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{where}: {len(one)}, {len(other)} items"]
        return [
            found
            for i, pair in enumerate(zip(one, other, strict=True))
            for found in differences(*pair, f"{where}[{i}]")
        ]
    if hasattr(one, "__dict__") and not callable(one):
        return differences(vars(one), vars(other), f"{where}.")
    return [] if one == other or (one != one and other != other) else [f"{where}: {one!r}, {other!r}"]


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape, stride, all bits, and the attributes that DeepSpeed sets are equal."""
    if (one.dtype, one.shape, one.stride(), one.requires_grad) != (
        other.dtype,
        other.shape,
        other.stride(),
        other.requires_grad,
    ) or vars(one) != vars(other):
        return False
    return bool(bits(one).equal(bits(other)))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def main() -> None:
    pairs = [argument.split(":") for argument in sys.argv[1:]]
    print(json.dumps({found: compare(Path(expected), Path(found)) for expected, found in pairs}))


if __name__ == "__main__":
    main()
