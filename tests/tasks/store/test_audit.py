"""What `r1 verify` finds in a store, and that it is clean after the repair."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tasks.store.audit import audit
from tasks.store.backend import Flaw
from tasks.store.manifest import MANIFEST, InputRef, Manifest, artifact_key
from tasks.store.stale import current_digests, make_current, stale_reasons
from tasks.store.store import Store


def make(store: Store, stage: str, inputs: dict[str, InputRef] | None = None, *, force: bool = False) -> Manifest:
    inputs, config = inputs or {}, {"seed": 0}
    key = artifact_key(stage, 1, config, {name: ref.digest for name, ref in inputs.items()})
    with store.attempt(stage, key, force=force) as attempt:
        (attempt.out / "weights").write_text(stage)
        return attempt.publish(stage_version=1, config=config, inputs=inputs)


def found(store: Store, *, every_byte: bool = True, repair: bool = False) -> list[tuple[str, str, str]]:
    """Kind, name without keys, and what is said or, after a repair, done."""

    def told(finding: Flaw) -> tuple[str, str, str]:
        parts = [part for part in Path(finding.what).parts if len(part) < 64]
        done = finding.repair() if repair and finding.repair else ""
        return finding.kind, "/".join(parts), done or finding.said

    return [told(finding) for finding in audit(store, every_byte=every_byte)]


def change_silently(file: Path) -> None:
    """Change a byte, and not the time of the file, as a failing disk does."""
    before = file.stat()
    file.write_bytes(b"W" + file.read_bytes()[1:])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_whole_store_is_clean(tmp_path: Path) -> None:
    store = Store(tmp_path)
    base = make(store, "base")
    sft = make(store, "sft", {"base": base.ref, "files": InputRef("d", path="/mine")})
    make_current(store, "tiny", 0, [base, sft])
    assert found(store) == [] and found(Store(tmp_path / "none")) == []


def test_every_byte_is_read_unless_told_otherwise(tmp_path: Path) -> None:
    store = Store(tmp_path)
    change_silently(make(store, "base").path / "weights")
    assert found(store, every_byte=False) == []
    assert found(store) == [("corrupt", "artifacts/base/1", "the contents of weights changed after it was made")]


def test_damaged_artifacts_are_set_aside_and_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    base = make(store, "base")
    sft = make(store, "sft", {"base": base.ref})
    make_current(store, "tiny", 0, [base, sft])
    change_silently(base.path / "weights")
    assert [kind for kind, _, _ in found(store)] == ["corrupt", "missing", "missing"]
    corrupt, of_sft, pointer = found(store, repair=True)
    assert corrupt[2].startswith("set aside in quarantine/base/") and corrupt[2].endswith("/1.0")
    assert of_sft[0] == "missing" and "its input base, base" in of_sft[2]
    assert pointer[0] == "missing" and pointer[2] == "removed"
    assert current_digests(store) == {sft.digest}
    assert store.find(base.key) is None and store.list() == [sft]
    assert (tmp_path / "quarantine" / "base" / base.key / "1.0" / "weights").read_text() == "Wase"
    assert make(store, "base").digest == base.digest  # the same bytes: what was made from it is whole again
    assert found(store) == []


def test_an_unreadable_manifest_is_set_aside(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (make(store, "base").path / MANIFEST).write_text("[" * 100_000)
    (tmp_path / "artifacts" / "sft" / "abc" / "1").mkdir(parents=True)
    assert [(kind, name) for kind, name, _ in found(store)] == [
        ("corrupt", "artifacts/base/1"),
        ("corrupt", "artifacts/sft/abc/1"),
    ]
    found(store, repair=True)
    assert found(store) == []


def test_leftovers_of_attempts(tmp_path: Path) -> None:
    store, record = Store(tmp_path), {"forced": False, "stage": "sft"}
    made = make(store, "sft")
    published, torn, unfinished, forced = (
        tmp_path / "work" / f"{name}-{made.key[:16]}" for name in ("a", "b", "c", "d")
    )
    other = artifact_key("sft", 2, {}, {})
    for work in (published, torn, unfinished, forced):
        (work / "out").mkdir(parents=True)
    (published / "attempt.json").write_text(json.dumps({**record, "key": made.key}))
    (torn / "attempt.json").write_text("{")
    (unfinished / "attempt.json").write_text(json.dumps({**record, "key": other}))
    (forced / "attempt.json").write_text(json.dumps({**record, "key": made.key, "forced": True}))
    with store.attempt("x", made.key):  # somebody works on this key: hands off
        assert found(store) == []
    assert [(kind, said) for kind, _, said in found(store)] == [
        ("orphaned", "its artifact was published"),
        ("orphaned", "the record of the attempt is damaged"),
    ]
    found(store, repair=True)
    assert found(store) == [] and unfinished.exists() and forced.exists() and not published.exists()


def test_damaged_pointers_and_stray_folders_are_no_trouble(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = make(store, "base")
    make_current(store, "tiny", 0, [made])
    (tmp_path / "current" / "my-notes").mkdir()
    (tmp_path / "current" / "my-notes" / "a.digest").write_text("mine")
    (pointer,) = tmp_path.glob("current/tiny-0/*.digest")
    pointer.write_bytes(b"\xff\x00")
    assert stale_reasons(store) == {}
    assert [(kind, name) for kind, name, _ in found(store)] == [("missing", f"current/tiny-0/{pointer.name}")]
    make_current(store, "tiny", 0, [made])
    assert current_digests(store) == {made.digest} and found(store) == []
