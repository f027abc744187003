"""Fixes in the format of `git format-patch`: a numbered series of commits, each with its test and its page's message.

A fix that the newest release does not need is a patch for older trees alone: it has no test, and its message is the
first line of its file.
"""

import os
import re
import subprocess
import textwrap
from collections.abc import Iterable
from email.header import Header
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple

from ckpt_patches.engine.diffs import file_diff, new_file_diff, upstream_test
from ckpt_patches.engine.fix import Fix, load, sentence, with_dependencies
from ckpt_patches.engine.plan import FilePlan, FixResult, Outcome, fixes_for, plan_tree
from ckpt_patches.engine.registry import APEX, CORE, DEEPSPEED, NVRX, PACKAGES, TORCH
from ckpt_patches.errors import UserError

WIDTH = 72  # characters per line of a commit message
PAGES = ("fixes", "guides", "reference")  # the folders of docs/ whose pages are installed
INDEXES = ("symptoms",)  # pages that repeat what others have: not installed
_SECTION = re.compile(r"^## Change: ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
CONDITION = re.compile(r"<!-- (if|unless)=(\S+) -->\n")
_LABEL = re.compile(r"\A\*[^*\n]+\* ")
REPOSITORIES = {  # whose issues a patch closes
    CORE: "NVIDIA/Megatron-LM",
    DEEPSPEED: "(?:deepspeedai|microsoft)/DeepSpeed",
    NVRX: "NVIDIA/nvidia-resiliency-ext",
    APEX: "NVIDIA/apex",
    TORCH: "pytorch/pytorch",
}
NO_COMMIT = "0" * 40  # a placeholder commit hash
MIME = "MIME-Version: 1.0\nContent-Type: text/plain; charset=UTF-8\nContent-Transfer-Encoding: 8bit"


class Message(NamedTuple):
    """A commit message for upstream reviewers."""

    subject: str
    body: str


class Series(NamedTuple):
    """The patches of one upstream package, and the outcome of every requested fix and its dependencies."""

    files: dict[str, bytes]  # by name, numbered for `git am`: each applies on top of those before it
    results: list[FixResult]


def plan_series(root: str, package: str, names: Iterable[str]) -> Series:
    """The patches of these fixes and their dependencies against a tree.

    Raises:
        UserError: git names no author, a file of the tree is unreadable, or a page has no message.
    """
    wanted = with_dependencies(names)
    results: dict[str, FixResult] = {}
    changes: dict[str, bytes] = {}
    before: dict[str, FilePlan] = {}
    for name in (name for name in fixes_for(package) if name in wanted):
        plan = plan_tree(root, package, [*changes, name], for_upstream=True)
        plan.check_readable()
        results[name] = plan.results[-1]
        unmet = [other for other in load(name).depends_on if results[other].outcome is Outcome.NO_MATCH]
        if unmet and results[name].outcome is Outcome.APPLIES:
            reason = f"it depends on {unmet[0]}, which does not match: {results[unmet[0]].reason}"
            results[name] = FixResult(name, Outcome.NO_MATCH, reason)
        if results[name].outcome is Outcome.APPLIES:
            own = [file for file in plan.files.values() if name in file.fixes]
            changes[name] = b"".join(file_diff(root, file, before.get(file.module)) for file in own)
            before = plan.files
    messages = {name: message_of(name, change) for name, change in changes.items()}
    head = _head(root) if changes else ""
    files = {}
    for number, (name, message) in enumerate(messages.items(), start=1):
        needs = [messages[other].subject for other in load(name).depends_on if other in messages]
        facts = [*(_wrapped(f"Depends on: {subject}") for subject in needs), *trailers(load(name))]
        subject = f"Subject: [PATCH {number}/{len(messages)}] {message.subject}"
        text = "\n".join([head, subject, MIME, "", message.body, "", *facts, "---", ""])
        test = new_file_diff(*upstream_test(name)) if load(name).test else b""
        files[f"{number:04}-{name}.patch"] = text.encode() + changes[name] + test
    return Series(files, list(results.values()))


def _head(root: str) -> str:
    """The first lines of a patch, with the author that git has configured for commits in a tree.

    Raises:
        UserError: git has no author, or is not installed.
    """
    try:
        done = subprocess.run(["git", "-C", root, "var", "GIT_AUTHOR_IDENT"], capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"expected git, which names the author of the patches, found none: {error}") from None
    found = re.fullmatch(r"(.*) <(.*)> (\d+) \S+", done.stdout.strip())
    if found is None:
        said = f"{done.stdout}{done.stderr}".strip().splitlines()[-1:]
        raise UserError(f"git names no author for the patches ({''.join(said)}): set git's user.name and user.email")
    author = f"{Header(found[1]).encode()} <{found[2]}>"
    return f"From {NO_COMMIT} Mon Sep 17 00:00:00 2001\nFrom: {author}\nDate: {formatdate(int(found[3]))}"


def trailers(fix: Fix) -> list[str]:
    """The last lines of a message: the releases with the bug, any test that shows it, the reports, and other links."""
    package = PACKAGES[fix.package].distribution
    ranges = (first if first == last else f"{first} to {last}" for first, last in fix.releases)
    issue = re.compile(rf"https://github.com/{REPOSITORIES[fix.package]}/issues/\d+")
    reports = sorted(fix.upstream, key=lambda link: not issue.fullmatch(link))
    return [
        _wrapped(f"Affected: {package} {', '.join(ranges)}"),
        *([f"Fails without this change: pytest {fix.test}"] if fix.test else []),
        *(f"{'Fixes' if issue.fullmatch(link) else 'See'}: {link}" for link in reports),
    ]


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith(("- ", "Depends on: ", "Affected: ")) else ""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def message_of(name: str, change: bytes) -> Message:
    """The message of a patch: of its page, if the newest release needs the fix, else the first line of its file."""
    if load(name).test:
        return message_in(page(name).read_text(encoding="utf-8"), name, change)
    line = sentence(name)
    return Message(textwrap.shorten(line.removesuffix("."), WIDTH, placeholder=" …"), _wrapped(line))


def message_in(text: str, name: str, change: bytes) -> Message:
    """The message of a patch, from the section `## Change: SUBJECT` of the fix's page.

    A paragraph under the comment `<!-- if=WORD -->` is for patches that change a line with WORD in the package itself,
    one under `<!-- unless=WORD -->` for the others. The words in italics that begin a paragraph are for the page alone.

    Raises:
        UserError: the page has no such section, or the section no paragraph for this patch.
    """
    section = _SECTION.search(text)
    if section is None:
        raise UserError(f"expected `## Change: …`, the subject of the commit, in the page of {name}, found none")
    changed = "\n".join(line for line in change.decode().splitlines() if line.startswith(("+", "-")))
    body = []
    for paragraph in re.split(r"\n\s*\n", section[2].strip()):
        condition = CONDITION.match(paragraph)
        if condition is None or (condition[2] in changed) is (condition[1] == "if"):
            body.append(_plain(paragraph[condition.end() if condition else 0 :]))
    if not any(body):
        raise UserError(f"expected a paragraph for this patch below {section[1]!r} in the page of {name}, found none")
    return Message(section[1], "\n\n".join(body))


def _plain(paragraph: str) -> str:
    """A paragraph, or a list, as lines of a commit message."""
    items = re.split(r"\n(?=- |https?://)", re.sub(r"<(https?://[^>]+)>", r"\1", _LABEL.sub("", paragraph)))
    return "\n".join(_wrapped(" ".join(item.split())) for item in items)


def pages() -> dict[str, Path]:
    """The paths of the pages, by name: in the package, or in docs/ of a checkout."""
    package = Path(os.path.realpath(__file__)).parent.parent
    installed = package / "pages"
    folders = [installed] if installed.is_dir() else [package.parent / "docs" / folder for folder in PAGES]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.md")) if path.stem not in INDEXES}


def page(name: str) -> Path:
    """The path of a page.

    Raises:
        UserError: no such file exists.
    """
    found = pages().get(name)
    if found is None:
        raise UserError(f"expected the page {name}.md of this package, found none: is its installation complete?")
    return found
