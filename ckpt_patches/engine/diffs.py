"""Fixes as a unified diff against the user's own tree, for `git apply` and for an upstream pull request."""

import difflib
import os
import re
from pathlib import Path

from ckpt_patches.engine.fix import load, path_of
from ckpt_patches.engine.plan import FilePlan, Outcome, TreePlan


def tree_diff(plan: TreePlan, *, with_test: bool = False) -> bytes:
    """Every edited file of a plan as a unified diff, paths relative to the tree.

    With `with_test`, each fix that applies also adds its upstream-style regression test.
    """
    parts = [file_diff(plan.root, file) for file in plan.files.values()]
    if with_test:
        parts += [new_file_diff(*upstream_test(name)) for name in plan.named(Outcome.APPLIES) if load(name).test]
    return b"".join(parts)


def file_diff(root: str, file: FilePlan) -> bytes:
    """One edited file, byte for byte: CRLF and a missing last newline stay visible to `git apply`."""
    path = Path(os.path.relpath(file.path, root)).as_posix()
    return unified_diff(f"a/{path}", f"b/{path}", file.original, file.patched)


def upstream_test(name: str) -> tuple[str, bytes]:
    """Where a fix's upstream-style test goes in an upstream checkout, and its text."""
    path = load(name).test
    return path, Path(path_of(name)).with_name("upstream_tests").joinpath(Path(path).name).read_bytes()


def new_file_diff(path: str, text: bytes) -> bytes:
    """The addition of a file, as git writes it."""
    return b"new file mode 100644\n".join(
        [f"diff --git a/{path} b/{path}\n".encode(), unified_diff("/dev/null", f"b/{path}", b"", text)]
    )


def unified_diff(before_name: str, after_name: str, before: bytes, after: bytes, context: int = 3) -> bytes:
    """The difference between two texts, with so many lines of context; empty if there is none."""
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        lines_of(before),
        lines_of(after),
        before_name.encode(),
        after_name.encode(),
        n=context,
    )
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


def lines_of(data: bytes) -> list[bytes]:
    """Split at LF alone, as git does: a CR belongs to its line."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)
