"""The one exception that a user is meant to read."""


class InputError(ValueError):
    """Bad input: the message says in one line what is wrong, where, and what to do.

    Commands print it without a traceback and exit with code 2.
    """


class TrainingStopped(RuntimeError):
    """Training stopped itself for a reason that it can name; the message says which, and what usually helps."""
