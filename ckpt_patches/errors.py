"""A user's mistake: one clear line on stderr and exit status 2, no stack trace."""

from collections.abc import Iterable

TRUST = "--trust-checkpoint"  # the option that messages about classes name


class UserError(Exception):
    """What was expected, what was found, where, and what to do."""


def unknown(what: str, name: str, known: Iterable[str], where: str) -> str:
    """One line for a name that does not exist: the nearest one that does, and the command that has them all."""
    import difflib

    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"no {what} {name}; " + (f"did you mean {nearest[0]}?" if nearest else f"{where} has all names")


class StrictModeError(RuntimeError):
    """With `CKPT_PATCHES=strict`, a program in which a fix that is needed does not run is stopped.

    Not an ImportError: `try: import megatron.core … except ImportError` is how others ask whether Megatron is there.
    """
