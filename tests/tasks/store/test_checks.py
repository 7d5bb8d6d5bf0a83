"""Artifacts whose bytes or manifests changed after they were made."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo.errors import InputError
from tasks.store import checks
from tasks.store.manifest import MANIFEST, InputRef, Manifest, artifact_key, canonical_json
from tasks.store.store import Store

CONFIG = {"lr": 1e-6, "seed": 3, "names": ["é", "b"]}
INPUTS = {"data": InputRef("d1", path="/data/train.parquet")}
KEY = artifact_key("sft", 1, CONFIG, {"data": "d1"})


def make(store: Store, *, force: bool = False) -> Manifest:
    with store.attempt("sft", KEY, force=force) as attempt:
        (attempt.out / "model").mkdir(exist_ok=True)
        (attempt.out / "model" / "w.bin").write_bytes(b"weights")
        (attempt.out / "config.json").write_bytes(b"{}")
        return attempt.publish(stage_version=1, config=CONFIG, inputs=INPUTS, counts={"n": 1}, metrics={"loss": 0.5})


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were compared with their hashes."""
    read: list[str] = []
    real = checks.file_sha256
    monkeypatch.setattr(checks, "file_sha256", lambda path: (read.append(path.name), real(path))[1])
    return read


def test_a_flipped_byte_is_not_reused(tmp_path: Path) -> None:
    store, made = Store(tmp_path), make(Store(tmp_path))
    assert store.find(KEY) == made
    flip(made.path / "model" / "w.bin")
    line = r"1: damaged: the contents of model/w.bin changed after it was made; `r1 verify --repair` .* `--force sft`$"
    for _ in range(2):  # the second time, too
        with pytest.raises(InputError, match=line):
            store.find(KEY)
        with pytest.raises(InputError, match=line):
            store.check(store.resolve("latest:sft"))
    assert store.find(KEY, compare=False) == made
    again = make(store, force=True)
    assert store.find(KEY) == again and again.attempt == 2


def test_files_are_compared_once_a_change(tmp_path: Path, reads: list[str]) -> None:
    store, made = Store(tmp_path), make(Store(tmp_path))
    store.find(KEY)
    assert reads == []  # they were hashed when they were published
    os.utime(made.path / "config.json", ns=(1, 1))
    store.find(KEY)
    store.find(KEY)
    assert reads == ["config.json"]
    store.check(made, every_byte=True)
    assert reads[1:] == ["config.json", "w.bin"]


def test_a_home_of_an_earlier_version_is_compared_once(tmp_path: Path, reads: list[str]) -> None:
    store, made = Store(tmp_path), make(Store(tmp_path))
    shutil.rmtree(tmp_path / "checked")
    values = json.loads((made.path / MANIFEST).read_text())
    del values["checksum"]
    (made.path / MANIFEST).write_text(json.dumps(values, indent=2, ensure_ascii=False))
    found = store.find(KEY)
    assert found is not None and found.digest == made.digest and found.to_dict() == values
    assert sorted(reads) == ["config.json", "w.bin"]
    store.find(KEY)
    assert len(reads) == 2


def test_a_moved_home_needs_no_new_comparison_and_a_copied_one_needs_one(tmp_path: Path, reads: list[str]) -> None:
    made = make(Store(tmp_path / "home"))
    (tmp_path / "home").rename(tmp_path / "moved")
    moved = Store(tmp_path / "moved").find(KEY)
    assert moved == made and moved.path == tmp_path / "moved" / made.path.relative_to(tmp_path / "home")
    assert reads == []
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    assert Store(tmp_path / "copied").find(KEY) == made
    assert len(reads) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest": 1}', "[" * 100_000])
def test_a_damaged_record_of_comparisons_is_made_anew(tmp_path: Path, reads: list[str], text: str) -> None:
    store, made = Store(tmp_path), make(Store(tmp_path))
    (record,) = tmp_path.glob("checked/*/*.json")
    before = record.read_text()
    record.write_text(text)
    assert store.find(KEY) == made
    assert len(reads) == 2 and record.read_text() == before


def test_a_store_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, made = Store(tmp_path), make(Store(tmp_path))
    shutil.rmtree(tmp_path / "checked")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert store.find(KEY) == made


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"created": 5}, "created: Input should be a valid string"),
        ({"created": "yesterday"}, "Invalid isoformat string: 'yesterday'"),
        ({"created": "2026-01-01T00:00:00"}, "created has no time zone"),
        ({"attempt": "1"}, "attempt: Input should be a valid integer"),
        ({"seconds": None}, "seconds: Input should be a valid number"),
        ({"files": {"config.json": {"size": 2}}}, "files.config.json.sha256: Field required"),
        ({"files": []}, "files: "),
        ({"inputs": {"data": {"digest": 1}}}, "inputs.data.digest: Input should be a valid string"),
        ({"inputs": {"data": {"digest": "d1", "of": 1}}}, "inputs.data.of: "),
        ({"other": 1}, "other: "),
        ({"config": {**CONFIG, "lr": 2e-6}}, "it was edited: the key is not that of its configuration and inputs"),
        ({"config": {"x": float("nan")}}, "Out of range float"),
        ({"config": {"x": deep(150)}}, "it was edited: the key is not"),
        ({"inputs": {}}, "it was edited: the key is not that of its configuration and inputs"),
        ({"files": {}}, "it was edited: the digest is not that of its files"),
        ({"metrics": {"loss": 0.1}}, "it was edited: its checksum is another"),
        ({"counts": {"n": 2}}, "it was edited: its checksum is another"),
        ({"stage": "rl"}, "it belongs to another artifact"),
    ],
)
def test_one_wrong_manifest_costs_a_line_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], said: str
) -> None:
    store = Store(tmp_path)
    first, second = make(store), make(store, force=True)
    file = second.path / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    _one_line(store, first, file, said, caplog)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda file: file.write_text("{"), "Invalid JSON: "),
        (lambda file: file.write_text("[" * 1_000_000), "Invalid JSON: recursion limit exceeded"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "Invalid JSON: "),
        (lambda file: file.write_text("null"), "Input should be"),
        (lambda file: (file.unlink(), file.mkdir()), "Is a directory"),
    ],
    ids=["torn", "deep", "binary", "null", "folder"],
)
def test_a_manifest_that_is_none_costs_a_line_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, write: Callable[[Path], Any], said: str
) -> None:
    store = Store(tmp_path)
    first, second = make(store), make(store, force=True)
    write(second.path / MANIFEST)
    _one_line(store, first, second.path / MANIFEST, said, caplog)


def _one_line(store: Store, first: Manifest, file: Path, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert store.list() == [first]
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith(f"ignoring the damaged artifact {file}: ") and said in line and "\n" not in line
    assert store.find(KEY) == first


def test_the_checksum_is_that_of_everything_else(tmp_path: Path) -> None:
    made = make(Store(tmp_path))
    values = made.to_dict()
    assert values.pop("checksum") == hashlib.sha256(canonical_json(values).encode()).hexdigest()
