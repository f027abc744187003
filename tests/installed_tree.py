"""A small installed megatron-core with a RECORD and two modules that fixes edit, for tests of apply and revert."""

import base64
import hashlib
import os
from pathlib import Path

from ckpt_patches.engine.registry import CORE
from ckpt_patches.inplace import rewrite
from small_tree import make

PRODUCT, ZARR_FIX = "numpy2_product", "zarr_create_synchronizer"
ZARR = "megatron/core/dist_checkpointing/strategies/zarr.py"
ZARR_TEXT = """import zarr


def _create_zarr_array(sharded_tensor, checkpoint_dir):
    return zarr.create(1, store=checkpoint_dir)


def load_zarr_based_sharded_metadata(checkpoint_dir):
    return [subdir for subdir in checkpoint_dir if not (subdir / ".zarray").exists()]
"""
DIST_INFO = "megatron_core-0.14.0.dist-info"


def make_installed(root: Path) -> Path:
    """Write the tree; return its root."""
    make(root)
    (root / ZARR).parent.mkdir(exist_ok=True)
    (root / ZARR).write_text(ZARR_TEXT)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    rows = [record_row(root, path) for path in files]
    (root / DIST_INFO).mkdir()
    record = "".join(f"{row}\r\n" for row in [*rows, f"{DIST_INFO}/RECORD,,"])
    (root / DIST_INFO / "RECORD").write_bytes(record.encode())
    return root


def record_row(root: Path, path: Path) -> str:
    data = path.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path.relative_to(root).as_posix()},sha256={digest},{len(data)}"


def everything(root: Path) -> dict[str, tuple[bytes | str | None, int, int]]:
    """Every path: content or link target (None for a folder), mode, owner."""
    found: dict[str, tuple[bytes | str | None, int, int]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        text = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = text, status.st_mode, status.st_uid
    return found


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file except bytecode, with its bytes and mode."""
    files = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode) for path in files}


def apply(root: Path, *names: str) -> list[str]:
    plan = rewrite.apply(str(root), CORE, names or (PRODUCT, ZARR_FIX))
    return [result.outcome.value for result in plan.results]


def revert(root: Path, *names: str) -> list[str]:
    return rewrite.revert(str(root), CORE, names or (PRODUCT, ZARR_FIX))
