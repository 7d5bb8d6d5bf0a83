"""Uploads in parts: killed in the middle, and continued with the parts that are missing."""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks.store.audit import audit
from tasks.store.objects.bucket import Bucket
from tasks.store.objects.upload import abort_upload, unfinished_uploads, upload_file
from tests.support.shared_bucket import KEY, Shared, make

pytestmark = pytest.mark.system
PART = 5 << 20  # the smallest that S3 takes for all but the last
CONTENTS = b"".join(bytes([number]) * PART for number in range(4)) + b"the end"
STOPPED_AT = """
from tasks.store.objects import object_store
from tasks.store.objects.bucket import Bucket
upload.PART = object_store.PART = 5 << 20
upload.PARALLEL = 1
real = Bucket("s3://artifacts/x").client.__class__.upload_part
sent = []
client = store.backend._bucket.client
def send(**more):
    if len(sent) == 2:
        print("ready", flush=True)
        time.sleep(120)
    sent.append(more["PartNumber"])
    return real(client, **more)
client.upload_part = send
make(store, {"model/w.bin": b"".join(bytes([number]) * (5 << 20) for number in range(4)) + b"the end"})
"""


@pytest.fixture
def sent(small_parts: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[int]]:
    """Sets the size of parts, and counts those that a store sends."""
    small_parts(PART)

    def count(store: Any) -> list[int]:
        client, numbers = store.backend._bucket.client, []
        real = client.upload_part

        def send(**more: Any) -> Any:
            numbers.append(more["PartNumber"])
            return real(**more)

        monkeypatch.setattr(client, "upload_part", send)
        return numbers

    return count


def killed_upload(shared: Shared, home: str) -> None:
    """A publication that was killed after two of five parts."""
    child = shared.start(home, STOPPED_AT)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()


def test_a_large_file_goes_up_in_parts_and_comes_back(shared: Shared, sent: Callable[[Any], list[int]]) -> None:
    store = shared.store("a")
    numbers = sent(store)
    made = make(store, {"model/w.bin": CONTENTS, "small": b"1"})
    assert sorted(numbers) == [1, 2, 3, 4, 5]
    assert shared.body(f"files/{KEY}/{made.digest}/model/w.bin") == CONTENTS
    other = shared.store("b")
    assert other.find(KEY).local("model/w.bin").read_bytes() == CONTENTS


def test_a_killed_upload_continues_with_what_is_missing(shared: Shared, sent: Callable[[Any], list[int]]) -> None:
    killed_upload(shared, "a")
    store = shared.store("a")
    assert store.find(KEY) is None and store.list() == [] and shared.keys("manifests/") == []
    assert [flaw for flaw in audit(store) if flaw.kind == "orphaned"] == []  # it can be continued
    numbers = sent(store)
    made = make(store, {"model/w.bin": CONTENTS})
    assert sorted(numbers) == [3, 4, 5] and made.attempt == 1
    assert shared.store("b").find(KEY).local("model/w.bin").read_bytes() == CONTENTS
    assert list(unfinished_uploads(store.backend._bucket, "")) == []


def test_another_machine_takes_over_parts_of_equal_files(shared: Shared, sent: Callable[[Any], list[int]]) -> None:
    killed_upload(shared, "a")
    client = shared.server.client()
    client.put_object(Bucket="artifacts", Key=f"{shared.prefix}/locks/{KEY}", Body=b"")  # the lease has ended
    store = shared.store("b")
    numbers = sent(store)
    make(store, {"model/w.bin": CONTENTS})
    assert sorted(numbers) == [3, 4, 5]


def test_other_contents_begin_a_new_upload_and_verify_removes_the_old_parts(
    shared: Shared, sent: Callable[[Any], list[int]]
) -> None:
    killed_upload(shared, "a")
    store = shared.store("a")
    numbers = sent(store)
    make(store, {"model/w.bin": b"x" * len(CONTENTS)})
    assert sorted(numbers) == [1, 2, 3, 4, 5]
    (flaw,) = audit(store)
    assert (flaw.kind, flaw.said) == ("orphaned", "was never published") and flaw.repair() == "removed"
    assert list(audit(store)) == [] and list(unfinished_uploads(store.backend._bucket, "")) == []


@pytest.mark.parametrize(
    ("how", "late"),
    [("completed", "upload_part"), ("aborted", "upload_part"), ("aborted", "complete_multipart_upload")],
)
def test_an_upload_that_another_machine_ends_meanwhile_is_finished(
    shared: Shared, small_parts: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how, late
) -> None:
    """The second machine takes over the first one's upload of the same contents, and then its request comes too
    late."""
    small_parts(PART)
    path = tmp_path / "w.bin"
    path.write_bytes(CONTENTS)
    entry: Any = {"size": len(CONTENTS), "sha256": hashlib.sha256(CONTENTS).hexdigest()}
    first, second = (Bucket(f"s3://artifacts/{shared.prefix}") for _ in range(2))
    first.client.create_multipart_upload(Bucket=first.name, Key=first.path("w"), Metadata={"sha256": entry["sha256"]})
    ((_, upload_id),) = unfinished_uploads(first, "w")
    asking, ended = threading.Event(), threading.Event()
    real, used = getattr(second.client, late), []

    def wait_and_ask(**more: Any) -> Any:
        used.append(more["UploadId"])
        asking.set()
        assert ended.wait(60)
        return real(**more)

    monkeypatch.setattr(second.client, late, wait_and_ask)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(upload_file, second, "w", path, entry, again=False)
        assert asking.wait(60)
        if how == "completed":
            upload_file(first, "w", path, entry, again=False)
        else:
            abort_upload(first, "w", upload_id)
        ended.set()
        taking.result(60)
    assert used[0] == upload_id and ({*used} == {upload_id}) is (how == "completed")
    assert shared.body("w") == CONTENTS and first.has("w", **entry)
    assert list(unfinished_uploads(first, "")) == []
