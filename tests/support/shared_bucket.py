"""Homes that share nothing but a prefix of an S3 bucket."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.store.manifest import Manifest, artifact_key
from tasks.store.objects.object_store import ObjectStore
from tasks.store.store import Store
from tests.support.s3_server import BUCKET, S3Server

ROOT = Path(__file__).parents[2]
CONFIG = {"seed": 0}
KEY = artifact_key("sft", 1, CONFIG, {})


def make(store: Store, files: dict[str, bytes] | None = None, *, force: bool = False, seed: int = 0) -> Manifest:
    """Publishes an artifact of stage `sft`."""
    config = {"seed": seed}
    with store.attempt("sft", artifact_key("sft", 1, config, {}), force=force) as attempt:
        for name, contents in (files or {"model/w.bin": b"weights"}).items():
            (attempt.out / name).parent.mkdir(parents=True, exist_ok=True)
            (attempt.out / name).write_bytes(contents)
        return attempt.publish(stage_version=1, config=config)


@dataclass
class Shared:
    """A prefix of the bucket, and folders for homes that share it."""

    server: S3Server
    folder: Path
    prefix: str

    def store(self, home: str, cache_bytes: int = 10**9) -> Store:
        root = self.folder / home
        return Store(root, ObjectStore(root, f"s3://{BUCKET}/{self.prefix}", cache_bytes))

    def keys(self, under: str = "") -> list[str]:
        """Keys of the objects below the prefix."""
        start = f"{self.prefix}/{under}"
        listed = self.server.client().list_objects_v2(Bucket=BUCKET, Prefix=start).get("Contents", [])
        return [entry["Key"].removeprefix(f"{self.prefix}/") for entry in listed]

    def body(self, key: str) -> bytes:
        return self.server.client().get_object(Bucket=BUCKET, Key=f"{self.prefix}/{key}")["Body"].read()

    def write(self, key: str, body: bytes, **more: Any) -> None:
        self.server.client().put_object(Bucket=BUCKET, Key=f"{self.prefix}/{key}", Body=body, **more)

    def start(self, home: str, code: str, **settings: Any) -> subprocess.Popen:
        """Runs `code` in another process with `store`, `make`, `KEY` and `CONFIG` at hand."""
        prelude = (
            "import os, sys, time\nfrom pathlib import Path\n"
            f"sys.path.insert(0, {str(ROOT)!r})\n"
            "from tests.support.shared_bucket import CONFIG, KEY, ObjectStore, Store, make\n"
            "from tasks.store.objects import lease, upload\n"
            f"root = Path({str(self.folder / home)!r})\n"
            f"store = Store(root, ObjectStore(root, 's3://{BUCKET}/{self.prefix}', 10**9))\n"
            f"limited = lambda size: Store(root, ObjectStore(root, 's3://{BUCKET}/{self.prefix}', size))\n"
        )
        command = [sys.executable, "-c", prelude + code]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ), **settings)
