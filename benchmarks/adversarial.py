"""Texts that make careless parsers slow, and everything that reads what a model wrote, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo.data.records import Problem
from grpo.judging.questions import harmless
from grpo.judging.replies import Reply, read
from grpo.rewards.code import extract
from grpo.rewards.functions import Response
from grpo.rewards.registry import REWARDS, score_one
from grpo.rewards.steps import STEP_REWARDS, step_rewards
from grpo.rewards.verifiers import verify
from tasks.problems.constraints import read_constraints, satisfied

_REPEATED = {
    **{
        "spaces": " ",
        "line breaks": "\n",
        "indented lines": "\n ",
        "digits": "1",
        "zeros": "0",
        "digits, spaced": "1 ",
    },
    **{
        "thousands": "1,000",
        "commas": "1,",
        "decimals": "1.",
        "percent": "1%",
        "equations": "1=",
        "spaced equations": "1 = ",
    },
    **{
        "fractions": "1/",
        "exponents": "1e1",
        "powers": "^{",
        "dollars": "$",
        "prices": "$1",
        "names": "a",
        "snakes": "a_",
    },
    **{"round brackets": "(", "braces": "{", "closing braces": "}", "empty objects": "{}", "square brackets": "["},
    **{"backslashes": "\\", "formulas": "\\(", "displays": "\\[", "boxes": "\\boxed{", "texts": "\\text{"},
    **{
        "halves": "\\frac{1}{",
        "environments": "\\begin{",
        "full stops": ".",
        "exclamations": "!",
        "quotes": '"',
        "bars": "|",
    },
    **{"backticks": "`", "fences": "```\n", "angles": "<a", "thinks": "<think>", "ends of thinking": "</think>"},
    **{
        "answer tags": "<answer>",
        "answers": "answer ",
        "the answers": "the answer is ",
        "options": "option B ",
        "(B)": "(B) ",
    },
    **{"apostrophes": "ab'", "Chinese": "中文", "kana": "カ", "zero width": "\u200b", "stars": "*", "bullets": "- "},
    **{
        "numbered": "1. ",
        "minus": "-",
        "sums": "1+",
        "not": "not ",
        "words": "therefore we subtract ",
        "commands": "\\a",
    },
}


def _numbers(length: int) -> str:
    return ",".join(map(str, range(1, length // 3 + 2)))[:length]


TEXTS: dict[str, Callable[[int], str]] = {
    **{
        name: lambda length, piece=piece: (piece * (length // len(piece) + 1))[:length]
        for name, piece in _REPEATED.items()
    },
    **{
        f"{name}, then !x": lambda length, piece=_REPEATED[name]: (piece * (length // len(piece) + 1))[:length] + "!x"
        for name in ("spaces", "line breaks", "digits", "names", "stars", "thousands")
    },
    "number list": _numbers,
    "answer and spaces": lambda length: "answer" + " " * length + "!",
    "angle and spaces": lambda length: "<" + " " * length + "!",
    "boxed number list": lambda length: f"\\boxed{{{_numbers(length)}}}",
    "fence and lines": lambda length: "```" + "\n" * length + "x",
    "minus one": lambda length: "-" * length + "1",
    "nested boxes": lambda length: "\\boxed{" * (length // 8) + "}" * (length // 8),
}
"""Name -> a text of about so many characters."""

_CONSTRAINTS: list[dict[str, Any]] = [
    *({"kind": kind, "min": 3} for kind in ("words", "sentences", "bullets")),
    *({"kind": kind, "words": ["forty-two", "answer"]} for kind in ("includes", "excludes")),
    *({"kind": kind, "text": "the end"} for kind in ("starts_with", "ends_with")),
    {"kind": "language", "language": "en"},
    {"kind": "json", "keys": ["a"]},
]


def problem(verifier: str, gold: str, **metadata: Any) -> Problem:
    return Problem("p", [{"role": "user", "content": "q"}], gold, verifier, "reasoning", "en", "benchmark", metadata)


def targets() -> dict[str, Callable[[str], Any]]:
    """Rewards (of reasoning and of a summary), verifiers, step rewards, constraints and readers of judges' replies."""
    number = problem("number", "42", answer_style="auto")

    def reward(name: str) -> Callable[[str], Any]:
        def score(text: str) -> None:
            for whole in (f"<think>{text}</think>{text}", f"<think>{text}"):
                score_one(name, {}, number, Response.to(number, whole, len(whole), True, 1 << 20))

        return score

    def verifier(rule: str, gold: str) -> Callable[[str], Any]:
        asked = problem(rule, gold)
        return lambda text: verify(asked, text)

    def constraint(settings: dict[str, Any]) -> Callable[[str], Any]:
        [held] = read_constraints({"constraints": [settings]})
        return lambda text: satisfied(held, f"x{text}x")

    golds = {"exact": "42", "number": "42", "math": "42", "choice": "B"}
    return {
        **{f"reward {name}": reward(name) for name in REWARDS},
        **{f"verifier {rule}": verifier(rule, gold) for rule, gold in golds.items()},
        **{f"steps {name}": lambda t, name=name: step_rewards(name, number, f"<think>{t}") for name in STEP_REWARDS},
        **{f"constraint {settings['kind']}": constraint(settings) for settings in _CONSTRAINTS},
        "program in an answer": extract,
        "judge's prompt": harmless,
        "judge's reply": lambda text: read(Reply(f"x {text}"), "correctness", {"correct": True}),
    }
