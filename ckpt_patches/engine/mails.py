"""A fix as a mail in the form of `git format-patch`, for `git am`: a commit with its test, said as on its page."""

import os
import re
import subprocess
import textwrap
from dataclasses import dataclass
from email.header import Header
from email.utils import formatdate
from pathlib import Path

from ckpt_patches.engine.diffs import tree_diff
from ckpt_patches.engine.fix import load, sentence
from ckpt_patches.engine.plan import TreePlan
from ckpt_patches.errors import UserError

WIDTH = 72  # characters of a line of a commit message
SECTIONS = ("Symptom", "Root cause", "The change")
# What a page says of the fix as it is laid over a release is no part of a change for upstream.
OURS_ALONE = re.compile(r"ckpt-patches|diff for upstream")
NO_COMMIT = "0" * 40  # of no repository


@dataclass(frozen=True)
class Author:
    """Whoever sends it."""

    name: str
    address: str
    seconds: int  # since 1970


def author_of(root: str) -> Author:
    """Whom git takes for the author of commits in a tree.

    Raises:
        UserError: nobody, or there is no git.
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


def mail(plan: TreePlan, name: str, author: Author) -> bytes:
    """One fix, of a plan that has no other. Its sender signs it off, if upstream asks for that: `git am --signoff`."""
    head = [
        f"From {NO_COMMIT} Mon Sep 17 00:00:00 2001",
        f"From: {Header(author.name).encode()} <{author.address}>",
        f"Date: {formatdate(author.seconds)}",
        f"Subject: [PATCH] {subject(name)}",
        "MIME-Version: 1.0",
        "Content-Type: text/plain; charset=UTF-8",
        "Content-Transfer-Encoding: 8bit",
    ]
    text = "\n".join([*head, "", body(name), "---", ""])
    return text.encode() + tree_diff(plan, with_test=True) + b"-- \nckpt-patches\n"


def subject(name: str) -> str:
    """The sentence of the fix's file."""
    return sentence(name).rstrip(".")


def body(name: str) -> str:
    """What its page says of the bug and of the change, and where upstream has spoken of it."""
    sections = re.split(r"^## (.*)\n", page(name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    by_title = dict(zip(sections[1::2], sections[2::2], strict=True))
    parts = [f"{title}:\n\n{plain(by_title[title])}" for title in SECTIONS if title in by_title]
    return "\n\n".join([*parts, "\n".join(f"See {link}" for link in load(name).upstream)])


def page(name: str) -> Path:
    """Where the page of a fix lies: with the package, or in docs/ of a checkout.

    Raises:
        UserError: in neither.
    """
    package = Path(os.path.realpath(__file__)).parent.parent
    places = [package / "pages" / f"{name}.md", package.parent / "docs" / f"{name}.md"]
    for place in places:
        if place.exists():
            return place
    raise UserError(f"expected the page of {name} in {' or '.join(map(str, places))}, found none")


def plain(markdown: str) -> str:
    """Paragraphs of a page, in lines of a commit message; lists, tables and code stay as they are."""
    blocks = [block for block in re.split(r"\n{2,}", markdown.strip("\n")) if not OURS_ALONE.search(block)]
    return "\n\n".join(_wrapped(_without_links(block)) for block in blocks)


def _without_links(text: str) -> str:
    """A link to another page is its words; one into the net is there as well."""
    text = re.sub(r"\[([^]]+)\]\((https?://[^)\s]+)\)", r"\1 (\2)", text)
    return re.sub(r"\[([^]]+)\]\([^)\s]+\)", r"\1", text)


def _wrapped(block: str) -> str:
    if re.match(r"\s|[|>]|[-*] |\d+\. ", block):
        return block
    return textwrap.fill(" ".join(block.split()), WIDTH, break_long_words=False, break_on_hyphens=False)
