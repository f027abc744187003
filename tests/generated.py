"""The blocks of pages that programs generate, between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckpt_patches.runtime.durable import replace_durably
from upstream import RELEASES

# Releases, oldest first.
KNOWN = {
    distribution: [release.version for release in RELEASES if release.distribution == distribution]
    for distribution in ("megatron-core", "deepspeed", "nvidia-resiliency-ext", "apex", "torch")
}


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """A page with the text of each block between its markers.

    Raises:
        ValueError: the page does not have both markers of a block, once each and in order.
    """
    for name, text in blocks.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not ended or begin in after:
            raise ValueError(f"expected one {begin.strip()} and, on a later line, one {end}")
        page = f"{before}{begin}{text}\n{end}{after}"
    return page


def block(page: str, name: str) -> list[str]:
    """The lines between the markers of a block."""
    return page.partition(f"<!-- {name}: begin -->\n")[2].partition(f"<!-- {name}: end -->")[0].splitlines()


def write(path: Path, blocks: Mapping[str, str]) -> None:
    """Update the blocks of a page."""
    replace_durably(path, filled(path.read_text(encoding="utf-8"), blocks).encode())
    print(f"wrote {path}")


def require(*records: Path) -> None:
    """Exit with an error if a record is missing, so that no page is written without results."""
    for path in records:
        if not path.exists():
            sys.exit(f"expected recorded results in {path}, found none; run `make test-all` first")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    columns = list(heads)
    return "\n".join([line(columns), "|---" * len(columns) + "|", *map(line, rows)])


def line(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
