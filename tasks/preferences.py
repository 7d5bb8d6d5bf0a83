"""Preference data from a judge: pairs for the helpful reward model, labels for the safety one (R1 v2, stage 4)."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.data import Problem, Sample
from tasks.judge import Judge, Pair, Response


def held_out(problem_id: str, share: float) -> bool:
    """By prompt, so that no prompt is on both sides."""
    return int(hashlib.sha256(problem_id.encode()).hexdigest()[:8], 16) / 2**32 < share


def pairs(
    samples: Sequence[Sample],
    problems: Mapping[str, Problem],
    judge: Judge,
    *,
    judgments: int,
    margin: float,
    length_ratio_max: float,
    held_out_share: float,
    seed: int,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """(rows of messages, chosen, rejected, held_out; counts). Only summaries are compared.

    Each pair of a prompt's distinct summaries is judged `judgments` times in random order; the mean difference, from
    -2 to 2, must exceed `margin`. A pair with an undecided judgment is dropped: its mean would rest on fewer votes.
    """
    by_prompt: dict[str, list[str]] = defaultdict(list)
    for sample in samples:
        if sample.summary and sample.summary not in by_prompt[sample.problem_id]:
            by_prompt[sample.problem_id].append(sample.summary)
    rng = random.Random(f"preferences/{seed}")
    candidates = [(pid, a, b) for pid, texts in by_prompt.items() for a, b in itertools.combinations(texts, 2)]
    fitting = [c for c in candidates if _length_ratio(c[1], c[2]) <= length_ratio_max]
    swaps = [[rng.random() < 0.5 for _ in range(judgments)] for _ in fitting]
    asked = [
        Pair(problems[pid], *((b, a) if swapped else (a, b)))
        for (pid, a, b), orders in zip(fitting, swaps, strict=True)
        for swapped in orders
    ]
    verdicts = iter(judge.compare_all(asked))
    rows = []
    counts: Counter[str] = Counter({"candidates": len(candidates), "length": len(candidates) - len(fitting)})
    for (pid, a, b), orders in zip(fitting, swaps, strict=True):
        votes = [next(verdicts) for _ in orders]
        if None in votes:
            counts["undecided"] += 1
            continue
        difference = sum(-v if swapped else v for v, swapped in zip(votes, orders, strict=True) if v is not None)
        if abs(difference / judgments) <= margin:
            counts["tied"] += 1
            continue
        chosen, rejected = (a, b) if difference > 0 else (b, a)
        row = {"messages": problems[pid].messages, "chosen": chosen, "rejected": rejected}
        rows.append({**row, "held_out": held_out(pid, held_out_share)})
    counts["kept"] = len(rows)
    return rows, dict(counts)


def labels(
    samples: Sequence[Sample], problems: Mapping[str, Problem], judge: Judge, held_out_share: float
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """(rows of messages, response, label, held_out; counts): the whole response, 1 safe or 0 unsafe."""
    verdicts = judge.safe_all([Response(problems[s.problem_id], s.completion) for s in samples])
    rows: list[dict[str, Any]] = [
        {
            "messages": problems[sample.problem_id].messages,
            "response": sample.completion,
            "label": int(verdict),
            "held_out": held_out(sample.problem_id, held_out_share),
        }
        for sample, verdict in zip(samples, verdicts, strict=True)
        if verdict is not None
    ]
    safe = sum(row["label"] for row in rows)
    return rows, {"safe": safe, "unsafe": len(rows) - safe, "undecided": len(samples) - len(rows)}


def write_preferences(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def _length_ratio(a: str, b: str) -> float:
    shorter, longer = sorted((len(a.split()), len(b.split())))
    return longer / max(1, shorter)
