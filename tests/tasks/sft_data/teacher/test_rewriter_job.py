"""Rewrites by a teacher, made and scored in the sampling job of the stage."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.recipe.data_sections import ColdStartData
from flows.stage_contract.stage import _jsonable
from flows.stages.cold_start_data import _by_teacher
from grpo.config.common import Sampling
from grpo.data.completions import TextCompletion, TextCompletions
from grpo.data.records import Problem, Sample
from grpo.data.template import with_style
from grpo.sampling.job import run_sampling
from grpo.train import read_job
from tasks.sft_data.filters import FilterSettings
from tasks.sft_data.teacher.rewriting import rewritten
from tests.support.job_runner import CPU, write_job

Make = Callable[..., Any]
TESTS = [{"stdin": "", "stdout": "3"}]
REWRITES = {
    "right": ("so it is \\boxed{3}", 50, True),
    "wrong": ("so it is \\boxed{4}", 50, True),
    "cut off": ("so it is \\boxed{3}", 50, False),
    "just fits": ("so it is \\boxed{3}", 80, True),
    "too long": ("so it is \\boxed{3}", 81, True),
    "program": ("```python\nprint(3)\n```", 50, True),
    "crash": ("```python\nimport os\nos.abort()\n```", 50, True),
}
"""Problem -> (the teacher's answer, its tokens, whether it ended by itself)."""


class Writer:
    """The teacher. Its requests have 500 tokens, which no demonstration contains."""

    identity = "writer 1"

    def write(
        self, problems: Sequence[Problem], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, TextCompletions]]:
        for index, problem in enumerate(problems):
            answer, tokens, finished = REWRITES[problem.id]
            text = f"<think>\none and two make three\n</think>\n\n{answer}"
            yield index, TextCompletions([TextCompletion(text, tokens, finished)], prompt_tokens=500)

    def close(self) -> None:
        pass


def writer() -> Writer:
    return Writer()


def test_rewrites_are_scored_and_measured_by_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Make, sample: Make
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def run_job(kind: str, name: str, out: Path, **fields: Any) -> None:
        plain = json.loads(json.dumps({**fields, "out": out, "scoring": {"workers": 1}}, default=_jsonable))
        job = read_job(write_job(tmp_path / name, kind, **plain))
        for folder in (job.out, job.state):
            folder.mkdir()
        run_sampling(job)

    engine = {"kind": "function", "function": f"{Path(__file__).stem}:writer"}
    rewriter = {"engine": engine, "sampling": {"max_new_tokens": 90}}
    config = ColdStartData.model_validate(
        {"source": "r1_zero", "problems": 7, "sampling": {"max_new_tokens": 90}, "rewriter": rewriter, "hardware": CPU}
    )
    context: Any = SimpleNamespace(config=config, attempt=SimpleNamespace(state=tmp_path), run_job=run_job)
    problems: list[Problem] = [with_style(problem(name), "boxed") for name in REWRITES]
    for i in (-2, -1):
        metadata = {**problems[i].metadata, "tests": TESTS}
        problems[i] = dataclasses.replace(problems[i], answer="", verifier="code", metadata=metadata)
    chosen: dict[str, Sample] = {name: sample(name, prompt_tokens=20) for name in REWRITES}
    rewrite = _by_teacher(context, problems, chosen)
    examples, counts = rewritten(problems, chosen, rewrite, FilterSettings(context=100))
    assert [example["problem_id"] for example in examples] == ["right", "just fits", "program"]
    # 20 tokens of the question and 80 of the rewrite are 100.
    assert counts == {"kept": 3, "rewritten_incorrect": 2, "rewritten_truncated": 1, "rewritten_too_long": 1}
