"""A user's mistake: one clear line on stderr and exit status 2, no stack trace."""


class UserError(Exception):
    """What was expected, what was found, where, and what to do."""
