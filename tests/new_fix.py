"""Create the files of a new fix from the templates in docs/new_fix/; CONTRIBUTING.md describes what goes into them.

python tests/new_fix.py lost_momentum --module deepspeed.runtime.engine --upstream https://github.com/…/issues/1
"""

import argparse
import re
import sys
from pathlib import Path
from string import Template

from ckpt_patches.engine.registry import APEX, CORE, DEEPSPEED, EVERYTHING, FOLDERS, NVRX, PART_OF, TORCH, package_with
from ckpt_patches.errors import UserError
from ckpt_patches.runtime.durable import replace_durably
from upstream import REPOSITORY

TEMPLATES = "docs/new_fix"
CHANGES = "CHANGELOG.md"
TITLES = {CORE: "megatron-core", DEEPSPEED: "DeepSpeed", NVRX: "nvidia-resiliency-ext", APEX: "apex", TORCH: "torch"}
UPSTREAM_TESTS = {
    CORE: "tests/unit_tests/dist_checkpointing",
    DEEPSPEED: "tests/unit/checkpoint",
    NVRX: "tests/checkpointing/unit",
    APEX: "tests/L0/run_optimizers",
    TORCH: "test/distributed/checkpoint",
}
LICENSES = {
    CORE: "# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.",
    DEEPSPEED: "# Copyright (c) DeepSpeed Team.\n# SPDX-License-Identifier: Apache-2.0\n\n# DeepSpeed Team",
    NVRX: "# SPDX-FileCopyrightText: Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.\n"
    "# SPDX-License-Identifier: Apache-2.0",
    APEX: "",
    TORCH: '# Owner(s): ["oncall: distributed checkpointing"]',
}
UNRELEASED = "## [Unreleased]\n"
ADDED = "\n### Added\n"
NEXT = """
Next, in this order:
  1. {folder}/demos/{name}.py: what users do, on the real release,
     until `python tests/demo.py {name}` shows the bug
  2. {folder}/{name}.py: `releases` and the other facts, `has_the_bug`, and the edit,
     until `ckpt-patches diff {name} --tree TREE` is the change that you want
  3. {folder}/upstream_tests/test_{name}.py: the test for upstream's suite,
     which fails before and passes after
  4. docs/{name}.md, whose section `## Change: …` is the commit message, and the line in {changes}
  5. `python tests/fix_tables.py`: the tables
  6. CKPT_PATCHES_TEST_ALL=1 pytest tests/contract -k {name}: every release
  7. tests/test_{name}.py, where more than the demonstration is particular to this fix
`make quick` fails until 1 and 5 are done, `make test` until 1 to 5 are. CONTRIBUTING.md has each of them in full.
"""


def files(root: Path, name: str, module: str, upstream: str) -> dict[Path, str]:
    """The text of each file to create or change, by path.

    Raises:
        UserError: the name is taken or invalid, or the module is of no upstream package.
    """
    package = _package_of(module)
    _check(name)
    folder = folder_of(module)
    style = "deepspeed" if package == DEEPSPEED else "megatron"  # of upstream's tests
    values = {
        "name": name,
        "words": name.title().replace("_", ""),
        "module": module,
        "upstream": upstream,
        "folder": folder,
        "title": TITLES[package],
        "license": LICENSES[package],
        "test": f"{UPSTREAM_TESTS[package]}/test_{name}.py",
    }
    made = {
        "fix.py": f"{folder}/{name}.py",
        f"upstream_test_{style}.py": f"{folder}/upstream_tests/test_{name}.py",
        "demo.py": f"{folder}/demos/{name}.py",
        "page.md": f"docs/{name}.md",
    }
    found = {root / path: _filled(root, template, values) for template, path in made.items()}
    if there := [str(path) for path in found if path.exists()]:
        raise UserError(f"expected no file of that name yet, found {', '.join(there)}")
    changes = root / CHANGES
    found[changes] = _with_entry(changes.read_text(encoding="utf-8"), name)
    return found


def folder_of(module: str) -> str:
    """The folder in a clone with the fixes of a module's package."""
    return FOLDERS[_package_of(module)][-1]


def _package_of(module: str) -> str:
    if (package := package_with(module)) in FOLDERS:
        return package
    raise UserError(f"expected a module of {' or '.join((*FOLDERS, *PART_OF))}, found {module}")


def _check(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"expected a name in small letters, digits and underscores, found {name!r}")
    if name in EVERYTHING:
        raise UserError(f"there is a fix {name} already")


def _filled(root: Path, template: str, values: dict[str, str]) -> str:
    path = root / TEMPLATES / f"{template}.template"
    return Template(path.read_text(encoding="utf-8")).substitute(values)


def _with_entry(changes: str, name: str) -> str:
    before, heading, after = changes.partition(UNRELEASED)
    unreleased, end, older = after.partition("\n## [")
    start, _, rest = unreleased.partition(ADDED) if ADDED in unreleased else ("", "", unreleased)
    return f"{before}{heading}{start}{ADDED}- Added `{name}`: what it changes, in which releases.\n{rest}{end}{older}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Create the files of a new fix. CONTRIBUTING.md describes the steps.")
    parser.add_argument("name", metavar="NAME", help="for the bug, such as universal_step")
    parser.add_argument("--module", required=True, help="which the fix edits, as megatron.core.optimizer.optimizer")
    parser.add_argument("--upstream", required=True, metavar="URL", help="of the report, or of the code with the bug")
    options = parser.parse_args()
    try:
        found = files(REPOSITORY, options.name, options.module, options.upstream)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for path, text in found.items():
        replace_durably(path, text.encode())
        print(path.relative_to(REPOSITORY))
    print(NEXT.format(name=options.name, folder=folder_of(options.module), changes=CHANGES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
