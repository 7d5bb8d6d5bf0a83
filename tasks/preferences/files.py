"""Preference files: settings and loading."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from grpo.errors import InputError
from tasks.preferences.formats import read_row
from tasks.preferences.rows import label_row, pair_row
from tasks.problems.files import file_rows


class PreferenceFile(BaseModel):
    """A file of preferences. Each row has one of these sets of columns; rows of several kinds may stand in one file.

    - chosen, rejected: whole conversations, lists of {role, content}, that differ in the last message only.
    - prompt, chosen, rejected: the prompt is text or a list of messages; so are the responses.
    - prompt, responses, ranks: a list of texts and a list of their ranks, 1 for the best; the same rank is a tie.
    - prompt, response (or completion), label: true, 1 or "safe"; false, 0 or "unsafe".

    Pairs may have a `strength` from 0 on (what RewardModel.margin multiplies), 1 where there is none. In a CSV file a
    list is written as JSON.
    """

    model_config = ConfigDict(extra="forbid")

    path: Path = Field(description="The file: .jsonl or .json (one object per line), .parquet or .csv (with a header).")
    limit: int | None = Field(default=None, ge=1, description="Rows to read, from the start. None: all.")
    on_bad_record: Literal["stop", "skip"] = Field(
        default="stop",
        description="How an unusable row is handled. stop: an error that names it, no output; skip: it is omitted, "
        "counted, and listed among the bad records of the artifact.",
    )


@dataclass
class Loaded:
    """Contents of a file. `counts`: rows, bad_records, tied (pairs of equal rank), pairs, labels."""

    pairs: list[dict[str, Any]] = field(default_factory=list)
    labels: list[dict[str, Any]] = field(default_factory=list)
    bad_records: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def load_preferences(file: PreferenceFile, held_out_share: float, *, whole: bool = False) -> Loaded:
    """Pairs and labels of a file, as rows made by `tasks.preferences.rows`. `whole`: pairs keep their reasoning.

    Raises InputError for the first bad record, with its file and line, unless bad records are skipped; and if no record
    is good.
    """
    loaded = Loaded()
    source, read, tied = f"file/{file.path.name}", 0, 0
    for where, row in itertools.islice(file_rows(file.path), file.limit):
        read += 1
        try:
            if isinstance(row, InputError):
                raise row
            judgments = read_row(row, where, whole=whole)
        except InputError as error:
            if file.on_bad_record == "stop":
                raise
            loaded.bad_records.append(str(error))
            continue
        tied += judgments.tied
        loaded.pairs += [pair_row(judgments.messages, *pair, source, held_out_share) for pair in judgments.pairs]
        loaded.labels += [label_row(judgments.messages, *label, source, held_out_share) for label in judgments.labels]
    if not loaded.pairs and not loaded.labels:
        bad = loaded.bad_records
        why = f", {len(bad)} of them bad records, the first: {bad[0]}" if bad else f" ({tied} tied pairs)"
        raise InputError(f"{file.path}: no preference left of {read} rows{why}")
    counts = {"rows": read, "bad_records": len(loaded.bad_records), "tied": tied}
    loaded.counts = {**counts, "pairs": len(loaded.pairs), "labels": len(loaded.labels)}
    return loaded
