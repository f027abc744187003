"""Weights of a pipeline, which are in a file per layer and tensor-parallel rank, not in the model file. Pure.

PipelineModule names a parameter by the number of its layer or, if layers share it, by the key that ties them. The file
of a tied layer does not contain this key. The parameters in the file identify it.
https://deepspeed.readthedocs.io/en/latest/pipeline.html
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.formats.zero import Shape

LAYER = re.compile(r"layer_(\d{1,9})(?:-model_(\d{1,6}))?-model_states\.pt")  # the rank is optional
NUMBERED = re.compile(r"(\d{1,9})\.(.+)")
TIED = re.compile(r"tied_modules\.([^.]+)\.(.+)")


class Place(NamedTuple):
    """The position of a weight."""

    file: str
    key: str


def is_in_layers(name: str) -> bool:
    """Whether it is a name of a pipeline's parameter."""
    return bool(NUMBERED.fullmatch(name) or TIED.fullmatch(name))


def layer_files(names: Iterable[str]) -> dict[tuple[int, int], str]:
    """The files of layers, by the layer's number and the tensor-parallel rank."""
    return {(int(m[1]), int(m[2] or 0)): m[0] for m in map(LAYER.fullmatch, names) if m}


def places(shapes: Mapping[str, Shape], names: Iterable[str], model_rank: int) -> dict[str, Place]:
    """The place of the weight of each parameter whose name has a layer's number. Its file can be absent."""
    files = layer_files(names)
    has_ranks = any("-model_" in name.removesuffix("-model_states.pt") for name in files.values())
    rank = rank_of(files, model_rank)
    found = {}
    for name in shapes:
        if match := NUMBERED.fullmatch(str(name)):
            expected = f"layer_{int(match[1]):02d}{f'-model_{rank:02d}' * has_ranks}-model_states.pt"
            found[name] = Place(files.get((int(match[1]), rank), expected), match[2])
    return found


def rank_of(files: Iterable[tuple[int, int]], model_rank: int) -> int:
    """The tensor-parallel rank in a model-parallel rank: it varies fastest."""
    return model_rank % (1 + max((rank for _, rank in files), default=0))


def tied_places(
    shapes: Mapping[str, Shape], layers: Mapping[str, Any], others: Set[str], model_rank: int
) -> Iterator[tuple[str, list[Place]]]:
    """Yield the possible places of each parameter that layers share: layer files with all of its module's parameters.

    Args:
        shapes: of the parameters of this model-parallel rank.
        layers: the content of the layers' files, by their names.
        others: the files that `places` returns, on any rank.
        model_rank: tensor- and pipeline-parallel.
    """
    files = layer_files(layers)
    rank = rank_of(files, model_rank)
    own = [name for (_, of), name in sorted(files.items()) if of == rank and name not in others]
    modules: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        if match := TIED.fullmatch(str(name)):
            modules.setdefault(match[1], {})[match[2]] = shape
    for key, module in modules.items():
        having = [name for name in own if _has(layers[name], module)]
        for inner in module:
            yield f"tied_modules.{key}.{inner}", [Place(name, inner) for name in having]


def _has(layer: Any, module: Mapping[str, Shape]) -> bool:
    found = layer if isinstance(layer, Mapping) else {}
    return all(isinstance(own := found.get(k), TensorHeader) and own.shape == shape for k, shape in module.items())
