"""A user's mistake: one clear line on stderr and exit status 2, no stack trace."""


class UserError(Exception):
    """What was expected, what was found, where, and what to do."""


class StrictModeError(RuntimeError):
    """With `CKPT_PATCHES=strict`, a program in which a fix that is needed does not run is stopped.

    Not an ImportError: `try: import megatron.core … except ImportError` is how others ask whether Megatron is there.
    """
