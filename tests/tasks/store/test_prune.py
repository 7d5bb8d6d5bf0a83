"""What `r1 prune` keeps, and what it removes."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from tasks.store.audit import audit
from tasks.store.manifest import Manifest, artifact_key
from tasks.store.prune import plan_pruning, remove_artifact, remove_work, size_of
from tasks.store.stale import make_current
from tasks.store.store import Store


def make(store: Store, stage: str, number: int, *inputs: Manifest, seed: int = 0, force: bool = False) -> Manifest:
    config = {"seed": seed, "number": number}
    refs = {manifest.stage: manifest.ref for manifest in inputs}
    key = artifact_key(stage, 1, config, {name: ref.digest for name, ref in refs.items()})
    with store.attempt(stage, key, force=force) as attempt:
        (attempt.out / "weights").write_text(f"{stage} {number}")
        return attempt.publish(stage_version=1, config=config, inputs=refs)


def removable(store: Store, named: tuple[Manifest, ...] = (), in_use: tuple[Manifest, ...] = ()) -> list[Manifest]:
    pruning = plan_pruning(store, {"promoted": [m.digest for m in named]}, [m.digest for m in in_use])
    return pruning.artifacts


def test_history_goes_and_what_the_current_artifacts_were_made_from_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    bases = [make(store, "base", number) for number in range(3)]
    old, current, newer = (make(store, "sft", number, bases[number]) for number in range(3))
    assert removable(store) == [bases[0], bases[1], old, current]  # the newest of each stage stays without a recipe
    make_current(store, "tiny", 0, [bases[1], current])
    assert removable(store) == [bases[0], old]
    assert removable(store, named=(old,)) == []
    assert removable(store, in_use=(old,)) == []
    pruning = plan_pruning(store, {"promoted": [old.digest]}, [])
    assert pruning.kept == {"current": 2, "newest of its stage": 2, "promoted": 1, "made from": 1}
    del newer


def test_a_folder_on_nfs_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, a file that is not open for writing cannot be locked exclusively."""
    store, locked = Store(tmp_path), fcntl.flock

    def flock(file: Any, kind: int) -> None:
        if kind & fcntl.LOCK_EX and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        locked(file, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    old, new = make(store, "base", 0), make(store, "base", 1)
    assert remove_artifact(store, old) and store.list() == [new]


def test_others_who_share_the_folder_may_lock_what_one_has_locked(tmp_path: Path) -> None:
    before = os.umask(0o007)
    try:
        make(Store(tmp_path), "base", 0)
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "locks").iterdir()]
    assert modes == [0o660]


def test_every_recipe_and_seed_keeps_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second, third = (make(store, "base", number) for number in range(3))
    other_seed = make(store, "base", 0, seed=1)
    make_current(store, "tiny", 0, [first])
    make_current(store, "mine", 0, [second])
    assert removable(store) == [] and third in store.list() and other_seed in store.list()
    make_current(store, "mine", 0, [third])
    assert removable(store) == [second]


def test_what_is_removed_is_gone_and_the_rest_is_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old, new = make(store, "base", 0), make(store, "base", 1)
    assert remove_artifact(store, old)
    assert store.list() == [new] and store.find(old.key) is None and not old.path.parent.exists()
    assert list(audit(store)) == []
    assert size_of(tmp_path / "removed") == 0 and len(list(tmp_path.glob("checked/*/*"))) == 1
    assert make(store, "base", 0).attempt == 1


def test_of_equal_attempts_the_newest_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = make(store, "base", 0), make(store, "base", 0, force=True)
    make_current(store, "tiny", 0, [second])
    assert first.digest == second.digest
    assert [m.attempt for m in removable(store)] == [1]
    assert removable(store, in_use=(first,)) == []  # nobody knows which of the two is read
    assert remove_artifact(store, first) and store.find(first.key) == second


def test_what_a_process_works_on_stays_and_so_do_its_inputs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old_base, old_data, _ = make(store, "base", 0), make(store, "problems", 0), make(store, "base", 1)
    _ = make(store, "problems", 1)
    key = artifact_key("sft", 1, {}, {"base": old_base.digest})
    assert removable(store) == [old_base, old_data]
    with store.attempt("sft", key, uses=[old_base.digest]) as attempt:
        (attempt.state / "step").write_text("x")
        pruning = plan_pruning(store, {}, [])
        assert pruning.artifacts == [old_data] and pruning.unfinished == []
        assert not remove_work(store, attempt.work) and attempt.work.exists()
    with store.attempt("problems", old_data.key):
        assert not remove_artifact(store, old_data) and old_data in store.list()
    pruning = plan_pruning(store, {}, [])  # interrupted now: it may go on, and needs its inputs
    assert pruning.artifacts == [old_data] and pruning.unfinished == [attempt.work]
    assert remove_work(store, attempt.work) and not attempt.work.exists()
    assert removable(store) == [old_base, old_data]


def test_what_was_set_aside_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (make(store, "base", 0).path / "weights").write_text("others")
    for flaw in audit(store):
        assert flaw.repair is not None
        flaw.repair()
    (folder,) = plan_pruning(store, {}, []).folders
    assert folder == tmp_path / "quarantine" and size_of(folder) > len("others")
