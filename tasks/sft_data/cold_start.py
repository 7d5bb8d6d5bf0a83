"""Cold-start demonstrations: few, correct and readable (R1, stage 1).

Written or sampled demonstrations pass the same filters as SFT data. tasks/sft_data/teacher/rewriting.py rewrites those
of R1-Zero, as the paper does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from grpo.data.records import Problem, Sample
from grpo.data.template import form_of
from grpo.errors import InputError
from grpo.rewards.functions import Response
from grpo.rewards.registry import REWARDS
from tasks.problems.decontaminate import HeldOut
from tasks.problems.miniature.writers import Habits, demonstrate
from tasks.sft_data.examples import example, with_lengths
from tasks.sft_data.filters import FilterSettings, reject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Writer = Callable[[Problem], tuple[str, str]]
"""Problem -> (reasoning, answer)."""


def miniature_writer(habits: Habits, seed: int) -> Writer:
    """A writer of demonstrations for the miniature's problems."""
    rng = random.Random(f"cold start/{seed}")
    return lambda problem: demonstrate(problem, habits, rng)


def solution(problem: Problem) -> tuple[str, str]:
    """The worked solution that came with the problem, used as reasoning, and its answer. A general prompt's answer is
    its reference."""
    general = problem.domain == "general"
    needed = {"solution": "worked solution", **({"reference": "reference answer"} if general else {})}
    for column, name in needed.items():
        if not problem.metadata.get(column):
            raise InputError(
                f"problem {problem.id} of {problem.source} has no {name}; cold_start_data.source 'solutions' needs one "
                "(GSM8K's answer column, worked_solutions = true of a reasoning-gym or everyday source, or "
                f"metadata_columns = {list(needed)})"
            )
    return problem.metadata["solution"], problem.metadata["reference"] if general else problem.answer


def written(
    problems: Iterable[Problem],
    writer: Writer,
    settings: FilterSettings,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[list[Any], dict[str, int]]:
    """(examples, counts by reason) of written demonstrations that pass the same filters as sampled ones. `tokenizer`:
    that of the model to be trained, needed with `settings.context`."""
    examples = []
    reasons: Counter[str] = Counter()
    for problem in problems:
        completion = form_of(problem).render(*writer(problem))
        reason = reject(as_sample(problem, completion, tokenizer), settings)
        reasons[reason or "kept"] += 1
        if reason is None:
            examples.append(example(problem, completion))
    return examples, dict(reasons)


def sampled(
    problems: Sequence[Problem], samples: Iterable[Sample], settings: FilterSettings
) -> tuple[list[Any], dict[str, int]]:
    """The first sample of each problem that passes the filters."""
    by_id = {problem.id: problem for problem in problems}
    chosen: dict[str, Any] = {}
    reasons: Counter[str] = Counter()
    for sample in samples:
        reason = reject(sample, settings) or ("surplus" if sample.problem_id in chosen else None)
        reasons[reason or "kept"] += 1
        if reason is None:
            problem = by_id[sample.problem_id]
            completion = form_of(problem).render(sample.reasoning, sample.answer, sample.summary)
            chosen[sample.problem_id] = example(problem, completion)
    return list(chosen.values()), dict(reasons)


def without(held_out: HeldOut, examples: Sequence[Any]) -> tuple[list[Any], int]:
    """The examples whose completions share nothing with held-out problems, and the number of dropped ones. Their
    prompts are training prompts, which share nothing with held-out problems."""
    kept = [example for example in examples if held_out.match_passage(example["completion"]) is None]
    return kept, len(examples) - len(kept)


def as_sample(problem: Problem, completion: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Sample:
    """A written completion as a sample, with the rewards that the filters read. Tokens are 0 without a tokenizer."""
    response = Response.to(problem, completion, tokens=0, finished=True, max_tokens=0)
    parts = response.parts
    rules = {name: REWARDS[name] for name in ("accuracy", "format", "language")}
    sample = Sample(
        problem_id=problem.id,
        policy="written",
        completion=completion,
        reasoning=parts.reasoning,
        summary=parts.summary,
        answer=parts.answer or "",
        rewards={n: r.function(problem, response) for n, r in rules.items() if r.scores(problem)},
        tokens=0,
        finish_reason="stop",
        domain=problem.domain,
        language=problem.language,
    )
    return sample if tokenizer is None else with_lengths(sample, problem, tokenizer)
