"""Run the command on trees with this Python, in one process: diff, status, apply and revert.

Prints one line of JSON: for each tree the output, the files that `apply` changed, and whether `revert` restored every
byte.

    own_fixes.py TREE…    copies, which are edited
"""

import contextlib
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from ckpt_patches.cli import main as command


def main() -> None:
    print(json.dumps({Path(tree).name: results_on(tree) for tree in sys.argv[1:]}))


def results_on(tree: str) -> dict[str, Any]:
    sys.path.insert(0, tree)
    before = digests(tree)
    fixes = json.loads(output("status", "--json")[0])["fixes"]
    found: dict[str, Any] = {"diff": output("diff", "--tree", tree)}
    found["fixes"] = [fix for fix in fixes if fix["package"] != "torch"]  # which this Python may have
    found["apply"] = output("apply", "--tree", tree)
    applied = digests(tree)
    found["applied"] = {path: digest for path, digest in applied.items() if before.get(path) != digest}
    found["revert"] = output("revert", "--tree", tree)
    found["as before"] = digests(tree) == before
    sys.path.remove(tree)
    return found


def output(*arguments: str) -> tuple[str, str, int]:
    """The command's standard output, standard error and exit status."""
    out, said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        status = command(arguments)
    out.flush()
    return out.buffer.getvalue().decode(), said.getvalue(), status


def digests(tree: str) -> dict[str, str]:
    """The SHA-256 of every file, by path."""
    files = sorted(path for path in Path(tree).rglob("*") if path.is_file())
    return {str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


main()
