"""The upstream packages, and the folders with their fixes."""

import os
from typing import NamedTuple

from ckpt_patches import ROOTS

CORE = "megatron.core"
TRAINING = "megatron.training"
DEEPSPEED = "deepspeed"
NVRX = "nvidia_resiliency_ext"
APEX = "apex"
TORCH = "torch.distributed.checkpoint"


class Package(NamedTuple):
    """An upstream package, its fixes, and its releases that the tests ran on, oldest first."""

    root: str  # of its modules
    folders: tuple[str, ...]  # of its fixes, next to this package: the name in an install, and that in a checkout
    releases: tuple[str, ...]

    @property
    def distribution(self) -> str:
        return ROOTS[self.root]

    @property
    def title(self) -> str:
        return "DeepSpeed" if self.root == DEEPSPEED else self.distribution


# Statements about a bug hold for these releases only. For older ones of megatron-core and DeepSpeed, only those fixes
# have forms whose own releases begin earlier.
PACKAGES = {
    package.root: package
    for package in (
        Package(
            CORE,
            ("megatron_patches", "megatron/patches"),
            (
                *("0.12.0", "0.12.1", "0.12.2", "0.12.3", "0.13.0", "0.13.1", "0.14.0"),
                *("0.15.0", "0.15.1", "0.15.2", "0.15.3", "0.16.0", "0.16.1", "0.17.0", "0.17.1"),
                *("0.18.0", "0.18.2", "0.19.0", "0.19.2"),
            ),
        ),
        Package(
            DEEPSPEED,
            ("deepspeed_patches",),
            (
                *(f"0.15.{number}" for number in range(5)),
                *(f"0.16.{number}" for number in range(10)),
                *(f"0.17.{number}" for number in range(7)),
                *(f"0.18.{number}" for number in range(10)),
                *(f"0.19.{number}" for number in range(9)),
            ),
        ),
        Package(NVRX, ("nvrx_patches",), ("0.4.1", "0.5.0", "0.6.0")),
        Package(APEX, ("apex_patches",), ("0.1",)),  # of every commit; tests/upstream.py names the tested one
        Package(
            TORCH,
            ("torch_patches",),
            (
                *("2.2.2", "2.3.1", "2.4.1", "2.5.1", "2.6.0", "2.7.1", "2.8.0"),
                *("2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1"),
            ),
        ),
    )
}
# A root whose modules ship with another root: in the same checkout and, since megatron-core 0.17, in the same wheel.
# The fixes share one folder; the import hook plans them separately, as most programs import only megatron.core.
PART_OF = {TRAINING: CORE}


def folder(package: str) -> str:
    """The folder with an upstream package's fixes."""
    # An editable install that is older than a folder has no link to it: then use the checkout's folder.
    packages = [os.path.dirname(os.path.dirname(path(__file__))) for path in (os.path.abspath, os.path.realpath)]
    folders = [os.path.join(os.path.dirname(beside), name) for beside in packages for name in PACKAGES[package].folders]
    return next(filter(os.path.isdir, folders), folders[0])


def root_of(module: str) -> str:
    """The root in `ROOTS` that contains a module; empty if none does."""
    return next((root for root in ROOTS if module == root or module.startswith(f"{root}.")), "")
