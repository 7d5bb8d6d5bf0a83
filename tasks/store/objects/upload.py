"""Uploads of an artifact's files. A large file goes up in parts, and after a kill only those that are missing do.

The key of an object holds the digest of the artifact, so every writer of the object writes the same bytes: parts that a
killed upload left can be taken over by whoever publishes the artifact, on any machine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tasks.store.manifest import FileEntry
from tasks.store.objects.bucket import SHA256, Bucket, Unreachable

logger = logging.getLogger(__name__)

PART = 32 << 20
"""Bytes of a part; more for a file that would have over MOST_PARTS of them. A file of one part goes up at once."""
MOST_PARTS = 10_000
PARALLEL = 4
"""Parts, or small files, that are sent at once."""
TRIES = 5
"""Uploads of a file that are begun or taken over, each after another machine ended the one before."""


def upload_file(bucket: Bucket, key: str, path: Path, entry: FileEntry, *, again: bool) -> None:
    """Uploads one file, unless it is there already and `again` is off."""
    if not again and bucket.has(key, entry["size"], entry["sha256"]):
        return
    if entry["size"] <= PART:
        bucket.put(key, path.read_bytes(), entry["sha256"])
        return
    size = max(PART, -(-entry["size"] // MOST_PARTS))
    for _ in range(TRIES):
        try:
            with bucket.explained():
                return _send_parts(bucket, key, path, entry, size)
        except FileNotFoundError:  # another machine completed or aborted the upload that this one had taken over
            if bucket.has(key, entry["size"], entry["sha256"]):
                return
    raise Unreachable(f"{bucket.url}: {TRIES} uploads of {path.name} were ended by other machines: try again later")


def unfinished_uploads(bucket: Bucket, prefix: str) -> Iterator[tuple[str, str]]:
    """Keys and ids of the uploads in parts that were begun and not completed."""
    with bucket.explained():
        pages = bucket.client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=bucket.name, Prefix=bucket.path(prefix)):
            for upload in page.get("Uploads", ()):
                yield upload["Key"].removeprefix(bucket.path("")), upload["UploadId"]


def abort_upload(bucket: Bucket, key: str, upload_id: str) -> None:
    """Deletes the parts of an unfinished upload."""
    try:
        with bucket.explained():
            bucket.client.abort_multipart_upload(Bucket=bucket.name, Key=bucket.path(key), UploadId=upload_id)
    except FileNotFoundError:
        pass  # completed or aborted by another process


def _send_parts(bucket: Bucket, key: str, path: Path, entry: FileEntry, part_size: int) -> None:
    count = -(-entry["size"] // part_size)
    sizes = {number: min(part_size, entry["size"] - (number - 1) * part_size) for number in range(1, count + 1)}
    upload_id, done = _begun(bucket, key, sizes)
    if done:
        logger.info("%s: %d of %d parts are there from an earlier upload", path.name, len(done), count)
    if upload_id is None:
        metadata = {SHA256: entry["sha256"]}
        created = bucket.client.create_multipart_upload(Bucket=bucket.name, Key=bucket.path(key), Metadata=metadata)
        upload_id = created["UploadId"]
    target = {"Bucket": bucket.name, "Key": bucket.path(key), "UploadId": upload_id}

    def send(number: int) -> tuple[int, str]:
        with path.open("rb") as file:
            file.seek((number - 1) * part_size)
            body = file.read(sizes[number])
        return number, bucket.client.upload_part(**target, PartNumber=number, Body=body)["ETag"]

    with ThreadPoolExecutor(PARALLEL) as pool:
        done |= dict(pool.map(send, [number for number in sizes if number not in done]))
    parts: list[dict[str, Any]] = [{"PartNumber": number, "ETag": done[number]} for number in sorted(done)]
    bucket.client.complete_multipart_upload(**target, MultipartUpload={"Parts": parts})


def _begun(bucket: Bucket, key: str, sizes: dict[int, int]) -> tuple[str | None, dict[int, str]]:
    """The unfinished upload of an object that has the most parts of these sizes: its id, and the ETags of the parts."""
    best: tuple[str | None, dict[int, str]] = (None, {})
    for found, upload_id in unfinished_uploads(bucket, key):
        if found != key:
            continue
        parts: dict[int, str] = {}
        pages = bucket.client.get_paginator("list_parts")
        try:
            with bucket.explained():
                for page in pages.paginate(Bucket=bucket.name, Key=bucket.path(key), UploadId=upload_id):
                    for part in page.get("Parts", ()):
                        if sizes.get(part["PartNumber"]) == part["Size"]:
                            parts[part["PartNumber"]] = part["ETag"]
        except FileNotFoundError:
            continue  # completed or aborted in the meantime
        if best[0] is None or len(parts) > len(best[1]):
            best = upload_id, parts
    return best
