"""Copies on a machine: a limit, what goes first, and what stays because a live process uses it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tasks.store.manifest import Manifest
from tasks.store.objects.cache import _size
from tests.support.shared_bucket import Shared, make

pytestmark = pytest.mark.system
READ = """
(manifest,) = [m for m in store.list() if m.config["seed"] == {seed}]
manifest.local()
{then}
"""
LIMIT = 2500


def read(shared: Shared, seed: int, then: str = "", limit: int = LIMIT) -> subprocess.Popen:
    """Another process of home b that reads the artifact of this seed."""
    return shared.start("b", READ.format(seed=seed, then=then).replace("store.list", f"limited({limit}).list"))


def copies(shared: Shared, manifests: dict[int, Manifest]) -> set[int]:
    """Seeds of the artifacts that home b has copies of."""
    there = {path.name for path in (shared.folder / "b").glob("object_store/*/files/*")}
    return {seed for seed, manifest in manifests.items() if manifest.digest[:16] in there}


@pytest.fixture
def made(shared: Shared) -> dict[int, Manifest]:
    """Four artifacts of 1,000 bytes each."""
    store = shared.store("a")
    return {seed: make(store, {"w": os.urandom(1000)}, seed=seed) for seed in range(4)}


def test_what_was_not_used_for_the_longest_time_goes_first(shared: Shared, made: dict[int, Manifest]) -> None:
    for seed in (0, 1, 0, 2):
        assert read(shared, seed).wait(timeout=300) == 0
        time.sleep(0.05)
    assert copies(shared, made) == {0, 2}
    assert read(shared, 1).wait(timeout=300) == 0
    assert copies(shared, made) == {1, 2}


def test_what_a_live_process_uses_stays(shared: Shared, made: dict[int, Manifest]) -> None:
    live = read(shared, 0, "print('ready', flush=True); time.sleep(600)")
    assert live.stdout.readline() == "ready\n"
    try:
        for seed in (1, 2, 3):
            assert read(shared, seed).wait(timeout=300) == 0
        assert copies(shared, made) == {0, 3}
        # One process that uses more than the limit goes over it: what it reads has to be there.
        store = shared.store("c", LIMIT)
        assert sum(len(manifest.local("w").read_bytes()) for manifest in store.list()) == 4000
    finally:
        live.kill()
        live.wait()
    assert read(shared, 1).wait(timeout=300) == 0
    assert copies(shared, made) == {1, 3}


def test_files_that_others_rename_meanwhile_are_no_error(tmp_path: Path) -> None:
    ended = threading.Event()

    def fetch(name: str) -> None:  # as `Cache` does
        while not ended.is_set():
            (tmp_path / f".{name}.partial").write_bytes(b"x")
            (tmp_path / f".{name}.partial").replace(tmp_path / name)

    threads = [threading.Thread(target=fetch, args=(str(number),)) for number in range(4)]
    (tmp_path / "w").write_bytes(b"1234")
    for thread in threads:
        thread.start()
    try:
        sizes = [_size(tmp_path) for _ in range(1000)]
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert min(sizes) >= 4 and _size(tmp_path) == 4 + len(threads)


def test_several_processes_fetch_one_artifact_at_once(shared: Shared, made: dict[int, Manifest]) -> None:
    children = [read(shared, 0) for _ in range(3)]
    assert [child.wait(timeout=300) for child in children] == [0, 0, 0]
    (folder,) = (shared.folder / "b").glob("object_store/*/files/*/sft/*/1")
    assert [path.name for path in folder.iterdir()] == ["w"]


def test_a_partial_download_is_replaced(shared: Shared, made: dict[int, Manifest]) -> None:
    store = shared.store("b")
    (manifest,) = [m for m in store.list() if m.config["seed"] == 0]
    manifest.path.mkdir(parents=True)
    Path(manifest.path / "w").write_bytes(b"half")  # no write of ours leaves this; a copied home could
    Path(manifest.path / ".w.partial").write_bytes(b"ha")
    assert len(manifest.local("w").read_bytes()) == 1000
    assert [path.name for path in manifest.path.iterdir()] == ["w"]


def test_what_kills_left_is_removed(shared: Shared, made: dict[int, Manifest]) -> None:
    store = shared.store("b")
    (manifest,) = [m for m in store.list() if m.config["seed"] == 0]
    root = manifest.path.parents[4]
    manifest.path.mkdir(parents=True)
    (manifest.path / ".w.partial.0a1b2c3d").write_bytes(b"ha")  # boto3's name for what it has of .w.partial
    (root / "removed" / "0123456789abcdef.77").mkdir(parents=True)
    (root / "removed" / "0123456789abcdef.77" / "w").write_bytes(b"half")
    manifest.local()
    assert [path.name for path in manifest.path.iterdir()] == ["w"]
    assert list((root / "removed").iterdir()) == []
