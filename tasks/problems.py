"""Problem sets: where problems come from, and which of them are held out.

A source is configuration; `load` reads it into `Problem`s and counts what was dropped. `split` decides by the
prompt's text alone, so the same text is never on both sides, whatever its order or source.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from grpo.code_tests import check as check_tests
from grpo.data import Message, Problem
from grpo.errors import InputError
from grpo.validate import validate
from grpo.verifiers import VERIFIERS, pack_entry, verify

Row = tuple[str, dict[str, Any]]
"""Where it stands ("train.jsonl, line 7"), for messages, and its columns."""

_LANGUAGE = r"^[a-z]{2,3}(-[A-Za-z]+)?$"


class ReasoningGymSource(BaseModel):
    """Problems made by a reasoning-gym generator, with its own scorer as the verifier."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    family: str = Field(description="Name of a reasoning-gym dataset, e.g. chain_sum.")
    count: int = Field(
        ge=1, le=10_000_000, description="Problems to generate; duplicates among them are dropped, so fewer may remain."
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the generator, e.g. {min_terms: 2, max_digits: 2}; its own defaults otherwise. "
        "seed and size are set from the run's seed, seed_offset and count.",
    )
    seed_offset: int = Field(
        default=0, ge=0, description="Distinguishes sources of one family; every value gives an independent stream."
    )
    language: str = Field(
        default="en", pattern=_LANGUAGE, description="Language of the prompt, and of the reasoning expected: ISO 639."
    )
    prompt: str | None = Field(
        default=None,
        description="Python format string over the item's question and its metadata, e.g. chain_sum's {expression}, to "
        "phrase the problem otherwise or in another language. None: the question as generated.",
    )


class _ColumnsSource(BaseModel):
    """What sources made of rows have in common: which column is what."""

    model_config = ConfigDict(extra="forbid")

    prompt_column: str = Field(
        default="prompt",
        description="Column of the prompt: text, or a list of {role, content}. Where the default is absent, 'question' "
        "and then 'messages' are tried.",
    )
    answer_column: str = Field(
        default="answer",
        description="Column of the reference answer: text or a number. Of a text whose last line is '#### 1,234' "
        "(GSM8K), 1234 is taken. Not read for verifier none.",
    )
    verifier: str = Field(default="math", description=f"How answers are checked: {', '.join(VERIFIERS)}.")
    domain: Literal["reasoning", "general"] = Field(
        default="reasoning", description="reasoning: verified by rule; general: scored by a reward model or a judge."
    )
    language: str = Field(default="en", pattern=_LANGUAGE, description="Language of the prompts: ISO 639.")
    metadata_columns: list[str] = Field(
        default_factory=list, description="Columns to keep as the problem's metadata; their values must be JSON."
    )
    limit: int | None = Field(default=None, ge=1, description="Rows to read, from the start. None: all.")

    @field_validator("verifier")
    @classmethod
    def _known_verifier(cls, name: str) -> str:
        if name not in VERIFIERS:
            raise ValueError(f"unknown verifier {name!r}; known are {', '.join(VERIFIERS)}")
        return name

    @model_validator(mode="after")
    def _reasoning_is_verified(self) -> _ColumnsSource:
        if self.domain == "reasoning" and self.verifier == "none":
            raise ValueError("verifier 'none' is for domain 'general'; a reasoning problem needs one that checks")
        return self


class FileSource(_ColumnsSource):
    """One file of rows: .jsonl or .json (one object a line), .parquet or .csv (with a header)."""

    kind: Literal["file"] = "file"
    path: Path = Field(description="The file; its extension says its format.")


class HubSource(_ColumnsSource):
    """A Hugging Face data set: a name on the hub, or a local folder."""

    kind: Literal["dataset"] = "dataset"
    name: str = Field(
        min_length=1,
        description="Name on the hub, e.g. openai/gsm8k, or a folder: one that save_to_disk wrote, or one of parquet, "
        "JSONL or CSV files.",
    )
    config: str | None = Field(default=None, description="The data set's configuration, e.g. main. None: its default.")
    split: str = Field(default="train", min_length=1, description="Which split to read.")


ProblemSource = Annotated[ReasoningGymSource | FileSource | HubSource, Field(discriminator="kind")]


@dataclasses.dataclass(frozen=True)
class LoadResult:
    """Problems, no two of one text, and `counts`: read = kept + duplicates + unverifiable."""

    problems: list[Problem]
    counts: dict[str, int]


def load(source: ReasoningGymSource | FileSource | HubSource, seed: int) -> LoadResult:
    """Read a source. `seed` is the run's, in use only where problems are generated.

    "unverifiable" counts generated problems whose own gold answer their own scorer does not accept (a fault of the
    generator, hence dropped); in a file the same is an error of its author, hence raised.
    """
    read, kept, unverifiable = 0, [], 0
    for problem in _READERS[source.kind](source, seed):
        read += 1
        if problem.verifier == "reasoning_gym" and problem.answer and verify(problem, problem.answer) < 1.0:
            unverifiable += 1
        else:
            kept.append(problem)
    if getattr(source, "verifier", None) == "code":
        _check_solutions(source, kept)
    problems, duplicates = drop_duplicates(kept)
    if not problems:
        raise InputError(f"{_label(source)}: no problem left of {read} read ({unverifiable} unverifiable)")
    counts = {"read": read, "duplicates": duplicates, "unverifiable": unverifiable, "kept": len(problems)}
    return LoadResult(problems, counts)


def _check_solutions(source: Any, problems: list[Problem]) -> None:
    """Reference solutions must pass their tests: run side by side, since each takes a sandbox of its own."""
    if findings := validate(problems):
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        text = next(p.text for p in problems if p.id == findings[0].problem_id)
        raise InputError(f"{_label(source)}: problem {_short(text)}: {findings[0].what}{more}; mend or remove it")


def drop_duplicates(problems: Iterable[Problem]) -> tuple[list[Problem], int]:
    """The first problem of each text, in order, and how many were dropped. Also for the union of several sources."""
    first: dict[str, Problem] = {}
    total = 0
    for problem in problems:
        total += 1
        first.setdefault(normalise(problem.text), problem)
    return list(first.values()), total - len(first)


def split(
    problems: Sequence[Problem],
    held_out_share: float,
    salt: str,
    *,
    held_out_min: int = 0,
    held_out_max: int | None = None,
) -> tuple[list[Problem], list[Problem]]:
    """(train, held_out), each in the order given.

    A text is held out when its salted hash, as a number in [0, 1), is below `held_out_share`. Beyond `held_out_max`
    the texts of the largest hashes are dropped: moved to train they would be trained on by one run and be held out
    by another. Fewer than `held_out_min` is an error for the same reason.
    """
    if not 0 <= held_out_share <= 1:
        raise InputError(f"held_out_share is {held_out_share}; it is a share between 0 and 1")
    if held_out_max is not None and held_out_max < held_out_min:
        raise InputError(f"held_out_max {held_out_max} is less than held_out_min {held_out_min}")
    place = [_place(problem.text, salt) for problem in problems]
    train = [problem for problem, p in zip(problems, place, strict=True) if p >= held_out_share]
    held_out = [(p, problem) for problem, p in zip(problems, place, strict=True) if p < held_out_share]
    if len(held_out) < held_out_min:
        raise InputError(
            f"{len(held_out)} of {len(problems)} problems are held out, fewer than held_out_min {held_out_min}; raise "
            f"held_out_share ({held_out_share}) or add problems"
        )
    if held_out_max is not None and len(held_out) > held_out_max:
        chosen = {problem.id for _, problem in sorted(held_out, key=lambda x: (x[0], x[1].id))[:held_out_max]}
        held_out = [(p, problem) for p, problem in held_out if problem.id in chosen]
    return train, [problem for _, problem in held_out]


def normalise(text: str) -> str:
    """What makes two prompts the same: composed Unicode (x² stays unlike x2), no case, single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def _place(text: str, salt: str) -> float:
    digest = hashlib.sha256(f"{salt}\0{normalise(text)}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48  # 48 bits are exact in a float, and stay below 1


def _problem(source: str, messages: list[Message], answer: str, **rest: Any) -> Problem:
    problem = Problem("", messages, answer, source=source, **rest)
    identity = json.dumps([source, problem.text, answer], ensure_ascii=False)
    return dataclasses.replace(problem, id=hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:16])


def _label(source: ReasoningGymSource | FileSource | HubSource) -> str:
    """`Problem.source`: the file's name without its folder, so that ids are the same on another machine."""
    match source:
        case ReasoningGymSource():
            return f"reasoning_gym/{source.family}"
        case FileSource():
            return f"file/{source.path.name}"
        case HubSource():
            name = Path(source.name).name if Path(source.name).is_dir() else source.name
            return "/".join(["dataset", name, *([source.config] if source.config else []), source.split])


# --- reasoning-gym -------------------------------------------------------------------------------------------------


_READ_BY_NO_SCORER = {"source_dataset", "source_index", "difficulty"}


def _read_reasoning_gym(source: ReasoningGymSource, seed: int) -> Iterator[Problem]:
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
        yield _problem(
            _label(source),
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


# --- rows ----------------------------------------------------------------------------------------------------------


def _read_file(source: FileSource, seed: int) -> Iterator[Problem]:
    path = source.path
    reader = _FORMATS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path}: extension {path.suffix!r} is not supported; use {', '.join(_FORMATS)}")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give one file, or read the folder with kind 'dataset'")
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty")
    return _read_rows(source, reader(path))


def _read_hub(source: HubSource, seed: int) -> Iterator[Problem]:
    return _read_rows(source, _hub_rows(source))


def _read_rows(source: FileSource | HubSource, rows: Iterator[Row]) -> Iterator[Problem]:
    read = 0
    for where, row in rows:
        if read == source.limit:
            break
        read += 1
        yield _row_problem(source, where, row)
    if read == 0:
        raise InputError(f"{_label(source)}: there are no rows")


def _row_problem(source: FileSource | HubSource, where: str, row: dict[str, Any]) -> Problem:
    metadata = {
        name: _json_value(_column(row, name, "metadata_columns", where), name, where)
        for name in source.metadata_columns
    }
    # Tests say what is right; a reference solution is welcome, not needed.
    unanswered = source.verifier == "none" or (source.verifier == "code" and source.answer_column not in row)
    answer, solution = ("", "") if unanswered else _answer(source, where, row)
    if solution:
        metadata.setdefault("solution", solution)
    problem = _problem(
        _label(source),
        _prompt(source, where, row),
        answer,
        verifier=source.verifier,
        domain=source.domain,
        language=source.language,
        metadata=metadata,
    )
    if source.verifier == "code":
        try:
            check_tests(metadata.get("tests"))
        except InputError as error:
            remedy = "" if "tests" in metadata else "; keep their column with metadata_columns"
            raise InputError(f"{where}: {error}{remedy}") from None
    elif source.verifier != "none" and verify(problem, problem.answer) < 1.0:
        raise InputError(
            f"{where}: {source.answer_column} {_short(problem.answer)} is not right by its own verifier "
            f"{source.verifier!r}; correct it or choose another verifier"
        )
    return problem


def _prompt(source: FileSource | HubSource, where: str, row: dict[str, Any]) -> list[Message]:
    name = source.prompt_column
    if name == "prompt" and name not in row:
        name = next((n for n in ("question", "messages") if n in row), name)
    value = _column(row, name, "prompt_column", where)
    messages = _messages(value, name, where) if isinstance(value, list) else [{"role": "user", "content": value}]
    for message in messages:
        _text(message["content"], name, where)
    return messages


def _messages(value: list[Any], name: str, where: str) -> list[Message]:
    messages = []
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant"):
            raise InputError(
                f"{where}: {name} holds {_short(message)}; a message is {{role, content}} of role system, user or "
                "assistant"
            )
        messages.append({"role": message["role"], "content": message.get("content")})
    # What the assistant said last is the answer, not the prompt.
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise InputError(f"{where}: {name} has no message of role user")
    return messages


_GSM8K = re.compile(r"(?:^|\n)#### *([^\n]+)\s*$")


def _answer(source: FileSource | HubSource, where: str, row: dict[str, Any]) -> tuple[str, str]:
    """(reference answer, the worked solution before it or ""). GSM8K marks its calculations <<3+4=7>>: not text."""
    name = source.answer_column
    value = _column(row, name, "answer_column", where)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value), ""
    text = _text(value, name, where)
    if match := _GSM8K.search(text):
        solution = re.sub(r"<<[^>]*>>", "", text[: match.start()]).strip()
        return _text(match[1].replace(",", ""), name, where).strip(), solution
    return text.strip(), ""


def _column(row: dict[str, Any], name: str, setting: str, where: str) -> Any:
    if name not in row:
        raise InputError(
            f"{where}: column {name!r} is missing; the columns are {', '.join(map(str, row)) or 'none'}; set {setting}"
        )
    return row[name]


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: {name} is {_short(value)}, a {type(value).__name__}; text is needed")
    if not value.strip():
        raise InputError(f"{where}: {name} is blank; fill it or remove the row")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: {name} holds half a surrogate pair, which is no text; write it anew") from None
    return value


def _json_value(value: Any, name: str, where: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {name} cannot be kept as metadata: {error}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- formats -------------------------------------------------------------------------------------------------------


def _lines(file: BinaryIO, path: Path) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}, line {number}: byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8; "
                "convert the file, e.g. with iconv -t utf-8"
            ) from None


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            if number == 1 and line.lstrip().startswith("["):
                raise InputError(f"{where}: a JSON array; one object a line is needed: jq -c '.[]' {path.name}")
            try:
                row = json.loads(line.rstrip())
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{where}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
                ) from None
            except (ValueError, RecursionError) as error:  # a number of 5,000 digits; 100,000 brackets
                raise InputError(f"{where}: not usable JSON: {error}") from None
            if not isinstance(row, dict):
                raise InputError(f'{where}: {_short(row)} is no object; a row is {{"prompt": ..., "answer": ...}}')
            yield where, row


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        reader = csv.DictReader(_lines(file, path), strict=True)
        try:
            header = reader.fieldnames or []
            if twice := [name for name, times in Counter(header).items() if times > 1]:
                raise InputError(f"{path}, line 1: column {twice[0]!r} stands twice in the header")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    cells = sum(v is not None for k, v in row.items() if k is not None) + len(row.get(None) or [])
                    raise InputError(f"{where}: {cells} cells under a header of {len(header)}; quote cells with commas")
                yield where, row
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.reader.line_num}: not CSV: {error}") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable parquet file: {_first_line(error)}") from None


def _hub_rows(source: HubSource) -> Iterator[Row]:
    import datasets

    folder = Path(source.name).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file():
            data = datasets.load_from_disk(folder)
            if source.split not in data:
                raise InputError(f"{folder}: no split {source.split!r}; the splits are {', '.join(data)}")
            data = data[source.split]
        elif (folder / "state.json").is_file():
            data = datasets.load_from_disk(folder)
        else:
            name = str(folder) if folder.is_dir() else source.name
            data = datasets.load_dataset(name, source.config, split=source.split)
    except InputError:
        raise
    except Exception as error:  # a boundary: the library raises a dozen unrelated types for a bad name or no network
        hint = "" if folder.is_dir() else "; no such folder here: check the name and the network, or give a folder"
        raise InputError(f"data set {source.name!r} cannot be read: {_first_line(error)}{hint}") from None
    for number, row in enumerate(data, 1):
        yield f"{source.name}, row {number}", row


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_FORMATS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _jsonl_rows,
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
}

_READERS: dict[str, Callable[[Any, int], Iterator[Problem]]] = {
    "reasoning_gym": _read_reasoning_gym,
    "file": _read_file,
    "dataset": _read_hub,
}
