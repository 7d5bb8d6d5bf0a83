"""Filters and judge on one shard of samples, in a process of its own where no model has to be loaded for it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.data.records import Sample, read_problems, read_samples, write_rows
from tasks.judges.create import Judge, JudgeSettings, make_judge
from tasks.problems.decontaminate import HeldOut
from tasks.sft_data.filters import FilterSettings
from tasks.sft_data.rejection import select


def select_shard(samples: Path, problems: Path, out: Path, settings: Mapping[str, Any]) -> dict[str, float]:
    """Write `out`, the samples with verdicts, and return what the judge counted.

    `settings`: plain values, "filters", "judge" (as JSON), "judged", "keep_per_problem", "held_out" (a file of
    problems) and "seed". What is already there is not made again.
    """
    counted = out.with_suffix(".json")
    if out.exists() and counted.exists():
        found: dict[str, float] = json.loads(counted.read_text())
        return found
    judge = judge_of(settings["judge"])
    before = judge.counts.to_dict()
    selected = select(
        read_samples(samples),
        {problem.id: problem for problem in read_problems(problems)},
        FilterSettings.model_validate(settings["filters"]),
        judge,
        settings["judged"],
        settings["keep_per_problem"],
        held_out=_held_out(Path(settings["held_out"])),
        seed=settings["seed"],
    )
    counts = {n: v - before.get(n, 0) for n, v in judge.counts.to_dict().items() if v != before.get(n, 0)}
    writing = out.with_suffix(".writing")
    write_rows(writing, selected, Sample)
    counted.write_text(json.dumps(counts))
    writing.replace(out)
    return counts


@functools.lru_cache(maxsize=1)
def judge_of(settings: str) -> Judge:
    """One judge a process: a local model is loaded once."""
    return make_judge(JudgeSettings.model_validate_json(settings))


@functools.lru_cache(maxsize=1)
def _held_out(path: Path) -> HeldOut:
    return HeldOut(read_problems(path))
