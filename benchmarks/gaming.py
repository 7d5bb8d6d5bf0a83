"""How many answers that try to be accepted without being right are accepted, per verifier and per judge.

python benchmarks/gaming.py [--judge FOLDER ... [--every N] [--replies build/gaming]] [--output docs/measured/gaming.md]

The cases are benchmarks/gaming.jsonl. `--judge`: folders of chat models, each asked about every Nth case as the local
judge. Replies are kept in `--replies`: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from arguments import at_least, output_file, write_output
from extras import stop
from gaming_cases import Case, cases
from machine import measured_by

from grpo.config.judge import JudgeSettings
from grpo.judging.voting import Claim
from grpo.rewards.verifiers import verify
from tasks.judges.create_judge import make_judge

RULES = ("exact", "number", "math", "choice")
ASKED_AT_ONCE = 32
Verdicts = list[bool | None]
"""Accepted or not, case by case; None: undecided."""


def by_rule(asked: Sequence[Case]) -> Verdicts:
    return [verify(case.problem, case.answer) == 1.0 for case in asked]


def by_judge(folder: Path, replies: Path, asked: Sequence[Case]) -> Verdicts:
    judge = make_judge(JudgeSettings(kind="local", path=folder, max_tokens=256, ask_again=False), replies / folder.name)
    claims = [Claim(case.problem.text, case.problem.answer, case.answer or "(no answer)") for case in asked]
    named = {"correct": True, "incorrect": False, "undecided": None}
    verdicts: Verdicts = []
    for first in range(0, len(claims), ASKED_AT_ONCE):
        verdicts += [named[verdict] for verdict in judge.correct_all(claims[first : first + ASKED_AT_ONCE])]
        print(f"{folder.name}: {len(verdicts)} of {len(claims)}", file=sys.stderr, flush=True)
    return verdicts


def table(asked: Sequence[Case], columns: dict[str, Verdicts]) -> list[str]:
    """A row a kind; in the cells how many of how many are accepted, and how many are undecided."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for number, case in enumerate(asked):
        kinds[case.kind].append(number)
    order = sorted(kinds, key=lambda kind: (kind == "honest", kind))
    attacks = [number for number, case in enumerate(asked) if not case.honest]
    rows = [(kind, kinds[kind]) for kind in order if kind != "honest"]
    rows += [("**all attacks**", attacks), ("**honest**", kinds["honest"])]
    lines = [f"| kind | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    return lines + [
        f"| {kind} | {' | '.join(_cell([verdicts[n] for n in numbers]) for verdicts in columns.values())} |"
        for kind, numbers in rows
    ]


def _cell(verdicts: Verdicts) -> str:
    undecided = verdicts.count(None)
    return f"{verdicts.count(True)} of {len(verdicts)}" + (f", {undecided} undecided" if undecided else "")


def rule_table(asked: Sequence[Case]) -> list[str]:
    """Accepted of all, per verifier: a column a verifier, attacks and honest answers."""
    lines = ["| verifier | attacks accepted | honest answers accepted |", "|---|---|---|"]
    for rule in RULES:
        of = [case for case in asked if case.problem.verifier == rule]
        attacks, honest = ([case for case in of if case.honest is wanted] for wanted in (False, True))
        lines.append(f"| `{rule}` | {_cell(by_rule(attacks))} | {_cell(by_rule(honest))} |")
    return lines


def judged(asked: Sequence[Case], judges: dict[str, Verdicts]) -> list[str]:
    """The part of the page about judges."""
    return [
        f"The same of local judges, on {len(asked)} of these answers. A judge sees question, gold answer and answer;",
        "a reply without a readable verdict leaves it undecided.",
        "",
        *table(asked, judges),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--judge", type=Path, nargs="*", default=[])
    parser.add_argument("--every", type=at_least(1), default=1)
    parser.add_argument("--replies", type=Path, default=Path("build/gaming"))
    parser.add_argument("--output", type=output_file)
    options = parser.parse_args()
    for folder in options.judge:
        if not (folder / "config.json").is_file():
            stop(f"--judge {folder}: no model folder; benchmarks/real_model.py makes one, or give a chat model's")
    asked = cases()
    some = asked[:: options.every]
    judges = {path.name: by_judge(path, options.replies, some) for path in options.judge}
    asked_of = f" --judge {' '.join(path.name for path in options.judge)} --every {options.every}" if judges else ""
    attacks = sum(not case.honest for case in asked)
    text = "\n".join(
        [
            "# Answers that try to be accepted without being right",
            "",
            measured_by(f"python benchmarks/gaming.py{asked_of}"),
            f"{attacks} attacks and {len(asked) - attacks} honest answers of",
            "[`benchmarks/gaming.jsonl`](../../benchmarks/gaming.jsonl): question, gold answer, verifier.",
            "`tests/benchmarks/test_gaming.py` holds the rules to zero on both sides. An answer that wins reward",
            "in a run of yours and should not: add it there.",
            "",
            *rule_table(asked),
            "",
            "By kind of attack, accepted of all:",
            "",
            *table(asked, {"rules": by_rule(asked)}),
            *(["", *judged(some, judges)] if judges else []),
        ]
    )
    print(text)
    if options.output:
        write_output(options.output, text + "\n")


if __name__ == "__main__":
    main()
