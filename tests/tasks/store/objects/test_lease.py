"""Locks between machines: one holder, a lease that ends after a kill, and clocks that do not matter."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from grpo.errors import InputError
from tasks.store.objects import lease
from tasks.store.objects.bucket import Bucket, StoredObject, Unreachable
from tasks.store.objects.lease import Lease, LockRecord, check_conditions, read_lock
from tests.support.shared_bucket import KEY, Shared, make

pytestmark = pytest.mark.system
HOLD = """
lease.LEASE_S = {lease}
with store.attempt("sft", KEY) as attempt:
    (attempt.out / "half").write_text("x")
    print("ready", flush=True)
    time.sleep(120)
"""


def killed(shared: Shared, home: str, seconds: float) -> None:
    """A process that took the lock of KEY with this lease and was killed."""
    child = shared.start(home, HOLD.format(lease=seconds))
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()


def test_of_two_machines_one_builds_and_the_other_reuses(shared: Shared) -> None:
    code = """
with store.attempt("sft", KEY) as attempt:
    if found := store.find(KEY):
        print("reused", found.attempt)
    else:
        time.sleep(1)
        (attempt.out / "w").write_text("1")
        print("made", attempt.publish(stage_version=1, config=CONFIG).attempt)
"""
    children = [shared.start(home, code, stderr=subprocess.PIPE) for home in ("a", "b", "c")]
    answers = [child.communicate(timeout=300)[0] for child in children]
    assert sorted(answers) == ["made 1\n", "reused 1\n", "reused 1\n"]
    assert shared.body(f"locks/{KEY}") == b"" and len(shared.keys("manifests/")) == 1


def test_who_waits_is_told_once_and_who_does_not_wait_is_refused(
    shared: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = shared.store("a"), shared.store("b")
    make(here)
    with here.attempt("sft", KEY):
        with there.idle(KEY) as idle:
            assert not idle
        with caplog.at_level(logging.WARNING):
            waiting = threading.Thread(target=lambda: there.attempt("sft", KEY).__enter__())
            waiting.start()
            until = time.monotonic() + 60
            while "waiting for the lock" not in caplog.text and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(2.5)  # two more looks
            assert waiting.is_alive()
    waiting.join(timeout=60)
    assert not waiting.is_alive() and caplog.text.count("waiting for the lock") == 1
    assert "held by process" in caplog.text


def test_the_lease_of_a_killed_process_ends(shared: Shared) -> None:
    killed(shared, "a", 15)
    there, began = shared.store("b"), time.monotonic()
    with there.idle(KEY) as idle:
        assert not idle
    assert make(there).attempt == 1 and time.monotonic() - began > 1
    assert shared.body(f"locks/{KEY}") == b""


def test_a_killed_process_is_followed_at_once_in_its_own_home(shared: Shared) -> None:
    killed(shared, "a", 3600)
    began, store = time.monotonic(), shared.store("a")
    with store.attempt("sft", KEY) as attempt:
        assert time.monotonic() - began < 30 and (attempt.out / "half").exists()


def test_a_lease_is_renewed(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 2.0)
    monkeypatch.setattr(lease, "MARGIN_S", 1.0)
    here, there = shared.store("a"), shared.store("b")
    with here.attempt("sft", KEY):
        first = shared.body(f"locks/{KEY}")
        for _ in range(6):
            time.sleep(1)
            with there.idle(KEY) as idle:
                assert not idle
        assert shared.body(f"locks/{KEY}") != first


def test_a_holder_that_slept_learns_that_it_lost_the_lock(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 4.0)
    here = shared.store("a")
    with caplog.at_level(logging.WARNING), here.attempt("sft", KEY) as attempt:
        (attempt.out / "w").write_text("here")
        taken = LockRecord("t", "process 1 on other since today", "elsewhere", 3600.0)
        shared.write(f"locks/{KEY}", taken.dump())  # what another machine writes once the lease has ended
        until = time.monotonic() + 60
        while "is now held by process 1 on other" not in caplog.text and time.monotonic() < until:
            time.sleep(0.1)
        assert attempt.publish(stage_version=1, config={"seed": 0}).attempt == 1
    assert "is now held by process 1 on other" in caplog.text
    assert read_lock(StoredObject(shared.body(f"locks/{KEY}"), "", 0)) == taken  # not released for the other


class Forgetful(Bucket):
    """Stores what it is sent, but loses the answer of the second write."""

    writes = 0

    def put_if(self, key: str, body: bytes, etag: str | None) -> str | None:
        stored = super().put_if(key, body, etag)
        self.writes += 1
        if self.writes == 2:
            raise Unreachable("no answer")
        return stored


def test_a_renewal_whose_answer_was_lost_does_not_lose_the_lock(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 4.0)
    bucket = Forgetful(f"s3://artifacts/{shared.prefix}")
    held, there = Lease(bucket, KEY, shared.folder / "a"), Lease(bucket, KEY, shared.folder / "b")
    assert held.take(wait=False)
    until = time.monotonic() + 60
    while bucket.writes < 5 and time.monotonic() < until:  # a lost one, one refused, one after it, one more
        time.sleep(0.1)
    assert bucket.writes >= 5 and not there.take(wait=False)
    assert "could not be renewed: no answer" in caplog.text and "is now held by" not in caplog.text
    held.release(attempted=False)
    assert shared.body(f"locks/{KEY}") == b""


def test_two_publishers_at_once_get_two_numbers_and_whole_files(shared: Shared) -> None:
    """What happens if a lock was lost: nothing is mixed or overwritten."""
    from tasks.store.attempt import Attempt

    stores = [shared.store("a"), shared.store("b")]
    both, made = threading.Barrier(2), []

    def publish(number: int) -> None:
        store = stores[number]
        attempt = Attempt(store.root, store.backend, "sft", KEY, -1)
        attempt.open(force=False)
        (attempt.out / "w").write_text(f"by {number}")
        both.wait()
        made.append((attempt.publish(stage_version=1, config={"seed": 0}), f"by {number}"))

    threads = [threading.Thread(target=publish, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(manifest.attempt for manifest, _ in made) == [1, 2]
    reader = shared.store("c")
    read = {manifest.attempt: manifest.local("w").read_text() for manifest in reader.list()}
    assert read == {manifest.attempt: text for manifest, text in made}


def test_an_interrupted_attempt_leaves_a_record_that_stops_nobody(shared: Shared) -> None:
    here, there = shared.store("a"), shared.store("b")
    with pytest.raises(RuntimeError), here.attempt("sft", KEY, uses=["d" * 64]) as attempt:
        (attempt.out / "half").write_text("x")
        raise RuntimeError
    assert there.backend.uses() == {"d" * 64}
    for store in (there, here):  # looks at the key and leaves the record
        with store.idle(KEY) as idle:
            assert idle
        assert there.backend.uses() == {"d" * 64}
    assert make(there).attempt == 1 and there.backend.uses() == set()


def test_a_damaged_lock_stops_nobody(shared: Shared) -> None:
    for body in (b"{", b"[]", json.dumps({"token": "x"}).encode()):
        shared.write(f"locks/{KEY}", body)
        with shared.store("a").idle(KEY) as idle:
            time.sleep(0)
        assert idle or read_lock(StoredObject(body, "", 0)).lease_s == 0


class Careless(Bucket):
    """A server that ignores conditions."""

    def put_if(self, key: str, body: bytes, etag: str | None) -> str | None:
        self.put(key, body)
        return "etag"


def test_a_server_without_conditional_writes_is_refused(shared: Shared, tmp_path: Path) -> None:
    bucket = Careless(f"s3://artifacts/{shared.prefix}")
    with pytest.raises(InputError, match="ignores the conditions If-None-Match and If-Match"):
        check_conditions(bucket, tmp_path / "marker")
    assert shared.keys("locks/") == [] and not (tmp_path / "marker").exists()


def test_an_answer_that_was_lost_counts_as_success(shared: Shared) -> None:
    bucket = Bucket(f"s3://artifacts/{shared.prefix}")
    first = bucket.put_if("x", b"mine", None)
    assert first is not None and bucket.put_if("x", b"mine", None) == first  # sent again
    assert bucket.put_if("x", b"other", None) is None and bucket.put_if("x", b"other", '"0"') is None
    assert bucket.put_if("x", b"other", first) is not None and bucket.get("x").body == b"other"
    assert bucket.put_if("missing", b"other", first) is None
    taken = Lease(bucket, "k", shared.folder / "a")
    assert taken.take(wait=False)
    taken.release(attempted=False)
    assert bucket.get("locks/k").body == b""
