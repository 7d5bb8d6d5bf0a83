"""Attempts: work on one key while its lock is held, and publication of the result."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo.errors import InputError
from tasks.store.backend import Backend
from tasks.store.manifest import (
    MANIFEST,
    Files,
    InputRef,
    Manifest,
    artifact_digest,
    artifact_key,
    canonical_json,
    file_sha256,
    fsync,
    tokenizer_digest,
)

logger = logging.getLogger(__name__)


class Attempt:
    """One attempt at a key, while its lock is held. Not constructed directly; see `Store.attempt`.

    `out` is the folder that will be published. `state` is what the attempt needs to continue after a kill
    (checkpoints); it is removed at publication. `lock_fd` can be passed to a subprocess, which then holds the lock too.
    `continues`: whether it goes on with an earlier attempt's work. `forced`: whether it makes all of it anew, as that
    attempt did or by itself.
    """

    def __init__(self, root: Path, backend: Backend, stage: str, key: str, lock_fd: int):
        self.stage = stage
        self.key = key
        self.lock_fd = lock_fd
        self.work = root / "work" / f"{stage}-{key[:16]}"
        self.out = self.work / "out"
        self.state = self.work / "state"
        self.continues = False
        self.forced = False
        self._root = root
        self._backend = backend
        self._began = time.monotonic()

    def open(self, force: bool, uses: Collection[str] = ()) -> None:
        """Prepare the folders, keeping the work of an earlier attempt unless `force` asks for a fresh one."""
        record = self.work / "attempt.json"
        self.forced = force
        try:
            forced = json.loads(record.read_text())["forced"]
        except (OSError, ValueError, KeyError, TypeError):
            forced = None
        # If out/ is missing, the earlier attempt was killed after its rename: it was published, and the rest is
        # garbage.
        if forced is None or not self.out.is_dir() or (force and not forced):
            shutil.rmtree(self.work, ignore_errors=True)
            self.work.mkdir(parents=True, exist_ok=True)
            values = {"stage": self.stage, "key": self.key, "forced": force, "began": utc_now()}
            _write_json(record, {**values, "uses": sorted(uses)})
        else:
            self.continues, self.forced = True, forced
            logger.info("continuing what an earlier attempt left in %s", self.work)
        self.out.mkdir(exist_ok=True)
        self.state.mkdir(exist_ok=True)

    def close(self) -> None:
        """Remove the folders if nothing was written to them."""
        untouched = self.out.is_dir() and not any(self.out.iterdir()) and not any(self.state.iterdir())
        if untouched:  # the caller found the artifact already published, or failed before writing anything
            shutil.rmtree(self.work, ignore_errors=True)

    def publish(
        self,
        *,
        stage_version: int,
        config: Mapping[str, Any],
        inputs: Mapping[str, InputRef] | None = None,
        counts: Mapping[str, int] | None = None,
        metrics: Mapping[str, float] | None = None,
        steps_completed: int | None = None,
        mlflow_run_id: str | None = None,
        seconds: float | None = None,
        machine: str | None = None,
        peak_memory: int | None = None,
        origin: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Turns `out` into an artifact. `seconds` defaults to the time since this attempt took the lock.

        Everything is on disk before the rename that makes the artifact visible, so neither a kill nor a power failure
        leaves an artifact with only part of its contents.
        """
        inputs = dict(inputs or {})
        expected = artifact_key(self.stage, stage_version, config, {name: ref.digest for name, ref in inputs.items()})
        assert expected == self.key, f"{self.stage}: published with another config or inputs than its key was made of"
        manifest_path = self.out / MANIFEST
        with explain_full_disk(self._root):
            manifest_path.unlink(missing_ok=True)  # left by a publication that was killed before its rename
            files = _inventory(self.out)
            seconds = time.monotonic() - self._began if seconds is None else seconds

            def seal(number: int) -> Manifest:
                """Writes the manifest of an attempt with this number."""
                manifest = Manifest(
                    stage=self.stage,
                    stage_version=stage_version,
                    key=self.key,
                    digest=artifact_digest(self.key, files),
                    attempt=number,
                    created=utc_now(),
                    seconds=round(seconds, 3),
                    config=json.loads(canonical_json(dict(config))),
                    inputs=inputs,
                    files=files,
                    counts=dict(counts or {}),
                    metrics={k: float(v) if math.isfinite(v) else None for k, v in (metrics or {}).items()},
                    steps_completed=steps_completed,
                    tokenizer_sha256=tokenizer_digest(files),
                    mlflow_run_id=mlflow_run_id,
                    machine=machine,
                    peak_memory=peak_memory,
                    origin=None if origin is None else dict(origin),
                ).sealed()
                _write_json(manifest_path, manifest.to_dict())
                return manifest

            published = self._backend.publish(self.out, self.stage, self.key, seal, forced=self.forced)
        shutil.rmtree(self.work, ignore_errors=True)
        return published


@contextlib.contextmanager
def explain_full_disk(root: Path) -> Iterator[None]:
    """Turns the OSError of a full disk or an exceeded quota into an InputError that names a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"no space left on {root}: free some or move the home folder with R1FLOW_HOME"
        raise InputError(message) from error


def utc_now() -> str:
    """The current time in UTC, as ISO 8601."""
    return datetime.now(UTC).isoformat()


def _inventory(folder: Path) -> Files:
    """Size and hash of each file below `folder`, after flushing each of them to disk."""
    files: Files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"{path}: an artifact may not hold links; copy the file instead")
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
            fsync(path)
    return files


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, allow_nan=False, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
