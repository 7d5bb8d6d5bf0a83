"""The table of known test sets: where each is on the hub, its columns, and how its answers are checked.

Column names are those of the hub data sets, so that a file with the same rows can be read as it is. Adding a set needs
only a new entry, no code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal["answer", "choices", "tests", "constraints"]
"""What a row contains besides its question: a reference answer; one right and some wrong choices; tests of a program in
LiveCodeBench's columns; or instructions in IFEval's columns."""


@dataclass(frozen=True)
class KnownSet:
    """A known test set. `problems` is its size, for estimates; `wrong` names the columns of its wrong choices."""

    form: Form
    problems: int
    prompt: str
    answer: str
    verifier: str
    hub: str | None
    config: str | None = None
    split: str = "test"
    wrong: tuple[str, ...] = ()


def _aime(hub: str) -> KnownSet:
    return KnownSet("answer", 30, "problem", "answer", "math", hub, split="train")


KNOWN: dict[str, KnownSet] = {
    # The answer is what follows "####" at the end of the worked solution.
    "gsm8k": KnownSet("answer", 1319, "question", "answer", "number", "openai/gsm8k", config="main"),
    "math500": KnownSet("answer", 500, "problem", "answer", "math", "HuggingFaceH4/MATH-500"),
    "aime2024": _aime("HuggingFaceH4/aime_2024"),
    "aime2025": _aime("MathArena/aime_2025"),
    "aime2026": _aime("MathArena/aime_2026"),
    "gpqa_diamond": KnownSet(
        "choices",
        198,
        "Question",
        "Correct Answer",
        "choice",
        "Idavidrein/gpqa",
        config="gpqa_diamond",
        split="train",
        wrong=("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
    ),
    # On the hub it is a script, which `datasets` no longer runs: download its test*.jsonl and pass the file.
    "livecodebench": KnownSet("tests", 400, "question_content", "", "code", None),
    "ifeval": KnownSet("constraints", 541, "prompt", "", "none", "google/IFEval", split="train"),
}
