"""What the site needs beside the Markdown of docs/: the root's pages, links that work there, the list of bugs.

The Markdown is written for a forge. A page of the root, such as CHANGELOG.md, is in the site under its name in small
letters; a link to a file that is not in the site becomes its text.
"""

import posixpath
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {name: name.lower() for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
ROOT_PAGES["README.md"] = "index.md"  # the site's home; the index of docs/ is a page beside it
INDEX = "documentation.md"
BUGS = "Bugs"
BAR = "\\|"  # in a table; MkDocs shows the backslash of one in code
CODE_WITH_BAR = re.compile(r"(?<!`)`([^`\n]*\\\|[^`\n]*)`(?!`)")
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\((?!\w+:|#)([^)#\s]*)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Add the page of each fix to the navigation, by package."""
    sys.path.insert(0, str(ROOT))
    from ckpt_patches.engine.fix import every_fix, package_of
    from ckpt_patches.engine.installed import DISTRIBUTIONS

    groups: dict[str, list[str]] = {}
    for name in sorted(every_fix()):
        groups.setdefault(DISTRIBUTIONS[package_of(name)], []).append(f"fixes/{name}.md")
    bugs = next(section[BUGS] for section in config.nav if BUGS in section)
    bugs.extend({package: pages} for package, pages in groups.items())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root, and give the index of docs/ a name of its own."""
    index = files.get_file_from_path("README.md")
    files.remove(index)
    files.append(File.generated(config, INDEX, content=index.content_string))
    for name, in_site in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, in_site, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adapt a page: its links, the words behind the language of a fence; no comments."""
    from ckpt_patches.engine.fix import every_fix

    if page.file.src_uri.startswith("guides/") or page.file.src_uri == "reference/compatibility.md":
        # The page that answers a question comes before those that touch it; "UNKNOWN" is in many.
        page.meta.setdefault("search", {"boost": 6 if page.file.src_uri == "guides/audit.md" else 2})
    if (fix := posixpath.basename(page.file.src_uri).removesuffix(".md")) in every_fix():
        markdown += _tests(fix)
    markdown = re.sub(r"^<!--.*?-->\n", "", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^```(\w+) .*$", r"```\1", markdown, flags=re.MULTILINE)
    uri = page.file.src_uri
    folder = "" if uri in ROOT_PAGES.values() else posixpath.join("docs", posixpath.dirname(uri))
    pages = {file.src_uri for file in files}
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(p if p.startswith("```") else _with_links(p, folder, pages) for p in parts)


def _tests(fix: str) -> str:
    """The last section of a fix's page: the programs that show its bug."""
    from ckpt_patches.engine.fix import load

    tests = [
        f"`tests/fixes/test_{fix}.py` shows the bug without the fix, and that it is gone with it.",
        "`tests/contract/` tests it, as every fix.",
    ]
    if test := load(fix).test:
        tests.append(f"`ckpt-patches diff --with-test {fix}` adds a test to the patch: `{test}`.")
    return "\n## Test\n\n" + "".join(f"- {test}\n" for test in tests)


def _with_links(text: str, folder: str, pages: set[str]) -> str:
    text = CODE_WITH_BAR.sub(lambda code: f"<code>{escape(code[1]).replace(BAR, '&#124;')}</code>", text)
    return LINK.sub(lambda link: _adapted(link, folder, pages), text)


def _adapted(link: "re.Match[str]", folder: str, pages: set[str]) -> str:
    """A link as the site has it; its text alone if the target is a file of the repository that the site has not.

    A link to a file that is not there stays as it is, and fails the build.
    """
    picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    path = posixpath.normpath(posixpath.join(folder, target))
    in_site = ROOT_PAGES.get(path) or (INDEX if path in ("docs", "docs/README.md") else path.removeprefix("docs/"))
    if in_site in pages:
        here = folder.removeprefix("docs").removeprefix("/") or "."
        return f"{picture}[{text}]({posixpath.relpath(in_site, here)}{anchor})"
    return text if (ROOT / path).exists() else link[0]
