"""SFT examples: prompts with the completions to learn, as parquet shards that grpo/ trains on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.data.conversations import CONVERSATION, from_columns, to_columns
from grpo.data.records import Problem, Sample
from grpo.data.template import completion_tokens, prompt_tokens
from grpo.judging.questions import question_of
from grpo.model_folder import TOKENIZER_OPTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD = 4096
_SCHEMA = pa.schema(
    [
        ("problem_id", pa.string()),
        ("domain", pa.string()),
        ("language", pa.string()),
        ("prompt", CONVERSATION),
        ("completion", CONVERSATION),
    ]
)


def example(problem: Problem, completion: str) -> dict[str, Any]:
    """A row of SFT data."""
    return {
        "problem_id": problem.id,
        "domain": problem.domain,
        "language": problem.language,
        "messages": problem.messages,
        "completion": completion,
    }


def tokenizer_of(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **TOKENIZER_OPTIONS)
    return tokenizer


def with_lengths(sample: Sample, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """A sample that the policy did not make, with the numbers of tokens that SFT reads.

    Raises:
        InputError: the tokenizer has no chat template.
    """
    return dataclasses.replace(
        sample,
        tokens=len(completion_tokens(tokenizer, sample.completion)),
        prompt_tokens=len(prompt_tokens(tokenizer, problem.messages, "chat")),
    )


def shown_examples(folder: Path, count: int) -> list[dict[str, str]]:
    """Texts of up to `count` examples, evenly spaced over a folder of shards: prompt, original (if any), completion."""
    from pyarrow.dataset import dataset  # imports pandas

    data = dataset(folder, format="parquet")
    rows = data.count_rows()
    places = sorted({place * rows // count for place in range(count)}) if rows else []
    names = [name for name in ("prompt", "messages", "original", "completion") if name in data.schema.names]
    return [
        {
            "prompt": question_of(row["messages"]),
            **({"original": row["original"]} if row.get("original") else {}),
            "completion": row["completion"],
        }
        for row in map(from_columns, data.take(places, columns=names).to_pylist())
    ]


def write_examples(folder: Path, examples: Sequence[dict[str, Any]]) -> None:
    """Writes shards part-NNNNN.parquet into `folder`, which is created, with the columns of
    `grpo.data.conversations`."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = _SCHEMA
    if any("original" in row for row in examples):  # the trajectory that was rewritten
        schema = schema.append(pa.field("original", pa.string()))
    for number, start in enumerate(range(0, max(1, len(examples)), SHARD)):
        rows = [to_columns(row) for row in examples[start : start + SHARD]]
        table = pa.Table.from_pylist(rows, schema=schema)
        pq.write_table(table, folder / f"part-{number:05d}.parquet")
