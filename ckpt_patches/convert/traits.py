"""What the converter of the installed DeepSpeed does that others do not; read from its text, nothing is imported."""

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
    """Read from the converter's syntax tree and not from its version: forks and back-ports are what they are."""

    zero3: bool = True
    steps: bool = True  # zero/<parameter>/step.pt
    sub_params: bool = True  # `parameter_with_sub_params`
    # Sub-parameters of unequal shares, a count of them turned into widths, shapes by tensor-parallel rank
    shard_widths: bool = True
    module_weights: bool = True  # fp32.pt out of the model's weights, where the optimizer has none
    parallel_dimensions: bool = True  # the degrees by what the checkpoint says, and not by counting files
    zero3_tensor_parallel: bool = True
    affine_maps: bool = True
    autoep: bool = True  # experts by their placement, as the latest does
    two_sub_params: bool = True  # `parameter_with_2_sub_params_cat_dim_0`
    vocab_tensor: bool = True  # a vocabulary without its padding, and all patterns have to be used


@dataclass(frozen=True)
class Facts:
    """What a module uses, whatever its quotes, line breaks and comments are."""

    functions: frozenset[str]  # that it defines, methods included
    used: frozenset[str]  # names and attributes; one that is imported only is not
    strings: frozenset[str]  # constants, and constant parts of f-strings


def installed() -> tuple[Traits, str]:
    """Of the installed DeepSpeed, all where there is none; and a warning, where its release was not tested."""
    root = locate(DEEPSPEED)
    if root is None or not (root / CONVERTER).is_file():
        return Traits(), ""
    return in_tree(root)


def in_tree(root: Path) -> tuple[Traits, str]:
    """What the converter of a DeepSpeed does; and a warning, where its release was not tested."""
    release, last = version_in(root, DEEPSPEED), RECORDED[DEEPSPEED][-1]
    untested = f"DeepSpeed {release} ({root}) was not tested, the last that was is {last}"
    try:
        traits = of_syntax(facts((root / CONVERTER).read_bytes()))
    except (SyntaxError, ValueError) as error:
        return Traits(), f"{untested}; its converter does not parse ({error}): the output is for {last}"
    if release in RECORDED[DEEPSPEED]:
        return traits, ""
    lacking = ", ".join(sorted(name for name, has in vars(traits).items() if not has))
    but = f" but for {lacking}, as its own converter" if lacking else ""
    return traits, f"{untested}: the output is as for {last}{but}; compare one with its own before you rely on it"


def of_syntax(module: Facts) -> Traits:
    """What a converter does, by what it defines and uses."""
    return Traits(
        zero3="extract_zero_shards_stage3" in module.functions,
        steps=any(text.rpartition("/")[2] == "step.pt" for text in module.strings),
        sub_params="PARAMETER_WITH_SUB_PARAMS" in module.used,
        shard_widths="SUB_PARAM_SHARD_WIDTHS" in module.used,
        module_weights="module_state" in module.used,
        parallel_dimensions="model_state_metadata" in module.used,
        zero3_tensor_parallel="_build_zero3_rank_grid" in module.functions,
        affine_maps="AFFINE_MAP" in module.used,
        autoep="_rebuild_zero3_autoep_rank_tensors" in module.functions,
        two_sub_params="PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0" in module.used,
        vocab_tensor="VOCAB_TENSOR" in module.used,
    )


def facts(text: bytes) -> Facts:
    """Parse a module.

    Raises:
        SyntaxError, ValueError: it is no module for this Python.
    """
    tree = ast.parse(text)
    nodes = list(_nodes(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return Facts(
        functions=frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef)),
        used=frozenset(names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}),
        strings=frozenset(value for value in constants if isinstance(value, str)),
    )


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that do something: no docstrings."""
    left = [tree]
    while left:
        node = left.pop()
        if not _is_docstring(node):
            yield node
            left += ast.iter_child_nodes(node)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
