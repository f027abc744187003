"""Replace and wrap each function that the fixes edit, one at a time, and report which changes are detected.

    python replaced_functions.py PACKAGE

Prints one line of JSON: the undetected changes, the number of functions per fix, and the active fixes.
"""

import functools
import importlib
import json
import os
import sys
from typing import Any

import ckpt_patches
from ckpt_patches.engine.installed import locate
from ckpt_patches.engine.plan import Outcome, fixes_for, plan_tree
from ckpt_patches.errors import StrictModeError
from ckpt_patches.inplace import rewrite
from ckpt_patches.startup import report, verify
from trainers import stub_imports


def theirs(*args: Any, **kwargs: Any) -> None:
    """Another package's replacement."""


def wrapping(ours: Any) -> list[Any]:
    """The kinds of wrappers: with __wrapped__, a partial, a plain closure."""
    inner: Any = ours.fget if isinstance(ours, property) else getattr(ours, "__func__", ours)

    def closure(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return [functools.wraps(inner)(theirs_copy()), functools.partial(inner), closure]


def theirs_copy() -> Any:
    def other(*args: Any, **kwargs: Any) -> None:
        """A different function on each call."""

    return other


def is_loud(*words: str) -> bool:
    """Whether verify and the report name all these words."""
    try:
        verify()
    except StrictModeError as error:
        return all(word in str(error) and word in report() for word in words)
    return False


def main(package: str) -> None:
    stub_imports.install()  # for megatron.training
    switches = ckpt_patches.Switches(os.environ)
    root = str(locate(package))
    state = rewrite.read_state(root, package)
    edited, active = state.functions, list(state.fixes)
    if not active:
        plan = plan_tree(root, package, fixes_for(package, switches.skip))
        edited = {
            module: {name: list(fixes) for name, fixes in of.functions.items()} for module, of in plan.files.items()
        }
        active = plan.named(Outcome.APPLIES)
    unnoticed: list[str] = []
    count: dict[str, int] = {}
    for module, names in edited.items():
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != "torch_nebula":  # Azure's package, on no index
                raise
            continue
        verify()
        for function, fixes in names.items():
            *owners, name = function.split(".")
            owner = functools.reduce(getattr, owners, loaded)
            ours = vars(owner)[name]
            setattr(owner, name, theirs)
            if not is_loud(f"{module}.{function} was replaced by __main__", __file__, fixes[0]):
                unnoticed.append(f"{module}.{function} replaced")
            for number, wrapper in enumerate(wrapping(ours)):
                setattr(owner, name, wrapper)
                verify()
                if f"{module}.{function} is wrapped by" not in report():
                    unnoticed.append(f"{module}.{function} wrapped {number}")
            setattr(owner, name, ours)
            verify()
            assert " is wrapped by " not in report()
            for fix in fixes:
                count[fix] = count.get(fix, 0) + 1
    print(json.dumps({"unnoticed": unnoticed, "count": count, "active": active}))


main(sys.argv[1])
