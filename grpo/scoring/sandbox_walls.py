"""Checks which isolation layers ("walls") of the sandbox this machine lacks, before model-written programs run."""

from __future__ import annotations

from collections.abc import Iterable

from grpo.config.scoring import Scoring
from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.processes.notices import notice
from grpo.sandbox.run import missing_walls


def check_walls(problems: Iterable[Problem], settings: Scoring) -> None:
    """Warns if answers to these problems are programs and this machine lacks a wall of the sandbox. Raises InputError
    instead if the settings require the walls."""
    if not any(problem.verifier == "code" for problem in problems) or not (missing := missing_walls()):
        return
    if settings.sandbox == "walls":
        raise InputError(f"scoring.sandbox is 'walls', but {missing}; see docs/sandbox.md")
    notice(f"{missing}; scoring.sandbox = 'walls' would refuse to run them; see docs/sandbox.md")
