"""The list of all artifacts, which checks again only what changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from grpo.errors import InputError
from tasks.store import listing
from tasks.store.manifest import MANIFEST, Manifest, artifact_key
from tasks.store.store import Store


def make(store: Store, stage: str, number: int) -> Manifest:
    config = {"number": number}
    with store.attempt(stage, artifact_key(stage, 1, config, {})) as attempt:
        (attempt.out / "weights").write_text("abc")
        return attempt.publish(stage_version=1, config=config, metrics={"loss": 0.1 + 0.2})


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the manifests that were checked against themselves."""
    keys: list[str] = []
    real = listing.read_manifest
    monkeypatch.setattr(listing, "read_manifest", lambda folder: (keys.append(folder.parts[-2]), real(folder))[1])
    return keys


def test_manifests_are_checked_once_a_change(tmp_path: Path, checked: list[str]) -> None:
    store = Store(tmp_path)
    base, sft = make(store, "base", 0), make(store, "sft", 0)
    assert store.list() == [base, sft] and sorted(checked) == sorted([base.key, sft.key])
    assert store.list() == [base, sft] and store.list("sft") == [sft] and store.list("rl") == []
    assert len(checked) == 2
    later = make(store, "sft", 1)
    assert store.list("sft") == [sft, later] and checked[2:] == [later.key]
    assert store.list() == [base, sft, later] and len(checked) == 3


def test_what_changes_after_it_was_checked_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    whole, edited, short, gone = (make(store, "sft", number) for number in range(4))
    assert len(store.list()) == 4
    file = edited.path / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), "metrics": {"loss": 0.1}}))
    os.truncate(short.path / "weights", 1)
    (gone.path / "weights").unlink()
    for _ in range(2):
        assert store.list() == [whole]


def test_the_newest_of_each_stage_is_the_last_of_its_list(tmp_path: Path, checked: list[str]) -> None:
    store = Store(tmp_path)
    base, *sft = make(store, "base", 0), make(store, "sft", 0), make(store, "sft", 1), make(store, "sft", 2)
    newest = {"base": base, "sft": store.list("sft")[-1]}
    assert store.newest_by_stage() == newest and len(checked) == 4  # nothing was known yet
    assert store.newest_by_stage() == newest and len(checked) == 4
    (sft[-1].path / "weights").unlink()
    assert store.newest_by_stage() == {"base": base, "sft": sft[-2]}
    later = make(store, "base", 1)
    assert store.newest_by_stage() == {"base": later, "sft": sft[-2]}
    record = tmp_path / "checked" / "manifests.json"
    for ending in ([], [5, 1], ["2026", "1"], ["2026", 1, 1]):  # the first is a record of an earlier version
        damaged = {name: [*state[:3], *ending] for name, state in json.loads(record.read_text()).items()}
        record.write_text(json.dumps(damaged))
        assert store.newest_by_stage() == {"base": later, "sft": sft[-2]}


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"sft": 1}'])
def test_a_damaged_record_is_made_anew(tmp_path: Path, checked: list[str], text: str) -> None:
    store, made = Store(tmp_path), make(Store(tmp_path), "sft", 0)
    store.list()
    record = tmp_path / "checked" / "manifests.json"
    before = record.read_text()
    record.write_text(text)
    assert store.list() == [made] and len(checked) == 2 and record.read_text() == before


def test_an_unreadable_record_or_a_stray_file_hides_nothing(tmp_path: Path) -> None:
    store, made = Store(tmp_path), make(Store(tmp_path), "sft", 0)
    (tmp_path / "checked" / "manifests.json").mkdir()
    (tmp_path / "artifacts" / "notes.txt").write_text("mine")
    (tmp_path / "artifacts" / "sft" / "empty").mkdir()
    assert store.list() == [made] == store.list()


@pytest.mark.parametrize("stage", ["..", "../work", "", "/etc"])
def test_a_stage_is_no_path(tmp_path: Path, stage: str) -> None:
    make(Store(tmp_path), "sft", 0)
    with pytest.raises(InputError, match="no artifact of stage .*; stages that have one: sft"):
        Store(tmp_path).resolve(f"latest:{stage}")
