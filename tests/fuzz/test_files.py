"""Files and settings that a person or a damaged disk gives us: an InputError of one line, or a value; nothing else."""

from __future__ import annotations

import json
import string
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from flows.recipe.load import load_recipe, shipped
from grpo.errors import InputError
from grpo.processes.metrics_log import Metrics
from grpo.sampling.journal import Journal
from tasks.preferences.files import PreferenceFile, load_preferences
from tasks.problems.load import load
from tasks.problems.sources import FileSource
from tasks.store.manifest import artifact_key, examine
from tasks.store.store import Store
from tasks.trainer.launch import read_metrics
from tests.flows.recipe.test_recipe_secrets import FIELDS
from tests.support.fuzzing import fuzz

RECIPES = Path(__file__).parents[2] / "flows" / "recipes"
VERIFIERS = ["math", "exact", "number", "choice", "code", "none", "judge"]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**30, -1, 2**63, 0, 1])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["nan", "Infinity", "\u0000", "\ud800", "#### 42", "\\boxed{42}", "42", "-" * 1000 + "1", "1e999"]
    )
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
deep = st.sampled_from(["[" * 100_000, "{a=" * 100_000, '{"a":' * 100_000, "9" * 5_000, "[" * 500 + "]" * 500])


def one_line(call: Callable[[], Any]) -> Any:
    """Its result, or None after an InputError, whose message must be one line of a bounded length."""
    try:
        return call()
    except InputError as error:
        said = str(error)
        assert said and "\n" not in said and len(said) < 2_000, said[:500]
    return None


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """The bytes with a few spans taken out, doubled or replaced."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = min(len(data), begin + draw(st.integers(0, 40)))
        how = draw(st.sampled_from(["out", "double", "bytes", "text"]))
        put = bytes(data[begin:end]) * 2 if how == "double" else b""
        put = draw(st.binary(max_size=8)) if how == "bytes" else put
        put = draw(st.text(string.printable, max_size=8)).encode() if how == "text" else put
        data[begin:end] = put
    return bytes(data)


@pytest.mark.parametrize("name", shipped())
def test_damaged_recipes(name: str, tmp_path: Path, record_property: Any) -> None:
    path = tmp_path / "recipe.toml"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        one_line(lambda: load_recipe(str(path)))

    fuzz(check, record_property, data=damaged((RECIPES / f"{name}.toml").read_bytes()))


def test_recipes_of_any_text(tmp_path: Path, record_property: Any) -> None:
    path = tmp_path / "recipe.toml"

    def check(text: str) -> None:
        path.write_bytes(text.encode(errors="surrogatepass"))
        one_line(lambda: load_recipe(str(path)))

    fuzz(check, record_property, text=st.text() | deep.map("a = {}".format))


def test_any_value_in_any_field(record_property: Any) -> None:
    def check(field: str, value: Any) -> None:
        one_line(lambda: load_recipe("tiny", [f"{field}={_toml(value)}"]))

    fuzz(check, record_property, field=st.sampled_from(FIELDS), value=values)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value) if isinstance(value, float) else '""' if value is None else json.dumps(value)


def test_overrides(record_property: Any) -> None:
    paths = st.sampled_from(FIELDS) | st.text(max_size=30) | st.text("ab.0", max_size=12)

    def check(path: str, value: str) -> None:
        one_line(lambda: load_recipe("tiny", [path + value]))

    fuzz(
        check,
        record_property,
        path=paths,
        value=st.text(max_size=30).map("={}".format) | deep.map("={}".format) | st.text(),
    )


def rows(*columns: str) -> st.SearchStrategy[bytes]:
    """JSON lines whose rows have these columns, or any."""
    named = st.dictionaries(st.sampled_from(columns) | st.text(max_size=5), values, max_size=5)
    messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x"]), "content": values}))
    row = st.builds(
        lambda row, column, value: {**row, column: value}, named, st.sampled_from(columns), values | messages
    )
    line = row.map(lambda row: json.dumps(row).encode()) | deep.map(str.encode) | st.binary(max_size=40)
    return st.lists(line, max_size=5).map(b"\n".join)


PROBLEM = {"prompt": "What is 6 * 7?", "answer": "42", "tests": [{"assert": "f() == 42"}], "rubric": []}


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_problem_files(verifier: str, tmp_path: Path, record_property: Any) -> None:
    path = tmp_path / "problems.jsonl"

    def check(data: bytes, kept: list[str], skip: bool) -> None:
        path.write_bytes(data)
        source = FileSource(
            path=path,
            verifier=verifier,
            domain="general" if verifier == "none" else "reasoning",
            metadata_columns=kept,
            on_bad_record="skip" if skip else "stop",
        )
        loaded = one_line(lambda: load(source, 0))
        for problem in loaded.problems if loaded else ():
            assert isinstance(problem.text, str) and isinstance(problem.answer, str)

    # Programs are run to check their solutions: tests/grpo/sandbox. Here no row has one.
    columns = ("prompt", "question", "messages", "answer", "tests", "rubric", "constraints", "answer_style")
    data = rows(*columns) | damaged(json.dumps(PROBLEM).encode())
    kept = st.lists(st.sampled_from(["tests", "rubric", "constraints", "answer_style"]), unique=True)
    fuzz(check, record_property, data=data, kept=kept, skip=st.booleans())


def test_pair_files(tmp_path: Path, record_property: Any) -> None:
    path = tmp_path / "pairs.jsonl"

    def check(data: bytes, skip: bool, whole: bool) -> None:
        path.write_bytes(data)
        file = PreferenceFile(path=path, on_bad_record="skip" if skip else "stop")
        one_line(lambda: load_preferences(file, 0.1, whole=whole))

    columns = ("prompt", "chosen", "rejected", "responses", "ranks", "response", "label", "strength")
    fuzz(check, record_property, data=rows(*columns), skip=st.booleans(), whole=st.booleans())


@pytest.mark.parametrize("kind", ["csv", "parquet", "json"])
def test_files_of_other_kinds(kind: str, tmp_path: Path, record_property: Any) -> None:
    path = tmp_path / f"rows.{kind}"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        one_line(lambda: load(FileSource(path=path, verifier="exact"), 0))
        one_line(lambda: load_preferences(PreferenceFile(path=path), 0.1))

    fuzz(check, record_property, data=st.binary() | damaged(b'prompt,answer\n"What, now?",42\n1+1,2\n'))


def test_manifests(tmp_path: Path, record_property: Any) -> None:
    with Store(tmp_path).attempt("sft", artifact_key("sft", 1, {"epochs": 2}, {})) as attempt:
        (attempt.out / "weights").write_bytes(b"12345")
        folder = attempt.publish(stage_version=1, config={"epochs": 2}).path
    whole = (folder / "manifest.json").read_bytes()
    fields = json.loads(whole)
    without_checksum = {name: value for name, value in fields.items() if name != "checksum"}  # as earlier versions

    def check(data: bytes, name: str, value: Any) -> None:
        for text in (data, json.dumps({**fields, name: value}).encode()):
            (folder / "manifest.json").write_bytes(text)
            manifest, problem = examine(folder)
            assert problem or manifest.to_dict() in (fields, without_checksum)
            assert len(Store(tmp_path).list()) <= 1

    fuzz(
        check,
        record_property,
        data=damaged(whole) | deep.map(str.encode),
        name=st.sampled_from([*fields]),
        value=values,
    )


lines = st.lists(
    st.binary(max_size=20) | values.map(lambda value: json.dumps(value).encode()) | deep.map(str.encode), max_size=6
)
record = st.dictionaries(st.sampled_from(["step", "of", "loss"]), values).map(lambda value: json.dumps(value).encode())


def test_metrics(tmp_path: Path, record_property: Any) -> None:
    path = tmp_path / "metrics.jsonl"

    def check(data: list[bytes], step: int) -> None:
        path.write_bytes(b"\n".join(data))
        assert all(isinstance(entry["step"], int) for entry in read_metrics(path))
        resumed = Metrics(path, step)
        resumed.log(step + 1, step + 1, loss=1.0)
        assert read_metrics(path)[-1] == {"step": step + 1, "of": step + 1, "loss": 1.0}
        resumed.file.close()

    fuzz(check, record_property, data=lines | st.lists(record), step=st.integers(0, 10))


def test_journals(tmp_path: Path, record_property: Any) -> None:
    path = tmp_path / "shard.journal"

    def check(data: list[bytes]) -> None:
        path.write_bytes(b"\n".join(data))
        journal = Journal(path)
        before = journal.lines()
        journal.append({"problem": "p"})
        assert journal.lines() == [*before, {"problem": "p"}] or any(value != value for value in map(str, before))
        journal.close()

    checked = lines.map(lambda data: [b"%08x %b" % (zlib.crc32(line), line) for line in data])
    fuzz(check, record_property, data=lines | checked)
