"""`make docs` builds the site without warnings and with every page in the navigation; a broken link is an error."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ckpt_patches.engine.registry import FIXES
from upstream import REPOSITORY, TIMEOUT

pytestmark = pytest.mark.long

SOURCES = (
    "docs",
    "ckpt_patches",
    "megatron",
    "deepspeed_patches",
    "nvrx_patches",
    "apex_patches",
    "torch_patches",
    "mkdocs.yml",
)
# The output of pip without a reachable index. A requirement that the index lacks fails the tests.
OFFLINE = re.compile(r"NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|Network is unreachable")
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("CKPT_PATCHES", "PYTHON"))}


def make(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["make", "--directory", str(REPOSITORY), *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


@pytest.fixture(scope="module")
def mkdocs() -> Path:
    """The Python of an environment with the packages from docs/requirements.txt."""
    done = make(".venv-docs/ready")
    printed = done.stdout + done.stderr
    if done.returncode and OFFLINE.search(printed):
        pytest.skip(f"no package index can be reached: {printed.strip().splitlines()[-1]}")
    assert done.returncode == 0, printed
    return REPOSITORY / ".venv-docs/bin/python"


def build(python: Path, source: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(python), "-m", "mkdocs", "build", "--site-dir", str(site)],
        cwd=source,
        env={**ENVIRONMENT, "NO_MKDOCS_2_WARNING": "true"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def copied(folder: Path) -> Path:
    for name in (*SOURCES, *(page.name for page in REPOSITORY.glob("*.md"))):
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder / name)
    return folder


def test_the_site_is_built_and_has_every_page(mkdocs: Path, tmp_path: Path) -> None:
    done = make("docs", f"SITE={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING -" not in done.stdout + done.stderr
    home = (tmp_path / "index.html").read_text()
    pages = {page.stem for page in (REPOSITORY / "docs").glob("*.md")} - {"README"}
    pages |= {page.stem.lower() for page in REPOSITORY.glob("*.md")}
    assert pages >= {*FIXES}
    assert {page for page in pages if not (tmp_path / f"{page}.html").exists()} == set()
    assert {page for page in pages if f'href="{page}.html"' not in home} == set()
    text = re.sub(r"<[^>]+>", "", (tmp_path / "numpy2_product.html").read_text())
    assert "has no attribute" in text
    assert "megatron/patches/demos/numpy2_product.py shows the bug" in text


def test_tables_lists_and_fences_are_recognized(mkdocs: Path, tmp_path: Path) -> None:
    assert build(mkdocs, REPOSITORY, tmp_path).returncode == 0
    for page in tmp_path.glob("*.html"):
        text = re.sub(r"(?s)<(pre|code|script)\b.*?</\1>", "", page.read_text())
        assert not re.search(r"<code>[^<\n]*\\\|", page.read_text()), page.name  # an escaped bar in a table's code
        assert re.findall(r"<p>(?:\||```|- |1\. ).*|<!-- .* begin -->", text) == [], page.name


@pytest.mark.parametrize(
    ("page", "link"),
    [
        ("docs/audit.md", "[a](no_page.md)"),
        ("docs/audit.md", "[a](json.md#no-section)"),
        ("docs/numpy2_product.md", "[a](../NO_FILE.md)"),
        ("CHANGELOG.md", "[a](docs/no_page.md)"),
    ],
)
def test_a_link_that_leads_nowhere_fails(mkdocs: Path, tmp_path: Path, page: str, link: str) -> None:
    source = copied(tmp_path / "source")
    title, _, text = (source / page).read_text().partition("\n")
    (source / page).write_text(f"{title}\n\n{link}\n{text}")
    done = build(mkdocs, source, tmp_path / "site")
    assert done.returncode != 0
    assert re.search(r"[(](.*)[)]", link)[1].removeprefix("docs/").removeprefix("../") in done.stderr  # type: ignore[index]


def test_a_page_that_no_section_has_fails(mkdocs: Path, tmp_path: Path) -> None:
    source = copied(tmp_path / "source")
    (source / "docs/lost.md").write_text("# Lost\n")
    done = build(mkdocs, source, tmp_path / "site")
    assert done.returncode != 0
    assert "lost.md" in done.stderr
