"""Write HTML. All text that is not `Markup` is escaped."""

import html

from ckpt_patches.runtime.shown import printable

EMPTY = ("meta",)  # elements without an end tag


class Markup(str):
    """Text that is already HTML: from `element`, `joined` or a constant."""


def element(name: str, /, *content: str, **attributes: object) -> Markup:
    """An element. Attribute names: a trailing underscore is dropped (`class_`), other underscores become hyphens.

    An attribute that is None is left out; one that is True has no value.
    """
    shown = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    own = "".join(f" {key}" if value is True else f' {key}="{_escaped(str(value))}"' for key, value in shown)
    return Markup(f"<{name}{own}>" if name in EMPTY else f"<{name}{own}>{joined(*content)}</{name}>")


def joined(*content: str) -> Markup:
    """Concatenate the content; text that is not `Markup` is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else _escaped(part) for part in content))


def _escaped(text: str) -> str:
    return html.escape(printable(text), quote=True)
