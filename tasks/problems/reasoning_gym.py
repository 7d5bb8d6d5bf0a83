"""Problems made by reasoning-gym, each family with a scorer of its own."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.rewards.reasoning_gym import pack_entry
from tasks.problems.sources import ReasoningGymSource, label, make_problem

_READ_BY_NO_SCORER = {"source_dataset", "source_index", "difficulty"}


def generate(source: ReasoningGymSource, seed: int) -> Iterator[Problem]:
    """Problems of reasoning-gym's families. Raises InputError for an unknown family or option."""
    import reasoning_gym
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    if source.family not in DATASETS:
        raise InputError(f"family: unknown reasoning-gym family {source.family!r}{_close(source.family, DATASETS)}")
    fields = [f.name for f in dataclasses.fields(DATASETS[source.family][1]) if f.name not in ("seed", "size")]
    for name in source.parameters:
        if name not in fields:
            raise InputError(f"parameters: {source.family} has no parameter {name!r}{_close(name, fields)}")
    # reasoning-gym makes item i from seed + i, so neighbouring seeds would share all but one of their items.
    stream = hashlib.sha256(f"{source.family}\0{seed}\0{source.seed_offset}".encode()).digest()
    start = int.from_bytes(stream[:4]) % 2**31
    try:
        items = reasoning_gym.create_dataset(source.family, seed=start, size=source.count, **source.parameters)
    except (AssertionError, AttributeError, ValueError, TypeError) as error:
        reason = str(error) or type(error).__name__
        raise InputError(f"parameters: {source.family} does not accept {source.parameters}: {reason}") from None
    # The common scorer reads the answer alone; families with their own may read anything.
    answer_only = type(items).score_answer is ProceduralDataset.score_answer
    for index in range(source.count):
        try:
            item = items[index]
        except Exception as error:  # a third party's generator, under parameters that it did not check
            raise InputError(
                f"parameters: {source.family} cannot make item {index} from {source.parameters}: {error}"
            ) from None
        if answer_only:
            entry = {"answer": item["answer"]}
        else:
            entry = {
                "answer": item["answer"],
                "metadata": {k: v for k, v in item["metadata"].items() if k not in _READ_BY_NO_SCORER},
            }
        metadata = {"family": source.family, "entry": pack_entry(entry)}
        if source.parameters:
            metadata["parameters"] = source.parameters
        yield make_problem(
            label(source),
            [{"role": "user", "content": _phrase(source, item)}],
            item["answer"] or "",  # some families have no single gold answer, only a scorer
            verifier="reasoning_gym",
            domain="reasoning",
            language=source.language,
            metadata=metadata,
        )


def _phrase(source: ReasoningGymSource, item: dict[str, Any]) -> str:
    if source.prompt is None:
        return item["question"]
    fields = {**item["metadata"], "question": item["question"]}
    try:
        return source.prompt.format(**fields)
    except KeyError as error:
        raise InputError(
            f"prompt: {source.family} has no field {error}; the fields are {', '.join(sorted(fields))}"
        ) from None
    except (IndexError, ValueError, AttributeError, TypeError) as error:
        raise InputError(f"prompt: {source.prompt!r} is not a format string for {source.family}: {error}") from None


def _close(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, cutoff=0.5) or (known if len(known) <= 20 else [])
    return f"; close: {', '.join(close)}" if close else "; see reasoning_gym.factory.DATASETS for the names"
