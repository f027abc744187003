"""Load DeepSpeed's own checkpoint files with torch 2.6 and later: allow the classes that DeepSpeed writes.

https://github.com/deepspeedai/DeepSpeed/pull/6751
"""

import ast

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NoMatch, NotNeeded, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch

ENGINE = "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine"
# Copied into every checkpoint folder, where it must work with an unpatched DeepSpeed: it gets its own functions.
SCRIPT = "deepspeed.utils.zero_to_fp32"
READERS = (
    "deepspeed.checkpoint.deepspeed_checkpoint",
    "deepspeed.checkpoint.zero_checkpoint",
    "deepspeed.checkpoint.ds_to_universal",
    "deepspeed.checkpoint.universal_checkpoint",
    "deepspeed.runtime.base_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine",
)

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/pull/6751",
        "https://github.com/deepspeedai/DeepSpeed/pull/6094",
    ),
    symptom="`UnpicklingError: Weights only load failed` in a load or conversion",
    releases=(("0.15.0", "0.15.4"),),
    stacks="ZeRO, torch 2.6 or later",
    silent=False,
)


# The functions to insert into upstream's files


def checkpoint_classes() -> "list[type]":
    """Return the classes in DeepSpeed checkpoints that only hold data: loading one runs no code.

    NumPy random states in them are not allowed: an ndarray can read object addresses from a file.
    """
    import argparse

    from deepspeed.checkpoint.universal_checkpoint import SubparamShape
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, SubparamShape]
    classes.append(argparse.Namespace)  # client state, returned by DeepSpeedCheckpoint.get_args()
    return classes


def load_checkpoint_file(path: str, map_location: object = None) -> object:
    """Load a file of a DeepSpeed checkpoint with torch.load.

    Since torch 2.6, torch.load refuses classes that are not allowed. Allow DeepSpeed's own during
    the load. weights_only keeps its default, so TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD still works.

    Raises:
        pickle.UnpicklingError: the file contains other classes. None of their code has run.
    """
    import pickle
    import zipfile

    if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):  # before torch 2.6
        return torch.load(path, map_location=map_location)
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([c for c in checkpoint_classes() if c not in known]):
        try:
            return torch.load(path, map_location=map_location)
        except pickle.UnpicklingError as error:
            refused = zipfile.is_zipfile(path) and torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if not refused:
                raise
            message = f"{path} holds classes that DeepSpeed does not allow by itself: {', '.join(sorted(refused))}. "
            message += "If you trust these, allow them before loading, with "
            message += "torch.serialization.add_safe_globals([...]). If you trust the whole file, set "
            message += "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment."
            raise pickle.UnpicklingError(message) from error


# The edits


@fix.edit(ENGINE)
def define_for_all(source: Source) -> None:
    """The other modules import the function from here: if upstream fixed this module, they must be fixed, too."""
    if not plain_loads(source):
        raise NotNeeded
    define_and_call(source)


@fix.edit(SCRIPT)
def define_and_call(source: Source) -> None:
    calls = plain_loads(source)
    if not calls:
        return
    source.insert_function_before(calls[0], checkpoint_classes)
    source.insert_function_before(calls[0], load_checkpoint_file)
    replace(source, calls)


@fix.edit(*READERS)
def import_and_call(source: Source) -> None:
    calls = plain_loads(source)
    if not calls:
        return
    imports = [statement for statement in source.all_of(ast.ImportFrom, having="import") if not statement.col_offset]
    source.insert_after(imports[-1], f"from {ENGINE} import {load_checkpoint_file.__name__}")
    replace(source, calls)


def plain_loads(source: Source) -> list[ast.Call]:
    """The `torch.load` calls without `weights_only`; none if upstream has fixed them all, by weights_only=False.

    Raises:
        NotNeeded: the module calls the inserted function.
        NoMatch: there is no call, or one in another form.
    """
    name = load_checkpoint_file.__name__
    own = source.all_of(ast.Call, source.function(name)) if source.has_function(name) else []
    every = source.all("torch.load(...)") if source.has(f"{name}(...)") else source.some("torch.load(...)")
    plain = [call for call in every if all(keyword.arg != "weights_only" for keyword in call.keywords)]
    calls = [call for call in plain if call not in own]
    if source.has(f"{name}(...)"):
        defines = (checkpoint_classes, load_checkpoint_file) if own else (source.imports(name),)
        source.skip_if(*defines, not calls)
    for call in calls:
        if len(call.args) != 1 or any(keyword.arg != "map_location" for keyword in call.keywords):
            raise NoMatch(f"expected `torch.load(path, map_location=...)`, found `{source.text(call)}`")
    return calls


def replace(source: Source, calls: list[ast.Call]) -> None:
    for call in calls:
        source.replace(call.func, load_checkpoint_file.__name__)
