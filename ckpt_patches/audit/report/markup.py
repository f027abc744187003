"""Write HTML: what is no markup is escaped, whoever chose it."""

import html

from ckpt_patches.audit.report.plot_layout import printable

EMPTY = ("meta",)  # elements that have no end


class Markup(str):
    """Text that is HTML already; made by `element` and `joined`, and of constants."""


def element(name: str, /, *content: str, **attributes: object) -> Markup:
    """An element; a name that is a keyword of Python ends in an underscore, and hyphens are underscores in between.

    An attribute that is None is left out, one that is True has no value.
    """
    shown = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    own = "".join(f" {key}" if value is True else f' {key}="{_escaped(str(value))}"' for key, value in shown)
    return Markup(f"<{name}{own}>" if name in EMPTY else f"<{name}{own}>{joined(*content)}</{name}>")


def joined(*content: str) -> Markup:
    """Behind each other, escaped where it is no markup."""
    return Markup("".join(part if isinstance(part, Markup) else _escaped(part) for part in content))


def _escaped(text: str) -> str:
    return html.escape(printable(text), quote=True)
