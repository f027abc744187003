"""Before pip uninstalls this package: say which files keep fixes."""

import re
from collections.abc import Sequence

from ckpt_patches import tell
from ckpt_patches.engine.installed import DISTRIBUTIONS, locate, state_folder
from ckpt_patches.engine.registry import PACKAGES

OURS = "training-checkpoint-patches"


def tell_what_stays(arguments: Sequence[str]) -> None:
    """Print which packages of this Python `ckpt-patches apply` has edited, if pip is called to uninstall this one."""
    # https://packaging.python.org/en/latest/specifications/name-normalization/
    if OURS not in (re.sub("[-_.]+", "-", argument).lower() for argument in arguments):
        return
    roots = {package: root for package in PACKAGES if (root := locate(package))}
    edited = [DISTRIBUTIONS[package] for package, root in roots.items() if state_folder(root, package).exists()]
    if edited:
        tell(f"WARNING: fixes stay in the files of {', '.join(edited)}: run `ckpt-patches revert` before the uninstall")
