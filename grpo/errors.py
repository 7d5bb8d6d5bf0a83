"""The one exception that a user is meant to read."""

from __future__ import annotations

from grpo.secret_values import masked


class InputError(ValueError):
    """Bad input: the message says in one line what is wrong, where, and what to do.

    Commands print it without a traceback and exit with code 2. Secrets in it, such as the password in a server's
    address, are masked.
    """

    def __init__(self, message: str):
        super().__init__(masked(message))


class TrainingStopped(RuntimeError):
    """Training stopped itself for a reason that it can name; the message says which, and what usually helps."""
