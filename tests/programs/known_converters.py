"""Print the rows of `known.py` of the one-pass converter: known_converters.py TREE...

A tree has `deepspeed/`: a checkout, or what `pip install --no-deps --target` makes. Of each release the digest of the
converter's file, and those of its syntax tree as it is and with all fixes of this project in it. What several releases
share is printed once, with the first of them.
"""

import sys
from pathlib import Path

from ckpt_patches.engine.installed import version_in
from ckpt_patches.engine.plan import plan_tree
from ckpt_patches.engine.registry import DEEPSPEED
from deepspeed_patches.ds_to_universal import syntax
from deepspeed_patches.ds_to_universal.traits import CONVERTER

MODULE = "deepspeed.checkpoint.ds_to_universal"


def row(tree: Path) -> tuple[str, str, str]:
    """The digests of one release; the last one is empty where no fix edits its converter."""
    data = (tree / CONVERTER).read_bytes()
    edited = plan_tree(str(tree), DEEPSPEED).files.get(MODULE)
    return syntax.shortened(data), syntax.read(data).digest, syntax.read(edited.patched).digest if edited else ""


def main() -> None:
    seen = set()
    for tree in map(Path, sys.argv[1:]):
        found = row(tree)
        if found not in seen:
            print(f"{version_in(tree, DEEPSPEED)} {' '.join(found)}".rstrip())
        seen.add(found)


if __name__ == "__main__":
    main()
