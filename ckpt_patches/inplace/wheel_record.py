"""The RECORD of an installed distribution: a row `path,sha256=<digest>,<bytes>` for every file.

https://packaging.python.org/en/latest/specifications/recording-installed-packages/
"""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from ckpt_patches.engine.installed import DISTRIBUTIONS


def record_path(root: Path, package: str) -> Path | None:
    """The RECORD of an upstream package in a tree; None in a checkout."""
    name = DISTRIBUTIONS[package].replace("-", "_")
    found = sorted(root.glob(f"{name}-*.dist-info/RECORD"))
    return found[0] if found else None


def row(path: str, data: bytes) -> str:
    """A file's row."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}"


def rows(record: bytes) -> dict[str, str]:
    """Every row, by its path. Rows with a quoted path keep the quotes and are never ours."""
    return {line.split(",", 1)[0]: line for line in record.decode().splitlines() if line}


def with_rows(record: bytes, changed: Mapping[str, str | None]) -> bytes:
    """A RECORD with these rows (by path) replaced, added at the end, or (None) removed; all others unchanged."""
    newline = "\r\n" if b"\r\n" in record else "\n"
    kept = rows(record)
    kept.update({path: text for path, text in changed.items() if text is not None})
    return "".join(line + newline for path, line in kept.items() if changed.get(path, line) is not None).encode()
