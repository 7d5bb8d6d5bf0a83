"""Exceptions whose messages are meant for users."""

from __future__ import annotations

import re

from grpo.secret_values import masked

_CONTROL = re.compile(r"\s*[\x00-\x1f\x7f-\x9f\u2028\u2029]+\s*")
_LONGEST = 1_500


class InputError(ValueError):
    """Bad input. The message says in one line what is wrong, where, and what to do.

    Commands print it without a traceback and exit with code 2. Regardless of what it quotes, it is one line of bounded
    length without control characters, and secrets, such as the password in a server's address, are masked.
    """

    def __init__(self, message: str):
        message = masked(message)
        if len(message) > _LONGEST:  # keep the end, which says what to do
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
        super().__init__(_CONTROL.sub(" ", message))


class TrainingStopped(RuntimeError):
    """Training stopped itself for a known reason; the message says which, and what usually helps."""
