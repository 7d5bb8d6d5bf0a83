"""Mixing: from shards of judged samples to the shuffled parquet of a data set, in memory that the samples do not fill.

Two passes over the shards. The first takes some 50 bytes of every kept sample: hashes of what it is and what it says.
From those alone follows what is drawn, held out, and where it stands. The second pass throws the drawn ones into
bucket files, a range of places each, and every bucket is put in order and written as parts.

A sample's hash is of the seed, its problem and its number: nothing else decides whether it comes before another of its
part. So neither the order of the shards, nor how they are cut, nor other parts change what is drawn.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo.data.records import Problem
from grpo.errors import InputError
from tasks.sft_data.duplicates import completion_digest
from tasks.sft_data.external_shuffle import Shuffle
from tasks.sft_data.mix_settings import NO_PART, MixSettings
from tasks.sft_data.statistics import DROPPED, KEPT, Cell, Dropped, Shown, Tally

logger = logging.getLogger(__name__)

TRAIN, VALIDATION = "examples/train", "examples/validation"

Problems = Callable[[Path], Mapping[str, Problem]]
"""The problems of a shard's samples, by id."""

SCHEMA = pa.schema(
    [
        ("problem_id", pa.string()),
        ("number", pa.int64()),
        ("part", pa.string()),
        ("domain", pa.string()),
        ("source", pa.string()),
        ("language", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("completion", pa.string()),
        ("think", pa.bool_()),
        ("tokens", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("policy", pa.string()),
        ("engine", pa.string()),
    ]
)
"""`messages` and `completion` are what SFT reads. `tokens` is the length of the response as it was sampled: with its
chain of thought, also where `think` is false and the completion has none."""

_TEXTS = (
    "problem_id",
    "completion",
    "summary",
    "domain",
    "source",
    "language",
    "policy",
    "engine",
    "verdict",
    "reason",
)
_COLUMNS = [*_TEXTS, "number", "tokens", "prompt_tokens"]
_BATCH_ROWS, _BATCH_BYTES = 8192, 32 * 2**20
_CANDIDATE = np.dtype(
    [
        *((name, np.uint64) for name in ("draw", "place", "text", "prompt")),
        *((name, np.int32) for name in ("cell", "shard", "row", "tokens", "size")),
    ]
)
TRAINED, HELD_OUT, DUPLICATE, NOT_DRAWN, NO_PART_ASKS, NO_SUMMARY = range(6)
OUTCOMES = (KEPT, KEPT, "duplicate", "not_drawn", "no_part", "no_summary")
"""What becomes of a sample that the filters kept; all but the first two are reasons of the funnel."""


def mix(shards: Sequence[Path], problems: Problems, settings: MixSettings, seed: int, out: Path) -> dict[str, Any]:
    """Write `out`/examples/train and /validation (no folder where nothing is held out) and return the statistics.

    `shards` are parquet files of `Sample`s with verdicts; `problems` gives those that a shard's samples answer. What
    an earlier call left in `out` is removed. Equal samples, settings and seed make equal bytes.

    Raises InputError where a column or a problem is missing, a source is in two parts, or nothing is left to write.
    """
    buckets = out / "buckets"
    for left in (out / "examples", buckets):
        shutil.rmtree(left, ignore_errors=True)
    survey = _survey(shards, problems, settings, seed)
    outcome = _draw(survey, settings)
    tally = Tally.of(survey.dropped, survey.cells, survey.candidates, outcome, OUTCOMES)
    if not (outcome <= HELD_OUT).any():
        raise InputError(f"mix: nothing is left for the data set of {tally.sampled} samples: {tally.outcomes()}")
    origins = _write(shards, problems, settings, survey, outcome, out, buckets)
    shutil.rmtree(buckets)
    made = tally.statistics(settings) | origins | {"seed": seed}
    for warning in made["warnings"]:
        logger.warning("mix: %s", warning)
    return made


@dataclass
class Survey:
    """What the first pass found: the samples that the filters kept, in the shards' order, and counts of the others."""

    candidates: np.ndarray
    cells: list[Cell]
    dropped: Dropped


def _survey(shards: Sequence[Path], problems: Problems, settings: MixSettings, seed: int) -> Survey:
    part_of = functools.cache(settings.part_of)
    chunks, cells, dropped = [np.empty(0, _CANDIDATE)], dict[Cell, int](), Dropped(settings.examples)
    for number, shard in enumerate(shards):
        prompts = _Prompts(problems(shard), seed)
        for start, table in _batches(shard):
            kept = pc.equal(table["verdict"], KEPT)
            dropped.add(table.filter(pc.invert(kept)), part_of, prompts.problems)
            rows = np.flatnonzero(kept.to_numpy())
            table = table.take(rows)
            columns = (table[name].to_pylist() for name in ("domain", "source", "language"))
            names = [Cell(part_of(s, d), d, s, language) for d, s, language in zip(*columns, strict=True)]
            found = np.zeros(len(rows), _CANDIDATE)
            found["cell"] = [cells.setdefault(name, len(cells)) for name in names]
            found["shard"], found["row"], found["tokens"] = number, start + rows, table["tokens"]
            _hash(table, prompts, settings, seed, found)
            chunks.append(found)
    return Survey(np.concatenate(chunks), list(cells), dropped)


class _Prompts:
    """The problems of a shard, and two hashes of each prompt's text: of what it says, and of (seed, what it says)."""

    def __init__(self, problems: Mapping[str, Problem], seed: int):
        self.problems = problems
        self._salt = f"{seed}\0held out\0".encode()
        self._known: dict[str, tuple[str, int]] = {}

    def __getitem__(self, problem_id: str) -> tuple[str, int]:
        """The prompt's text and the hash that decides whether it is held out."""
        if (known := self._known.get(problem_id)) is None:
            if problem_id not in self.problems:
                raise InputError(f"mix: problem {problem_id!r} is not among those of its shard; sample it again")
            text = self.problems[problem_id].text
            salted = self._salt + completion_digest(text, "").to_bytes(8, "little")
            known = text, int.from_bytes(hashlib.blake2b(salted, digest_size=8).digest(), "little")
            self._known[problem_id] = known
        return known


def _hash(table: pa.Table, prompts: _Prompts, settings: MixSettings, seed: int, found: np.ndarray) -> None:
    """Fill in sizes and hashes: of the sample (order of drawing, place in the data set), its text and its prompt."""
    keys, texts, asked = [], [], []
    completions, _ = _completions(table, settings)
    found["size"] = pc.binary_length(completions)
    columns = (table["problem_id"].to_pylist(), table["number"].to_pylist(), completions.to_pylist())
    for problem_id, number, completion in zip(*columns, strict=True):
        prompt, of_prompt = prompts[problem_id]
        name = f"{seed}\0{problem_id}\0{number}".encode()
        keys.append(hashlib.blake2b(name, digest_size=16, person=b"mix").digest())
        texts.append((completion_digest(prompt, completion) or 1) if completion else 0)  # 0: there is nothing to learn
        asked.append(of_prompt)
    pairs = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
    found["draw"], found["place"] = pairs[:, 0], pairs[:, 1]
    found["text"], found["prompt"] = np.array(texts, np.uint64), np.array(asked, np.uint64)


def _completions(table: pa.Table, settings: MixSettings) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """What is learnt of each sample, and whether that has the chain of thought. Empty: there is no summary."""
    thinking = [s for s in pc.unique(table["source"]).to_pylist() if settings.keeps_thought(s, "general")]
    of_source = pc.is_in(table["source"], value_set=pa.array(thinking, pa.string()))
    think = pc.or_(pc.not_equal(table["domain"], "general"), of_source)
    return pc.if_else(think, table["completion"], table["summary"]), think


def _draw(survey: Survey, settings: MixSettings) -> np.ndarray:
    """The outcome of each candidate, by its hashes alone."""
    c = survey.candidates
    names = sorted({cell.part for cell in survey.cells})
    part = np.array([names.index(cell.part) for cell in survey.cells], np.int32)[c["cell"]]
    outcome = np.full(len(c), NOT_DRAWN, np.int8)
    outcome[c["text"] == 0] = NO_SUMMARY
    if NO_PART in names:
        outcome[part == names.index(NO_PART)] = NO_PART_ASKS
    left = np.flatnonzero(outcome == NOT_DRAWN)
    # Of equal texts the first by part, then by hash, stays: parts that come later in the alphabet change nothing here.
    order = left[np.lexsort((c["draw"][left], part[left], c["text"][left]))]
    outcome[order[1:][c["text"][order[1:]] == c["text"][order[:-1]]]] = DUPLICATE
    wanted = settings.wanted()
    for number, name in enumerate(names):
        if name != NO_PART:
            there = np.flatnonzero((outcome == NOT_DRAWN) & (part == number))
            outcome[there[np.argsort(c["draw"][there], kind="stable")][: wanted[name]]] = TRAINED
    languages = sorted({cell.language for cell in survey.cells})
    language = np.array([languages.index(cell.language) for cell in survey.cells], np.int32)[c["cell"]]
    _hold_out(c, part * len(languages) + language, outcome, settings.validation_share)
    return outcome


def _hold_out(c: np.ndarray, stratum: np.ndarray, outcome: np.ndarray, share: float) -> None:
    """Of each stratum (part and language), the prompts of the smallest hashes until `share` of its examples is reached.

    A prompt that is held out in one is held out in all: none stands on both sides.
    """
    drawn = np.flatnonzero(outcome == TRAINED)
    chosen = [np.empty(0, np.uint64)]
    for number in np.unique(stratum[drawn]):
        prompts, sizes = np.unique(c["prompt"][drawn[stratum[drawn] == number]], return_counts=True)
        chosen.append(prompts[np.cumsum(sizes) - sizes < int(share * sizes.sum() + 0.5)])
    outcome[drawn[np.isin(c["prompt"][drawn], np.concatenate(chosen))]] = HELD_OUT


def _write(
    shards: Sequence[Path],
    problems: Problems,
    settings: MixSettings,
    survey: Survey,
    outcome: np.ndarray,
    out: Path,
    buckets: Path,
) -> dict[str, Any]:
    """The second pass. Returns which policies and engines the examples are from, and samples to show."""
    c = survey.candidates
    splits, places = [], np.zeros(len(c), np.int64)
    for number, name in ((TRAINED, TRAIN), (HELD_OUT, VALIDATION)):
        chosen = np.flatnonzero(outcome == number)
        places[chosen[np.lexsort((c["draw"][chosen], c["place"][chosen]))]] = np.arange(len(chosen))
        shuffle = Shuffle(
            out / name, buckets / Path(name).name, len(chosen), int(c["size"][chosen].sum(dtype=np.int64)), SCHEMA
        )
        splits.append((number, shuffle))
    shown = Shown.choose(c, survey.cells, outcome, OUTCOMES, settings.examples)
    wanted = (outcome <= HELD_OUT) | shown.wanted
    made_by: dict[str, Counter[str]] = {"policies": Counter(), "engines": Counter()}
    for number, shard in enumerate(shards):
        first, last = np.searchsorted(c["shard"], [number, number + 1])
        if not wanted[first:last].any():
            continue
        known = problems(shard)
        for start, table in _batches(shard):
            begin, end = first + np.searchsorted(c["row"][first:last], [start, start + len(table)])
            here = begin + np.flatnonzero(wanted[begin:end])
            rows = _examples(
                table.take(c["row"][here] - start), [survey.cells[i].part for i in c["cell"][here]], known, settings
            )
            shown.add(here, rows)
            for split, shuffle in splits:
                chosen = np.flatnonzero(outcome[here] == split)
                shuffle.add(rows.take(chosen), places[here[chosen]])
            kept = rows.filter(outcome[here] <= HELD_OUT)
            made_by["policies"].update(kept["policy"].to_pylist())
            made_by["engines"].update(kept["engine"].to_pylist())
    for _, shuffle in splits:
        shuffle.finish()
    return {name: dict(sorted(counts.items())) for name, counts in made_by.items()} | {
        "examples": survey.dropped.shown() | shown.to_dict()
    }


def _examples(table: pa.Table, parts: list[str], problems: Mapping[str, Problem], settings: MixSettings) -> pa.Table:
    """Rows of the data set from rows of a shard."""
    ids = table["problem_id"].combine_chunks().dictionary_encode()
    messages = pa.array([problems[name].messages for name in ids.dictionary.to_pylist()], SCHEMA.field("messages").type)
    completion, think = _completions(table, settings)
    made = {"part": pa.array(parts, pa.string()), "messages": messages.take(ids.indices)}
    made |= {"completion": completion, "think": think}
    return pa.table([made[name] if name in made else table[name] for name in SCHEMA.names], schema=SCHEMA)


def _batches(shard: Path) -> Iterator[tuple[int, pa.Table]]:
    """The rows of a shard with the number of the first, as many at a time as memory is sure to hold."""
    try:
        file = pq.ParquetFile(shard)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{shard}: not a readable parquet file ({error})") from None
    with file:
        if missing := set(_COLUMNS) - set(file.schema_arrow.names):
            raise InputError(f"{shard}: column {sorted(missing)[0]!r} is missing; a shard of samples needs it")
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        row_bytes = sum(group.total_byte_size for group in groups) / max(1, file.metadata.num_rows)
        rows = max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / max(1, row_bytes))))
        start = 0
        for batch in file.iter_batches(rows, columns=_COLUMNS):
            table = pa.Table.from_batches([batch])
            judged = pc.or_(
                pc.equal(table["verdict"], KEPT),
                pc.and_(pc.equal(table["verdict"], DROPPED), pc.not_equal(table["reason"], "")),
            )
            if not pc.all(judged, min_count=0).as_py():
                raise InputError(
                    f"{shard}: a sample has no verdict, or was dropped for no reason; filter before mixing"
                )
            yield start, table
            start += len(table)
