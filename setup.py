"""Package the project, with the start-up file in site-packages.

Metadata is here and not in pyproject.toml because setuptools 65 and current releases expect different forms there.
"""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

# Python runs a line of a .pth file at start-up only if the file is in site-packages itself. The line must never stop
# Python from starting, and is idempotent: Python runs the .pth files of a virtual environment twice.
PTH = "training_checkpoint_patches.pth"
# By import name, the folder in this repository; in the order in which fixes are listed. A folder megatron/ in
# site-packages would look like an installed Megatron, so the fixes in ours are installed under another name.
PACKAGES = {
    "ckpt_patches": "ckpt_patches",
    "megatron_patches": "megatron/patches",
    "deepspeed_patches": "deepspeed_patches",
    "nvrx_patches": "nvrx_patches",
    "apex_patches": "apex_patches",
    "torch_patches": "torch_patches",
}
# The pages of docs/ (but not of its folders), where `ckpt-patches explain` finds them.
PAGES = Path("ckpt_patches", "pages")
NOT_INSTALLED = ("README", "architecture", "symptoms")
# A folder in the checkout with links to the packages, by import name; an editable install puts it on sys.path.
EDITABLE = ".editable"


class BuildPy(build_py):
    """Add the start-up file to a wheel, and to a source distribution."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)  # files of another version would be installed as well
        super().run()
        for source, target in self._added().items():
            Path(target).parent.mkdir(exist_ok=True)
            self.copy_file(source, target, preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._added().values()]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), PTH, *map(str, _pages())]

    def _added(self) -> dict[str, str]:
        """The targets of files outside of all packages, by source; an editable install uses the files in place."""
        if self.editable_mode:
            return {}
        pages = {str(page): str(Path(self.build_lib, PAGES, page.name)) for page in _pages()}
        return {PTH: str(Path(self.build_lib, PTH)), **pages}


class EditableWheel(editable_wheel):
    """Install one .pth file: the path of the folder with links to the packages, then the start-up line.

    For packages in folders of other names, setuptools would install its own import hook, which takes milliseconds at
    every start.
    """

    def run(self) -> None:
        super().run()
        (wheel,) = Path(self.dist_dir).glob("*editable*.whl")
        folder = Path.cwd() / EDITABLE
        _link_packages(folder)
        _replace_files(wheel, PTH, os.fsencode(folder) + b"\n" + Path(PTH).read_bytes())


def _pages() -> list[Path]:
    """The pages to install."""
    return sorted(page for page in Path("docs").glob("*.md") if page.stem not in NOT_INSTALLED)


def _link_packages(folder: Path) -> None:
    """Create the links to the packages in one folder, atomically: a running process always finds them."""
    folder.mkdir(exist_ok=True)
    for name, source in PACKAGES.items():
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.symlink_to(Path("..", source))
        os.replace(temporary, folder / name)


def _replace_files(wheel: Path, name: str, data: bytes) -> None:
    """Replace all files that a finished wheel installs by one file, and update RECORD; other metadata stays."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = {entry: archive.read(entry) for entry in archive.namelist() if ".dist-info/" in entry}
    (record,) = (entry for entry in metadata if entry.endswith("/RECORD"))
    rows = [row for row in metadata.pop(record).splitlines() if b".dist-info/" in row.split(b",")[0]]
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    rows.insert(0, f"{name},sha256={digest},{len(data)}".encode())
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in {name: data, **metadata, record: b"\n".join(rows) + b"\n"}.items():
            archive.writestr(entry, content)


def _packages(name: str) -> list[str]:
    """A package and its subpackages; a folder needs no __init__.py."""
    inner = find_namespace_packages(PACKAGES[name], exclude=["*__pycache__*"])
    return [name, *(f"{name}.{below}" for below in inner)]


def _version() -> str:
    """The version, read without an import: building must not depend on running the project."""
    found = re.search(r'^__version__ = "(.+)"$', Path("ckpt_patches/__init__.py").read_text(encoding="utf-8"), re.M)
    assert found, 'expected a line __version__ = "..." in ckpt_patches/__init__.py'
    return found[1]


def _urls() -> dict[str, str]:
    """The project's URLs. Its own is the URL that it was cloned from, if that is public."""
    urls = {
        "Megatron-LM": "https://github.com/NVIDIA/Megatron-LM",
        "DeepSpeed": "https://github.com/deepspeedai/DeepSpeed",
    }
    try:
        asked = ["git", "config", "--file", ".git/config", "--get", "remote.origin.url"]
        origin = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        origin = ""
    is_public = re.fullmatch(r"https://[^@\s]+", origin)  # no password, and no folder of this machine
    return {"Source": origin, **urls} if is_public else urls


# Megatron's zarr strategy needs ProcessSynchronizer, which zarr 3 lacks; zarr 2 needs code that numcodecs 0.16 dropped.
MEGATRON = ["zarr>=2.16,<3", "numcodecs>=0.11,<0.16", "tensorstore"]
# DeepSpeed's own requirements without torch and the compiled parts, and those for building its source distribution.
DEEPSPEED = ["einops", "hjson", "msgpack", "ninja", "numpy", "packaging", "psutil", "py-cpuinfo", "pydantic>=2", "tqdm"]
# For `ckpt-patches audit` and `repair`.
AUDIT = ["numpy", "isal"]
# NumPy 1, where available, for unpatched megatron-core below 0.16 (np.product); setuptools below 81 for the
# pkg_resources of megatron-core 0.7 and 0.8. typeguard, beartype and wrapt have import hooks of their own.
TEST = [
    "torch==2.13.0",
    "numpy<2; python_version < '3.13'",
    "setuptools>=65,<81",
    "wheel",
    "pytest>=8",
    "pytest-xdist>=3",
    "hypothesis>=6",
    "typeguard>=4",
    "beartype",
    "wrapt",
    "expecttest",  # what the tests of torch import
    "huggingface_hub",  # what DeepSpeed's zero_to_fp32.py imports
    # Upstream's own linters, in its versions: tests/test_upstream_style.py.
    "black>=26,<27",
    "isort==5.13.2",
    "pylint==3.2.6",
    "yapf==0.40.2",
    "flake8==5.0.4",  # with pyflakes, which the contract of the fixes runs
    "twine>=6",
    "check-wheel-contents>=0.6",
    "ruff==0.17.5",
    "mypy==2.4.1",
    "codespell==2.4.3",
    "check-jsonschema==0.39.0",  # for .github/workflows
]

README = Path("README.md")

# These install an egg or a link: Python reads no .pth file of either, and no fix would be active.
if refused := {"install", "develop"} & {*sys.argv[1:]}:
    raise SystemExit(f"error: setup.py {refused.pop()} leaves the import hook out; use: pip install .")

setup(
    name="training-checkpoint-patches",
    version=_version(),
    description="Checkpoint fixes for megatron-core, DeepSpeed, nvidia-resiliency-ext, apex and torch, as installed",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    project_urls=_urls(),
    python_requires=">=3.10",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
    ],
    package_dir=PACKAGES,
    packages=[package for name in PACKAGES for package in _packages(name)],
    package_data={name: ["py.typed"] for name in PACKAGES},
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
