"""One S3 server for the tests of a process, and homes that share a prefix of its bucket."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.s3_server import S3Server, s3_server
from tests.support.shared_bucket import Shared


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    with s3_server() as started:
        yield started


@pytest.fixture
def shared(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    prefix = uuid.uuid4().hex
    for name, value in server.environment(prefix).items():
        monkeypatch.setenv(name, value)
    return Shared(server, tmp_path, prefix)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the bytes of a part of an upload."""
    from tasks.store.objects import object_store, upload

    def set_size(size: int) -> None:
        monkeypatch.setattr(upload, "PART", size)
        monkeypatch.setattr(object_store, "PART", size)

    return set_size
