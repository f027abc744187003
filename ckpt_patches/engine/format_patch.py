"""A fix in the format of `git format-patch`: a commit with its test, and the message from the fix's page.

A fix that the newest release does not need is a patch for older trees alone: it has no test, and its message is the
first line of its file.
"""

import os
import re
import subprocess
import textwrap
from dataclasses import dataclass
from email.header import Header
from email.utils import formatdate
from pathlib import Path

from ckpt_patches.engine.fix import Fix, load, sentence
from ckpt_patches.engine.registry import APEX, CORE, DEEPSPEED, NVRX, PACKAGES, TORCH
from ckpt_patches.engine.series import Patch, Series
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


@dataclass(frozen=True)
class Author:
    """The author of the commits."""

    name: str
    address: str
    seconds: int  # since 1970


@dataclass(frozen=True)
class Message:
    """A commit message for upstream reviewers."""

    subject: str
    body: str


def author_of(root: str) -> Author:
    """The author that git has configured for commits in a tree.

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
    return Author(found[1], found[2], int(found[3]))


def files_of(series: Series, author: Author) -> dict[str, bytes]:
    """The patches of a series by file name, numbered in order for `git am`."""
    messages = {patch.name: _message(patch) for patch in series.patches}
    count = len(series.patches)
    return {
        f"{number:04}-{patch.name}.patch": _file(patch, messages, author, f"{number}/{count}")
        for number, patch in enumerate(series.patches, start=1)
    }


def _file(patch: Patch, messages: dict[str, Message], author: Author, place: str) -> bytes:
    """One patch; `place` is its number in the series."""
    message = messages[patch.name]
    needs = [_wrapped(f"Depends on: {messages[other].subject}") for other in patch.depends_on]
    facts = "\n".join([*needs, *trailers(load(patch.name))])
    head = [
        f"From {NO_COMMIT} Mon Sep 17 00:00:00 2001",
        f"From: {Header(author.name).encode()} <{author.address}>",
        f"Date: {formatdate(author.seconds)}",
        f"Subject: [PATCH {place}] {message.subject}",
        "MIME-Version: 1.0",
        "Content-Type: text/plain; charset=UTF-8",
        "Content-Transfer-Encoding: 8bit",
    ]
    text = "\n".join([*head, "", message.body, "", facts, "---", ""])
    return text.encode() + patch.change + patch.test


def _message(patch: Patch) -> Message:
    if load(patch.name).test:
        return message_of(page(patch.name).read_text(encoding="utf-8"), patch)
    line = sentence(patch.name)
    return Message(textwrap.shorten(line.removesuffix("."), WIDTH, placeholder=" …"), _wrapped(line))


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


def message_of(text: str, patch: Patch) -> Message:
    """The message of a patch, from the section `## Change: SUBJECT` of the fix's page.

    A paragraph under the comment `<!-- if=WORD -->` is for patches that change a line with WORD in the package itself,
    one under `<!-- unless=WORD -->` for the others. The words in italics that begin a paragraph are for the page alone.

    Raises:
        UserError: the page has no such section, or the section no paragraph for this patch.
    """
    section = _SECTION.search(text)
    if section is None:
        raise UserError(f"expected `## Change: …`, the subject of the commit, in the page of {patch.name}, found none")
    changed = "\n".join(line for line in patch.change.decode().splitlines() if line.startswith(("+", "-")))
    body = []
    for paragraph in re.split(r"\n\s*\n", section[2].strip()):
        condition = CONDITION.match(paragraph)
        if condition is None or (condition[2] in changed) is (condition[1] == "if"):
            body.append(_plain(paragraph[condition.end() if condition else 0 :]))
    if not any(body):
        raise UserError(
            f"expected a paragraph for this patch below {section[1]!r} in the page of {patch.name}, found none"
        )
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
