"""The universal-checkpoint features of the installed DeepSpeed, read from its source without an import."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_patches.engine.installed import locate, version_in
from ckpt_patches.engine.registry import DEEPSPEED
from ckpt_patches.engine.releases import RECORDED

CONVERTER = Path("deepspeed", "checkpoint", "ds_to_universal.py")


@dataclass(frozen=True)
class Traits:
    """Features of a DeepSpeed release; the defaults are those of the latest."""

    # Sub-parameters of unequal shares, counts converted to widths, a shape per tensor-parallel rank
    shard_widths: bool = True
    module_weights: bool = True  # fp32.pt from the model's weights, if the optimizer has none
    affine_maps: bool = True
    # A checkpoint with one of these is refused if DeepSpeed does not support it.
    zero3_tensor_parallel: bool = True
    autoep: bool = True


# By feature, a name that a converter with the feature uses. In forks and back-ports, the syntax tree is
# reliable and the version is not.
SIGNS = {
    "shard_widths": "SUB_PARAM_SHARD_WIDTHS",
    "module_weights": "module_state",
    "affine_maps": "AFFINE_MAP",
    "zero3_tensor_parallel": "_build_zero3_rank_grid",
    "autoep": "_rebuild_zero3_autoep_rank_tensors",
}


def installed() -> tuple[Traits, str]:
    """The features of the installed DeepSpeed (all if none is), and a warning if its release is untested."""
    root = locate(DEEPSPEED)
    if root is None or not (root / CONVERTER).is_file():
        return Traits(), ""
    return in_tree(root)


def in_tree(root: Path) -> tuple[Traits, str]:
    """The features of a DeepSpeed, and a warning if its release is untested."""
    release, last = version_in(root, DEEPSPEED), RECORDED[DEEPSPEED][-1]
    untested = f"DeepSpeed {release} ({root}) was not tested, the last that was is {last}"
    try:
        used = set(_words(ast.parse((root / CONVERTER).read_bytes())))
    except (SyntaxError, ValueError) as error:
        return Traits(), f"{untested}; its converter does not parse ({error}): the output is for {last}"
    traits = Traits(**{name: sign in used for name, sign in SIGNS.items()})
    if release in RECORDED[DEEPSPEED]:
        return traits, ""
    lacking = ", ".join(sorted(name for name, has in vars(traits).items() if not has))
    but = f" but for {lacking}, as its own converter" if lacking else ""
    return traits, f"{untested}: the output is as for {last}{but}; compare one with its own before you rely on it"


def _words(node: ast.AST) -> Iterator[str]:
    """The names that a module defines and uses, no imports."""
    if isinstance(node, ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    for child in ast.iter_child_nodes(node):
        yield from _words(child)
