"""Fixes as a unified diff against the user's own tree, for `git apply` and for an upstream pull request."""

import difflib
import os
import re
from pathlib import Path

from ckpt_patches.engine.fix import load, path_of
from ckpt_patches.engine.plan import FilePlan, Outcome, TreePlan


def tree_diff(plan: TreePlan, *, with_test: bool = False) -> bytes:
    """A unified diff of every edited file of a plan, with paths relative to the tree.

    With `with_test`, each fix that applies also adds its upstream-style regression test.
    """
    parts = [file_diff(plan.root, file) for file in plan.files.values()]
    if with_test:
        parts += [new_file_diff(*upstream_test(name)) for name in plan.named(Outcome.APPLIES) if load(name).test]
    return b"".join(parts)


def file_diff(root: str, file: FilePlan, before: FilePlan | None = None) -> bytes:
    """The diff of one edited file, from its original or from an earlier plan.

    It keeps CRLF and a missing final newline, as `git apply` needs.
    """
    path = Path(os.path.relpath(file.path, root)).as_posix()
    return unified_diff(f"a/{path}", f"b/{path}", before.patched if before else file.original, file.patched)


def upstream_test(name: str) -> tuple[str, bytes]:
    """The path of a fix's upstream-style test in an upstream checkout, and its text."""
    path = load(name).test
    return path, Path(path_of(name)).with_name("upstream_tests").joinpath(Path(path).name).read_bytes()


def new_file_diff(path: str, text: bytes) -> bytes:
    """A diff that adds a file, in git's format."""
    return b"new file mode 100644\n".join(
        [f"diff --git a/{path} b/{path}\n".encode(), unified_diff("/dev/null", f"b/{path}", b"", text)]
    )


def unified_diff(before_name: str, after_name: str, before: bytes, after: bytes) -> bytes:
    """A unified diff of two texts; empty if they are equal."""
    names = before_name.encode(), after_name.encode()
    lines = difflib.diff_bytes(difflib.unified_diff, _lines_of(before), _lines_of(after), *names)
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


def _lines_of(data: bytes) -> list[bytes]:
    """Split at LF only, as git does: a CR stays in its line."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)
