"""Mixing: turns shards of judged samples into the shuffled parquet files of a data set. Samples need not fit into
memory.

The first of two passes over the shards keeps about 50 bytes per kept sample: hashes of its identity and of its text.
They alone decide what is drawn, what is held out, and the order. The second pass distributes the drawn samples to
bucket files, one per range of positions; then every bucket is sorted and written as parts.

The identity hash covers the seed, the problem and the sample's number, and alone decides which of two samples of a part
is drawn first. So the draw does not depend on the order or size of the shards, or on other parts.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo.data.conversations import CONVERSATION, response_column
from grpo.data.records import Problem
from grpo.errors import InputError
from tasks.sft_data.duplicates import completion_digest
from tasks.sft_data.external_shuffle import Shuffle
from tasks.sft_data.mix_settings import NO_PART, MixSettings
from tasks.sft_data.shards import sample_batches
from tasks.sft_data.statistics import KEPT, Cell, Dropped, Shown, Tally

logger = logging.getLogger(__name__)

TRAIN, VALIDATION = "examples/train", "examples/validation"

Problems = Callable[[Path], Mapping[str, Problem]]
"""Shard -> the problems that its samples answer, by id."""

SCHEMA = pa.schema(
    [
        ("problem_id", pa.string()),
        ("number", pa.int64()),
        ("part", pa.string()),
        ("domain", pa.string()),
        ("source", pa.string()),
        ("language", pa.string()),
        ("prompt", CONVERSATION),
        ("completion", CONVERSATION),
        ("think", pa.bool_()),
        ("tokens", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("policy", pa.string()),
        ("engine", pa.string()),
    ]
)
"""SFT reads `prompt` and `completion`. `tokens` is the length of the response as sampled, including the chain of
thought, even if `think` is false and the completion has none."""

_CANDIDATE = np.dtype(
    [
        *((name, np.uint64) for name in ("draw", "place", "text", "prompt")),
        *((name, np.int32) for name in ("cell", "shard", "row", "tokens", "size")),
    ]
)
TRAINED, HELD_OUT, DUPLICATE, NOT_DRAWN, NO_PART_ASKS, NO_SUMMARY = range(6)
OUTCOMES = (KEPT, KEPT, "duplicate", "not_drawn", "no_part", "no_summary")
"""Names of the outcomes above, for samples that the filters kept. All except the first two are reasons in the
funnel."""


def mix(shards: Sequence[Path], problems: Problems, settings: MixSettings, seed: int, out: Path) -> dict[str, Any]:
    """Writes `out`/examples/train and /validation (no folder if nothing is held out) and returns the statistics.

    `shards` are parquet files of `Sample`s with verdicts. Output of an earlier call in `out` is removed first. Equal
    samples, settings and seed give equal bytes.

    Raises InputError if a column or a problem is missing, a source is in two parts, or no sample is left.
    """
    buckets = out / "buckets"
    for stale in (out / "examples", buckets):
        shutil.rmtree(stale, ignore_errors=True)
    survey = _survey(shards, problems, settings, seed)
    outcome = _draw(survey, settings)
    tally = Tally.of(survey.dropped, survey.cells, survey.candidates, outcome, OUTCOMES)
    if not (outcome <= HELD_OUT).any():
        raise InputError(f"mix: nothing is left for the data set of {tally.sampled} samples: {tally.outcomes()}")
    origins = _write(shards, problems, settings, survey, outcome, out, buckets)
    shutil.rmtree(buckets)
    statistics = tally.statistics(settings) | origins | {"seed": seed}
    for warning in statistics["warnings"]:
        logger.warning("mix: %s", warning)
    return statistics


@dataclass
class Survey:
    """Result of the first pass: samples that the filters kept, in the shards' order, and counts of the others."""

    candidates: np.ndarray
    cells: list[Cell]
    dropped: Dropped


def _survey(shards: Sequence[Path], problems: Problems, settings: MixSettings, seed: int) -> Survey:
    part_of = functools.cache(settings.part_of)
    chunks, cells, dropped = [np.empty(0, _CANDIDATE)], dict[Cell, int](), Dropped(settings.examples)
    for number, shard in enumerate(shards):
        prompts = _Prompts(problems(shard), seed)
        for start, table in sample_batches(shard):
            kept = pc.equal(table["verdict"], KEPT)
            dropped.add(table.filter(pc.invert(kept)), part_of, prompts.problems)
            rows = np.flatnonzero(kept.to_numpy())
            table = table.take(rows)
            columns = (table[name].to_pylist() for name in ("domain", "source", "language"))
            names = [Cell(part_of(s, d), d, s, language) for d, s, language in zip(*columns, strict=True)]
            candidates = np.zeros(len(rows), _CANDIDATE)
            candidates["cell"] = [cells.setdefault(name, len(cells)) for name in names]
            candidates["shard"], candidates["row"], candidates["tokens"] = number, start + rows, table["tokens"]
            _hash(table, prompts, settings, seed, candidates)
            chunks.append(candidates)
    return Survey(np.concatenate(chunks), list(cells), dropped)


class _Prompts:
    """The problems of a shard. Each has a salted hash of its prompt's text that decides whether it is held out."""

    def __init__(self, problems: Mapping[str, Problem], seed: int):
        self.problems = problems
        self._salt = f"{seed}\0held out\0".encode()
        self._cache: dict[str, tuple[str, int]] = {}

    def __getitem__(self, problem_id: str) -> tuple[str, int]:
        """The prompt's text and the hash that decides whether it is held out."""
        if (entry := self._cache.get(problem_id)) is None:
            if problem_id not in self.problems:
                raise InputError(f"mix: problem {problem_id!r} is not among those of its shard; sample it again")
            text = self.problems[problem_id].text
            salted = self._salt + completion_digest(text, "").to_bytes(8, "little")
            entry = text, int.from_bytes(hashlib.blake2b(salted, digest_size=8).digest(), "little")
            self._cache[problem_id] = entry
        return entry


def _hash(table: pa.Table, prompts: _Prompts, settings: MixSettings, seed: int, candidates: np.ndarray) -> None:
    """Fills in sizes and hashes: of the sample (order of the draw, position in the data), its text and its prompt."""
    identities, texts, prompt_hashes = [], [], []
    completions, _ = _completions(table, settings)
    candidates["size"] = pc.binary_length(completions)
    columns = (table["problem_id"].to_pylist(), table["number"].to_pylist(), completions.to_pylist())
    for problem_id, number, completion in zip(*columns, strict=True):
        prompt, prompt_hash = prompts[problem_id]
        name = f"{seed}\0{problem_id}\0{number}".encode()
        identities.append(hashlib.blake2b(name, digest_size=16, person=b"mix").digest())
        texts.append((completion_digest(prompt, completion) or 1) if completion else 0)  # 0: nothing to train on
        prompt_hashes.append(prompt_hash)
    pairs = np.frombuffer(b"".join(identities), "<u8").reshape(-1, 2)
    candidates["draw"], candidates["place"] = pairs[:, 0], pairs[:, 1]
    candidates["text"], candidates["prompt"] = np.array(texts, np.uint64), np.array(prompt_hashes, np.uint64)


def _completions(table: pa.Table, settings: MixSettings) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """The text to train on of each sample (empty if it has no summary), and whether it includes the chain of
    thought."""
    thinking = [s for s in pc.unique(table["source"]).to_pylist() if settings.keeps_thought(s, "general")]
    of_source = pc.is_in(table["source"], value_set=pa.array(thinking, pa.string()))
    think = pc.or_(pc.not_equal(table["domain"], "general"), of_source)
    think = pc.and_(think, pc.not_equal(table["completion"], table["summary"]))  # a given example may have no thought
    return pc.if_else(think, table["completion"], table["summary"]), think


def _draw(survey: Survey, settings: MixSettings) -> np.ndarray:
    """The outcome of each candidate, decided by hashes alone."""
    c = survey.candidates
    names = sorted({cell.part for cell in survey.cells})
    part = np.array([names.index(cell.part) for cell in survey.cells], np.int32)[c["cell"]]
    outcome = np.full(len(c), NOT_DRAWN, np.int8)
    outcome[c["text"] == 0] = NO_SUMMARY
    if NO_PART in names:
        outcome[part == names.index(NO_PART)] = NO_PART_ASKS
    eligible = np.flatnonzero(outcome == NOT_DRAWN)
    # Of equal texts, the first by part name and then by hash is kept, so adding a part later in the alphabet changes
    # nothing.
    order = eligible[np.lexsort((c["draw"][eligible], part[eligible], c["text"][eligible]))]
    outcome[order[1:][c["text"][order[1:]] == c["text"][order[:-1]]]] = DUPLICATE
    sizes = settings.wanted()
    for number, name in enumerate(names):
        if name != NO_PART:
            members = np.flatnonzero((outcome == NOT_DRAWN) & (part == number))
            outcome[members[np.argsort(c["draw"][members], kind="stable")][: sizes[name]]] = TRAINED
    languages = sorted({cell.language for cell in survey.cells})
    language = np.array([languages.index(cell.language) for cell in survey.cells], np.int32)[c["cell"]]
    _hold_out(c, part * len(languages) + language, outcome, settings.validation_share)
    return outcome


def _hold_out(c: np.ndarray, stratum: np.ndarray, outcome: np.ndarray, share: float) -> None:
    """Holds out prompts of each stratum (part and language), in hash order, until `share` of its examples is reached.

    A prompt held out in one stratum is held out in all, so that no prompt is on both sides.
    """
    drawn = np.flatnonzero(outcome == TRAINED)
    held_out = [np.empty(0, np.uint64)]
    for number in np.unique(stratum[drawn]):
        prompts, sizes = np.unique(c["prompt"][drawn[stratum[drawn] == number]], return_counts=True)
        held_out.append(prompts[np.cumsum(sizes) - sizes < int(share * sizes.sum() + 0.5)])
    outcome[drawn[np.isin(c["prompt"][drawn], np.concatenate(held_out))]] = HELD_OUT


def _write(
    shards: Sequence[Path],
    problems: Problems,
    settings: MixSettings,
    survey: Survey,
    outcome: np.ndarray,
    out: Path,
    buckets: Path,
) -> dict[str, Any]:
    """The second pass. Returns counts of the examples by policy and by engine, and samples to show."""
    c = survey.candidates
    splits, places = [], np.zeros(len(c), np.int64)
    for number, name in ((TRAINED, TRAIN), (HELD_OUT, VALIDATION)):
        members = np.flatnonzero(outcome == number)
        places[members[np.lexsort((c["draw"][members], c["place"][members]))]] = np.arange(len(members))
        size = int(c["size"][members].sum(dtype=np.int64))
        shuffle = Shuffle(out / name, buckets / Path(name).name, len(members), size, SCHEMA)
        splits.append((number, shuffle))
    shown = Shown.choose(c, survey.cells, outcome, OUTCOMES, settings.examples)
    needed = (outcome <= HELD_OUT) | shown.wanted
    origins: dict[str, Counter[str]] = {"policies": Counter(), "engines": Counter()}
    for number, shard in enumerate(shards):
        first, last = np.searchsorted(c["shard"], [number, number + 1])
        if not needed[first:last].any():
            continue
        by_id = problems(shard)
        for start, table in sample_batches(shard):
            begin, end = first + np.searchsorted(c["row"][first:last], [start, start + len(table)])
            here = begin + np.flatnonzero(needed[begin:end])
            rows = _examples(
                table.take(c["row"][here] - start), [survey.cells[i].part for i in c["cell"][here]], by_id, settings
            )
            shown.add(here, rows)
            for split, shuffle in splits:
                members = np.flatnonzero(outcome[here] == split)
                shuffle.add(rows.take(members), places[here[members]])
            kept = rows.filter(outcome[here] <= HELD_OUT)
            origins["policies"].update(kept["policy"].to_pylist())
            origins["engines"].update(kept["engine"].to_pylist())
    for _, shuffle in splits:
        shuffle.finish()
    return {name: dict(sorted(counts.items())) for name, counts in origins.items()} | {
        "examples": survey.dropped.shown() | shown.to_dict()
    }


def _examples(table: pa.Table, parts: list[str], problems: Mapping[str, Problem], settings: MixSettings) -> pa.Table:
    """Rows of the data set, made from rows of a shard."""
    ids = table["problem_id"].combine_chunks().dictionary_encode()
    prompts = pa.array([problems[name].messages for name in ids.dictionary.to_pylist()], CONVERSATION)
    completion, think = _completions(table, settings)
    columns = {"part": pa.array(parts, pa.string()), "prompt": prompts.take(ids.indices)}
    columns |= {"completion": response_column(completion), "think": think}
    return pa.table([columns[name] if name in columns else table[name] for name in SCHEMA.names], schema=SCHEMA)


def counts_of(statistics: Mapping[str, Any]) -> dict[str, int]:
    """Counts by domain and outcome: reasoning_sampled = reasoning_kept + reasoning_incorrect + ..."""
    counts: Counter[str] = Counter()
    for line in statistics["lines"]:
        counts[f"{line['domain']}_sampled"] += line["samples"]
        counts[f"{line['domain']}_{line['outcome']}"] += line["samples"]
    return dict(counts)
