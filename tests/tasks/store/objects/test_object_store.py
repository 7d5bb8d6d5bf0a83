"""The object store against a real S3 server: publication, look-up, damage, pruning, and what never leaves a machine."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from grpo.errors import InputError
from tasks.store.audit import audit
from tasks.store.objects.object_store import ObjectStore, cache_bytes
from tasks.store.prune import plan_pruning, remove_artifact
from tasks.store.stale import current_digests, make_current, stale_reasons
from tests.support.shared_bucket import CONFIG, KEY, Shared, make

pytestmark = pytest.mark.system


def test_what_one_home_publishes_another_reads(shared: Shared) -> None:
    here, there = shared.store("a"), shared.store("b")
    assert there.find(KEY) is None and there.list() == []
    made = make(here, {"model/w.bin": b"weights", "empty": b""})
    found = there.find(KEY)
    assert found == made == there.resolve("latest:sft") == there.resolve(made.digest[:8]) and there.list() == [made]
    assert not found.path.exists()  # nothing is fetched before somebody reads it
    assert found.local("empty").read_bytes() == b"" and not (found.path / "model").exists()
    assert (found.local() / "model/w.bin").read_bytes() == b"weights"
    assert found.path.is_relative_to(shared.folder / "b") and made.path.is_relative_to(shared.folder / "a")
    assert there.check(found, every_byte=True) is found
    assert found.location == f"s3://artifacts/{shared.prefix}/files/{KEY}/{made.digest}"
    assert json.loads(shared.body(f"manifests/{KEY}/1.json")) == made.to_dict()
    assert not list((shared.folder / "a").glob("artifacts")) and not list((shared.folder / "a").glob("work/*"))


def test_the_key_and_digest_are_those_of_a_local_store(shared: Shared) -> None:
    from tasks.store.store import Store

    local, made = make(Store(shared.folder / "local")), make(shared.store("a"))
    assert (local.key, local.digest, local.files) == (made.key, made.digest, made.files)


def test_force_makes_a_second_attempt_and_equal_attempts_share_their_files(shared: Shared) -> None:
    here, there = shared.store("a"), shared.store("b")
    first, second = make(here), make(there, force=True)
    assert (first.attempt, second.attempt) == (1, 2) and first.digest == second.digest
    assert here.find(KEY) == second and len(shared.keys("files/")) == 1
    assert remove_artifact(here, first)
    assert there.check(there.find(KEY)).local("model/w.bin").read_bytes() == b"weights"


def test_an_artifact_without_its_manifest_is_invisible(shared: Shared) -> None:
    store, made = shared.store("a"), make(shared.store("a"))
    shared.server.client().delete_object(Bucket="artifacts", Key=f"{shared.prefix}/manifests/{KEY}/1.json")
    assert store.find(KEY) is None and store.list() == []
    (flaw,) = audit(store)
    assert (flaw.kind, flaw.said) == ("orphaned", "was never published") and made.digest in flaw.what
    assert flaw.repair() == "removed" and shared.keys("files/") == [] and list(audit(store)) == []


def test_changed_bytes_are_refused_on_arrival_and_mended_by_a_new_run(shared: Shared) -> None:
    made = make(shared.store("a"))
    shared.write(f"files/{KEY}/{made.digest}/model/w.bin", b"wEights", Metadata={"sha256": "0" * 64})
    reader = shared.store("b")
    words = "contents of s3://.*/model/w.bin are not those that were published; `r1 verify --repair`"
    for read in (lambda: reader.find(KEY).local("model/w.bin"), lambda: reader.check(reader.find(KEY))):
        with pytest.raises(InputError, match=words):
            read()
    assert [path for path in (shared.folder / "b").rglob("*") if "w.bin" in path.name] == []
    assert list(audit(reader, every_byte=False)) == []  # the size is right
    (flaw,) = audit(reader)
    assert flaw.kind == "corrupt" and flaw.said == "the contents of model/w.bin changed after it was made"
    assert "set aside in quarantine/" in flaw.repair() and list(audit(reader)) == []
    assert reader.find(KEY) is None and len(shared.keys("quarantine/")) == 1
    assert make(shared.store("c")) and reader.check(reader.find(KEY)).local("model/w.bin").read_bytes() == b"weights"


def test_a_forced_attempt_replaces_a_damaged_file(shared: Shared) -> None:
    made = make(shared.store("a"))
    name = f"files/{KEY}/{made.digest}/model/w.bin"
    shared.write(name, b"wEights", Metadata={"sha256": made.files["model/w.bin"]["sha256"]})
    assert make(shared.store("b"), force=True).attempt == 2 and shared.body(name) == b"weights"


def test_a_missing_file_makes_the_artifact_incomplete(shared: Shared, caplog: pytest.LogCaptureFixture) -> None:
    made = make(shared.store("a"), {"a": b"1", "b": b"2"})
    shared.server.client().delete_object(Bucket="artifacts", Key=f"{shared.prefix}/files/{KEY}/{made.digest}/b")
    with caplog.at_level(logging.WARNING):
        assert shared.store("b").find(KEY) is None
    assert "ignoring the damaged artifact" in caplog.text and "b is missing" in caplog.text
    assert make(shared.store("c"), {"a": b"1", "b": b"2"}).attempt == 2 and shared.store("b").find(KEY).attempt == 2


def test_a_copy_that_was_changed_is_fetched_again(shared: Shared) -> None:
    store = shared.store("b")
    make(shared.store("a"))
    found = store.check(store.find(KEY))
    (found.path / "model/w.bin").write_bytes(b"wEights")
    assert store.check(found).local("model/w.bin").read_bytes() == b"weights"


@pytest.mark.parametrize("damage", ["{", "edited", "outside"])
def test_a_damaged_manifest_is_passed_over(shared: Shared, damage: str) -> None:
    store = shared.store("a")
    make(store), make(store, force=True)
    name = f"manifests/{KEY}/2.json"
    values = json.loads(shared.body(name))
    if damage == "outside":  # whoever can write to the bucket may not write elsewhere on the readers' machines
        values = _sealed({**values, "files": {"../../../escaped": values["files"]["model/w.bin"]}})
    shared.write(name, b"{" if damage == "{" else json.dumps({**values, "counts": {"n": 1}}).encode())
    if damage == "outside":
        shared.write(name, json.dumps(values).encode())
    reader = shared.store("b")
    assert reader.find(KEY).attempt == 1 and [m.attempt for m in reader.list()] == [1]
    assert [flaw.kind for flaw in audit(reader) if flaw.kind == "corrupt"] == ["corrupt"]


def _sealed(values: dict) -> dict:
    import dataclasses

    from tasks.store.manifest import Manifest, artifact_digest

    digest = artifact_digest(values["key"], values["files"])
    return dataclasses.replace(Manifest(**{**values, "digest": digest, "inputs": {}})).sealed().to_dict()


def test_pointers_are_shared_and_the_last_writer_wins(shared: Shared) -> None:
    here, there = shared.store("a"), shared.store("b")
    first = make(here)
    assert make_current(here, "tiny", 0, [first]) and current_digests(there) == {first.digest}
    assert not make_current(there, "tiny", 0, [first])
    second = make(there, {"w": b"2"}, force=True)
    assert make_current(there, "tiny", 0, [second]) and current_digests(here) == {second.digest}
    assert stale_reasons(here) == {}
    here.backend.unpoint(next(iter(here.backend.pointers())))
    assert current_digests(there) == set()


def test_prune_keeps_what_attempts_elsewhere_read(shared: Shared) -> None:
    here, there = shared.store("a"), shared.store("b")
    old, new = make(here), make(here, {"w": b"2"}, force=True)
    with there.attempt("rl", "f" * 64, uses=[old.digest]) as attempt:
        (attempt.out / "half").write_text("x")
        assert plan_pruning(here, {}, []).artifacts == []
    # Interrupted: its work is in b, so what it reads stays.
    assert plan_pruning(here, {}, []).artifacts == []
    with there.attempt("rl", "f" * 64) as attempt:
        (attempt.out / "half").unlink()
    pruning = plan_pruning(here, {}, [])
    assert pruning.artifacts == [old] and remove_artifact(here, old)
    assert there.list() == [new] and len(shared.keys("files/")) == 1


def test_bad_settings_are_one_clear_line(shared: Shared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for url in ("http://x/y", "s3://", "s3://user:pass@bucket/x", "bucket"):
        with pytest.raises(InputError, match=r"R1FLOW_STORE=.*give s3://BUCKET") as refused:
            ObjectStore(tmp_path, url, 1)
        assert "pass" not in str(refused.value)
    for text in ("0", "-1", "much", "nan", "inf"):
        with pytest.raises(InputError, match="R1FLOW_CACHE_GB"):
            cache_bytes(text)
    with pytest.raises(InputError, match="no such bucket at http://127.0.0.1:.*create it"):
        ObjectStore(tmp_path, "s3://nowhere-else/x", 1).newest(KEY)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(InputError, match="no credentials: set AWS_ACCESS_KEY_ID"):
        shared.store("a").find(KEY)


def test_a_server_that_is_away_is_named_without_secrets(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.store.objects import bucket

    monkeypatch.setattr(bucket, "ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(bucket.Unreachable, match="http://127.0.0.1:9 cannot be reached") as refused:
        shared.store("a").find(KEY)
    assert "a-secret-of-the-tests" not in str(refused.value)


def test_publication_waits_for_a_server_that_is_away(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tasks.store.objects import object_store
    from tasks.store.objects.bucket import Bucket, Unreachable

    monkeypatch.setattr(object_store, "PAUSE_S", 0.01)
    real, away = Bucket.put, iter([True, True, False])

    def put(self: Bucket, *args: object, **more: object) -> None:
        if next(away, False):
            raise Unreachable("s3://artifacts: does not answer")
        real(self, *args, **more)

    store = shared.store("a")
    with store.attempt("sft", KEY) as attempt, caplog.at_level(logging.WARNING):
        (attempt.out / "w").write_text("1")
        monkeypatch.setattr(Bucket, "put", put)
        assert attempt.publish(stage_version=1, config=CONFIG).attempt == 1
    assert caplog.text.count("waiting to publish") == 1
