"""A small installed megatron-core with a RECORD and modules that fixes edit, for tests of apply and revert."""

import base64
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ckpt_patches.engine.plan import Outcome
from ckpt_patches.engine.registry import CORE
from ckpt_patches.inplace import rewrite
from small_tree import PACKAGE_INFO, RELEASE, UPSTREAM
from upstream import tree as tree_of_release

PRODUCT, ZARR_FIX = "numpy2_product", "zarr_create_synchronizer"
SAME_FILE = ("async_dead_worker", "async_save_staging")  # both edit ASYNC
NAMES = (PRODUCT, ZARR_FIX, *SAME_FILE)
FOLDER = "megatron/core/dist_checkpointing"
ZARR, ASYNC = f"{FOLDER}/strategies/zarr.py", f"{FOLDER}/strategies/async_utils.py"
EDITED = (f"{FOLDER}/exchange_utils.py", f"{FOLDER}/mapping.py", ZARR, ASYNC)
ZARR_TEXT = """import zarr


def _create_zarr_array(sharded_tensor, checkpoint_dir):
    return zarr.create(1, store=checkpoint_dir)


def load_zarr_based_sharded_metadata(checkpoint_dir):
    return [subdir for subdir in checkpoint_dir if not (subdir / ".zarray").exists()]
"""
FIXED = UPSTREAM.replace("np.product", "np.prod")
TEXTS = {
    "megatron/core/__init__.py": "",
    "megatron/core/package_info.py": PACKAGE_INFO,
    f"{FOLDER}/__init__.py": "",
    f"{FOLDER}/exchange_utils.py": UPSTREAM,
    f"{FOLDER}/mapping.py": UPSTREAM,
    f"{FOLDER}/serialization.py": FIXED,
    f"{FOLDER}/validation.py": FIXED,
    f"{FOLDER}/strategies/fully_parallel.py": FIXED,
    ZARR: ZARR_TEXT,
}
DIST_INFO = "megatron_core-0.14.0.dist-info"
OURS = f".ckpt-patches/{CORE}"  # our folder in the tree


@contextlib.contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A temporary folder in memory, if possible, where a sync takes no time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def make_installed(root: Path) -> Path:
    """Write the tree; return its root."""
    for name, text in TEXTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shutil.copyfile(tree_of_release("megatron-core", RELEASE) / ASYNC, root / ASYNC)
    rows = [record_row(root, path) for path in sorted(root.rglob("*")) if path.is_file()]
    (root / DIST_INFO).mkdir()
    record = "".join(f"{row}\r\n" for row in [*rows, f"{DIST_INFO}/RECORD,,"])
    (root / DIST_INFO / "RECORD").write_bytes(record.encode())
    return root


def record_row(root: Path, path: Path) -> str:
    data = path.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path.relative_to(root).as_posix()},sha256={digest},{len(data)}"


Everything = dict[str, tuple[bytes | str | None, int, int]]


def everything(root: Path) -> Everything:
    """Every path but bytecode: content or link target (None for a folder), mode, owner."""
    found: Everything = {}
    for path in sorted(root.rglob("*")):
        if "__pycache__" not in path.parts:
            status = path.lstat()
            text = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            found[str(path.relative_to(root))] = text, status.st_mode, status.st_uid
    return found


def of_the_package(found: Everything) -> Everything:
    """Without our folder and temporary files: upstream's files and RECORD."""
    return {path: content for path, content in found.items() if ".ckpt-patches" not in path}


def apply(root: Path, *names: str) -> list[str]:
    """Apply these fixes, or all four; return those that apply."""
    return rewrite.apply(str(root), CORE, names or NAMES).named(Outcome.APPLIES)


def revert(root: Path, *names: str) -> list[str]:
    return rewrite.revert(str(root), CORE, names or NAMES)
