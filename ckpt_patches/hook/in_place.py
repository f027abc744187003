"""The functions that `ckpt-patches apply` has edited in an imported tree: the hook checks these as well."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# By (tree, package), then by module and by function: the fixes that edit it.
_edited: "dict[tuple[str, str], Mapping[str, Mapping[str, Sequence[str]]]]" = {}


def functions(root: str, package: str, module: str) -> "Mapping[str, Sequence[str]]":
    """The functions of a module that are edited in place, and the fixes that edit each."""
    if (root, package) not in _edited:
        _edited[root, package] = _read(root, package)
    return _edited[root, package].get(module, {})


def fixes(root: str, package: str) -> set[str]:
    """The fixes that edit a function in place in this tree."""
    functions(root, package, "")
    return {fix for edited in _edited[root, package].values() for names in edited.values() for fix in names}


def _read(root: str, package: str) -> "Mapping[str, Mapping[str, Sequence[str]]]":
    """Empty if nothing is applied, or the state is damaged, which `status`, `apply` and `revert` report."""
    from ckpt_patches.engine.installed import state_folder

    path = os.path.join(state_folder(root, package), "state.json")
    if not os.path.exists(path):
        return {}
    import json

    try:
        with open(path, "rb") as file:
            state = json.load(file)
        return {
            module: {function: [str(fix) for fix in names] for function, names in edited.items()}
            for module, edited in state.get("functions", {}).items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
