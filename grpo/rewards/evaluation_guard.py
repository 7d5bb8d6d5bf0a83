"""Guards third-party scorers and parsers, so that nothing a model wrote is evaluated as a program.

Python reports every evaluation to audit hooks (PEP 578), whoever calls it and however it is written. While the guard is
active in a thread, evaluating text, starting a process, opening a file for writing and using the network raise
`EvaluationRefused` before anything runs. This is a second line of defense: `grpo.rewards.expressions` reads expressions
without evaluating them, so that scorers need not. Programs that a model is asked to write run in `grpo.sandbox`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_TEXT = ("<string>", "")
"""File names of code compiled from text: eval, exec, and compile as sympy calls it."""
_NEVER = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "urllib.", "pty.", "signal.", "tempfile.")
_HARMLESS = {"os.listdir", "os.scandir", "os.walk", "os.fwalk"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SYMPYS_OWN = (os.path.join("sympy", "polys", "monomials.py"), os.path.join("sympy", "utilities", "lambdify.py"))
"""Modules of sympy that generate code: products of n powers, and imports of the functions that they call."""
_LAMBDIFIED = "<lambdifygenerated-"
"""File names of the formulas that sympy compiles to compute roots and sums."""
_guarded = threading.local()


class EvaluationRefused(RuntimeError):
    """Text was about to be evaluated, or an action that evaluated text might take was about to happen."""


@contextlib.contextmanager
def no_evaluation() -> Iterator[list[EvaluationRefused]]:
    """Context that refuses to evaluate text in this thread. Yields the list of refusals, because a library may hide
    them."""
    _install()
    before = getattr(_guarded, "up", False), getattr(_guarded, "refusals", [])
    _guarded.up, _guarded.refusals = True, []
    try:
        yield _guarded.refusals
    finally:
        _guarded.up, _guarded.refusals = before


@functools.cache
def _install() -> None:
    sys.addaudithook(_audit)  # for the life of the process: hooks cannot be removed


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not getattr(_guarded, "up", False):
        return
    if event == "exec":
        refused = getattr(arguments[0], "co_filename", "") in _TEXT and not _by_sympy(sys._getframe(1))
    elif event == "compile":
        source, name = (os.fsdecode(value) if isinstance(value, bytes) else value for value in arguments)
        if str(name).startswith(_LAMBDIFIED):
            refused = not _is_formula(source)
        else:
            refused = name in _TEXT and not _by_sympy(sys._getframe(1))
    elif event == "open":
        refused = isinstance(arguments[2], int) and bool(arguments[2] & _WRITING)
    else:
        refused = event.startswith(_NEVER) and event not in _HARMLESS
    if refused and not _importing(sys._getframe(1)):
        _guarded.refusals.append(
            EvaluationRefused(f"an answer is not evaluated: {event} was refused while it was scored")
        )
        raise _guarded.refusals[-1]


def _by_sympy(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith(_SYMPYS_OWN)


def _is_formula(source: Any) -> bool:
    """Whether a program only calls functions by name on numbers: no attributes, text, imports or builtins.

    For a function that it does not know, sympy writes the name as it stands in the answer.
    """
    _guarded.up = False  # parsing is compiling
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, TypeError, ValueError, RecursionError):
        return False
    finally:
        _guarded.up = True
    refused = (ast.Attribute, ast.Import, ast.ImportFrom, ast.Lambda, ast.JoinedStr, ast.ClassDef, ast.Delete)
    return not any(
        isinstance(node, refused)
        or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
        or (isinstance(node, ast.Name) and (node.id.startswith("__") or node.id in _BUILTINS))
        for node in nodes
    )


_BUILTINS = set(dir(builtins)) - {"abs", "min", "max", "sum", "pow", "range", "complex", "True", "False", "None"}


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: its code may define classes from text, as namedtuple does."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
