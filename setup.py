"""Package the project; besides the usual, put the start-up file into site-packages.

Metadata stands here and not in pyproject.toml because setuptools 65 and current ones do not agree on its form there.
"""

import base64
import hashlib
import re
import zipfile
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

# Python runs a line of a .pth file at start-up only if it lies in site-packages itself. It sorts behind the
# __editable__*.pth of an editable install, which has put the packages on sys.path by then. It must never stop Python
# from starting, and acts once although Python runs the .pth files of a virtual environment twice.
PTH = "training_checkpoint_patches.pth"
# What goes beside the packages; the text file says why it is there.
FILES = (PTH, "megatron/patches.txt")


class BuildPy(build_py):
    """Add the files that are not in a package to a wheel, and to a source distribution."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in FILES:
                self.copy_file(name, str(Path(self.build_lib, name)), preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(str(Path(self.build_lib, name)) for name in FILES)]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *FILES]


class EditableWheel(editable_wheel):
    """Add the start-up file to the wheel of an editable install, which takes no files from the build."""

    def run(self) -> None:
        super().run()
        (wheel,) = Path(self.dist_dir).glob("*editable*.whl")
        _add_to_wheel(wheel, Path(PTH))


def _add_to_wheel(wheel: Path, file: Path) -> None:
    """Add a file to the root of a finished wheel, and its row to RECORD (a zip's entry cannot be changed in place)."""
    with zipfile.ZipFile(wheel) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    data = file.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    row = f"{file.name},sha256={digest},{len(data)}\n".encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(file.name, data)
        for info, content in entries:
            archive.writestr(info, row + content if info.filename.endswith(".dist-info/RECORD") else content)


def _version() -> str:
    """Read, not imported: nothing of the project has to work for it to be built."""
    found = re.search(r'^__version__ = "(.+)"$', Path("ckpt_patches/__init__.py").read_text(encoding="utf-8"), re.M)
    assert found, 'expected a line __version__ = "..." in ckpt_patches/__init__.py'
    return found[1]


# zarr 3 has no ProcessSynchronizer, which Megatron's zarr strategy needs, zarr 2 what numcodecs 0.16 dropped.
MEGATRON = ["zarr>=2.16,<3", "numcodecs>=0.11,<0.16", "tensorstore"]
# What DeepSpeed itself asks for, less torch and the compiled parts; and what builds its source distribution.
DEEPSPEED = ["einops", "hjson", "msgpack", "ninja", "numpy", "packaging", "psutil", "py-cpuinfo", "pydantic>=2", "tqdm"]
# Of `ckpt-patches audit` and `repair`; matplotlib for pictures only.
AUDIT = ["numpy", "matplotlib", "isal"]
# NumPy 1 for the unpatched megatron-core below 0.16 (np.product), setuptools below 81 for the pkg_resources
# of megatron-core 0.7 and 0.8. typeguard, beartype and wrapt bring import hooks of their own.
TEST = [
    "torch==2.13.0",
    "numpy<2",
    "setuptools>=65,<81",
    "wheel",
    "pytest>=8",
    "pytest-xdist>=3",
    "hypothesis>=6",
    "typeguard>=4",
    "beartype",
    "wrapt",
    "ruff==0.17.5",
    "mypy==2.4.1",
]

README = Path("README.md")

setup(
    name="training-checkpoint-patches",
    version=_version(),
    description="Checkpoint fixes for megatron-core and DeepSpeed, active on the installed packages",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir={"": "."},  # setuptools answers an editable install with a plain path in a .pth, not an import hook
    # No __init__.py in megatron/: upstream's `megatron` is a namespace package, ours is one more portion of it.
    packages=find_namespace_packages(
        include=["ckpt_patches*", "deepspeed_patches*", "megatron.patches*"], exclude=["*__pycache__*"]
    ),
    entry_points={"console_scripts": ["ckpt-patches = ckpt_patches.cli:main"]},
    install_requires=[],  # never pulls another torch into a container whose torch was built by hand
    extras_require={
        "megatron": MEGATRON,
        "deepspeed": DEEPSPEED,
        "audit": AUDIT,
        "test": [*MEGATRON, *DEEPSPEED, *AUDIT, *TEST],
    },
    cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel},
)
