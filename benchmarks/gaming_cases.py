"""The data set of answers that try to be accepted without being right, with honest answers beside them.

benchmarks/gaming.jsonl, a row a case: `kind` of attack or "honest"; `question`, `gold` answer and `verifier`; `answer`,
which stands in answer tags behind some reasoning, or a whole `completion`; `answer_style`, "tags" where it is absent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from grpo.data.records import Problem
from grpo.data.template import form_of, render

FILE = Path(__file__).with_name("gaming.jsonl")


@dataclass(frozen=True)
class Case:
    kind: str
    honest: bool
    problem: Problem
    completion: str

    @property
    def answer(self) -> str | None:
        return form_of(self.problem).parse(self.completion).answer


def cases(path: Path = FILE) -> list[Case]:
    return [_case(number, json.loads(line)) for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)]


def _case(number: int, row: dict[str, str]) -> Case:
    metadata = {"answer_style": row["answer_style"]} if "answer_style" in row else {}
    messages = [{"role": "user", "content": row["question"]}]
    problem = Problem(f"gaming-{number}", messages, row["gold"], row["verifier"], "reasoning", "en", "gaming", metadata)
    completion = row.get("completion") or render("Let me see.", row["answer"])
    return Case(row["kind"], bool(row["honest"]), problem, completion)
