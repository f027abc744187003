"""What pyproject.toml cannot state: the start-up file, the pages, and packages in folders of other names."""

import os
import shutil
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
# Files outside of the packages, and the folder that they are installed in; `ckpt-patches explain` finds the pages.
PAGES = [page for folder in ("fixes", "guides", "reference") for page in sorted(Path("docs", folder).glob("*.md"))]
ADDED = {PTH: ".", **{str(page): "ckpt_patches/pages" for page in PAGES if page.stem != "symptoms"}}
# A folder in the checkout with links to the packages, by import name; an editable install puts it on sys.path.
EDITABLE = Path.cwd() / ".editable"


class BuildPy(build_py):
    """Add the start-up file and the pages to a wheel, and to a source distribution."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)  # files of another version would be installed as well
        super().run()
        for source, folder in () if self.editable_mode else ADDED.items():
            self.mkpath(os.path.join(self.build_lib, folder))
            self.copy_file(source, os.path.join(self.build_lib, folder), preserve_mode=False)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *ADDED]


class EditableWheel(editable_wheel):
    """Install one .pth file: the path of the folder with links to the packages, then the start-up line.

    For folders of other names, setuptools would install its own import hook, which takes milliseconds at every start.
    """

    def run(self) -> None:
        super().run()
        from wheel.wheelfile import WheelFile  # of setuptools, or of its own copy

        EDITABLE.mkdir(exist_ok=True)
        for name, source in PACKAGES.items():  # atomically: a running process always finds them
            temporary = EDITABLE / f".{name}.{os.getpid()}"
            temporary.symlink_to(Path("..", source))
            os.replace(temporary, EDITABLE / name)
        (path,) = Path(self.dist_dir).glob("*editable*.whl")
        with zipfile.ZipFile(path) as built:
            metadata = {name: built.read(name) for name in built.namelist() if ".dist-info/" in name}
        with WheelFile(path, "w") as wheel:  # which adds RECORD
            wheel.writestr(PTH, os.fsencode(EDITABLE) + b"\n" + Path(PTH).read_bytes())
            for name in sorted(metadata.keys() - {wheel.record_path}):
                wheel.writestr(name, metadata[name])


for command in {"install", "develop"} & {*sys.argv[1:]}:  # an egg or a link: Python reads no .pth file of either
    raise SystemExit(f"error: setup.py {command} leaves the import hook out; use: pip install .")

below = [f"{name}.{inner}" for name, folder in PACKAGES.items() for inner in find_namespace_packages(folder)]
setup(
    license="Apache-2.0",  # setuptools 65 and current releases expect different forms of it in pyproject.toml
    package_dir=PACKAGES,
    packages=[name for name in (*PACKAGES, *below) if "__pycache__" not in name],
    cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel},
)
