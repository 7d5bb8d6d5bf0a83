"""A bucket, or the part of it below a prefix: reads, writes, conditional writes, and errors that say what to do."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo.errors import InputError
from grpo.secret_values import masked

ATTEMPTS = 6
"""Tries of a request, with growing pauses between them: about half a minute in all."""
SHA256 = "sha256"
"""Name of the metadata field with the SHA-256 of an object's contents."""
_DENIED = {"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
_CONFLICT = {"409", "412", "PreconditionFailed", "ConditionalRequestConflict"}
_ABSENT = {"404", "NoSuchKey", "NoSuchUpload", "NotFound"}


class Unreachable(InputError):
    """The object store does not answer, or asks to wait. Trying again later may help."""


@dataclass(frozen=True)
class StoredObject:
    """An object's contents, with the ETag that identifies this version of it. `age_s`: seconds since it was written, by
    the store's own clock."""

    body: bytes
    etag: str
    age_s: float


@dataclass(frozen=True)
class Listed:
    """An object in a listing. `key` is relative to the prefix, `size` is in bytes."""

    key: str
    size: int
    etag: str


class Bucket:
    """The objects below `s3://BUCKET/PREFIX`. Keys are relative to the prefix. Can be used by several threads."""

    def __init__(self, url: str):
        match = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?", url)
        if match is None or masked(url) != url:
            raise InputError(f"R1FLOW_STORE={masked(url)}: give s3://BUCKET or s3://BUCKET/PREFIX")
        self.name = match[1]
        self._prefix = f"{prefix}/" if (prefix := (match[2] or "").strip("/")) else ""
        self.url = f"s3://{self.name}/{self._prefix}".rstrip("/")
        if importlib.util.find_spec("boto3") is None:
            raise InputError(f"R1FLOW_STORE={url} needs boto3: pip install 'r1flow[s3]'")

    @cached_property
    def client(self) -> Any:
        """boto3's client. Credentials, region and endpoint come from where AWS's own tools take them."""
        import boto3
        from botocore.config import Config

        with self.explained():
            session = boto3.session.Session()
            retries = {"mode": "standard", "total_max_attempts": ATTEMPTS}
            settings = Config(connect_timeout=10, read_timeout=60, max_pool_connections=16, retries=retries)
            return session.client("s3", region_name=session.region_name or "us-east-1", config=settings)

    def path(self, key: str) -> str:
        """The key in the bucket, with the prefix."""
        return self._prefix + key

    def get(self, key: str) -> StoredObject | None:
        """An object; None if there is none."""
        with self.explained(), _absent_is_none():
            answer = self.client.get_object(Bucket=self.name, Key=self.path(key))
            return StoredObject(answer["Body"].read(), answer["ETag"], _age(answer))
        return None

    def put(self, key: str, body: bytes, sha256: str | None = None) -> None:
        """Writes an object, whatever is there."""
        more = {"Metadata": {SHA256: sha256}} if sha256 else {}
        with self.explained():
            self.client.put_object(Bucket=self.name, Key=self.path(key), Body=body, **more)

    def put_if(self, key: str, body: bytes, etag: str | None) -> str | None:
        """Writes an object if the present one has this ETag, or with None if there is none. Returns the new ETag; None
        if another writer was first. `body` must differ from everything that others write, or be empty."""
        from botocore.exceptions import ClientError

        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        with self.explained():
            try:
                answer = self.client.put_object(Bucket=self.name, Key=self.path(key), Body=body, **condition)
                return str(answer["ETag"])
            except ClientError as error:
                if _code(error) not in _CONFLICT | _ABSENT:
                    raise
        # A request whose answer was lost is sent again, and then finds what it wrote itself.
        present = self.get(key)
        return present.etag if present is not None and present.body == body and body else None

    def listing(self, prefix: str) -> Iterator[Listed]:
        """The objects whose keys begin with `prefix`, in the order of their keys."""
        with self.explained():
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=self.path(prefix))
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield Listed(entry["Key"].removeprefix(self._prefix), entry["Size"], entry["ETag"])

    def has(self, key: str, size: int, sha256: str) -> bool:
        """Whether there is an object of this size that was written with this hash."""
        with self.explained(), _absent_is_none():
            answer = self.client.head_object(Bucket=self.name, Key=self.path(key))
            return bool(answer["ContentLength"] == size and answer["Metadata"].get(SHA256) == sha256)
        return False

    def chunks(self, key: str) -> Iterator[bytes]:
        """The contents of an object, piece by piece. Raises FileNotFoundError if there is none."""
        with self.explained():
            yield from self.client.get_object(Bucket=self.name, Key=self.path(key))["Body"].iter_chunks(1 << 20)

    def download(self, key: str, path: Path) -> None:
        """Writes an object to a file, large ones in several parts at once. Raises FileNotFoundError if there is
        none."""
        with self.explained():
            self.client.download_file(self.name, self.path(key), str(path))

    def delete(self, keys: Collection[str]) -> None:
        """Deletes objects. One that does not exist is no error."""
        with self.explained():
            for key in keys:
                self.client.delete_object(Bucket=self.name, Key=self.path(key))

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns errors of boto3 into one line without secrets. An object that does not exist is a FileNotFoundError."""
        from boto3.exceptions import Boto3Error
        from botocore import exceptions

        try:
            yield
        except InputError:  # explained already
            raise
        except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError, exceptions.ProfileNotFound):
            raise InputError(
                f"{self.url}: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            ) from None
        except exceptions.ClientError as error:
            raise self._explain(error) from None
        except (exceptions.HTTPClientError, exceptions.ConnectionError, Boto3Error) as error:
            raise Unreachable(
                f"{self.url}: {self._endpoint()} cannot be reached ({type(error).__name__}): correct AWS_ENDPOINT_URL, "
                "or try again"
            ) from None
        except (exceptions.BotoCoreError, ValueError) as error:
            raise InputError(f"{self.url}: {masked(' '.join(str(error).split()))[:300]}") from None

    def _explain(self, error: Any) -> Exception:
        code = _code(error)
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code == "NoSuchBucket":
            return InputError(f"{self.url}: no such bucket at {self._endpoint()}: create it, or correct R1FLOW_STORE")
        if code in _ABSENT:
            return FileNotFoundError(f"{self.url}: no such object")
        if code in _DENIED:
            action = error.operation_name
            return InputError(
                f"{self.url}: {code} for {action}: the credentials (AWS_ACCESS_KEY_ID, AWS_PROFILE or a role) must be "
                "valid, and allow to list, read, write and delete there"
            )
        if status >= 500 or code in ("SlowDown", "RequestTimeout", "Throttling"):
            return Unreachable(f"{self.url}: {self._endpoint()} answers {code} (status {status}): try again later")
        return InputError(f"{self.url}: {error.operation_name} failed with {code} (status {status})")

    def _endpoint(self) -> str:
        return masked(str(self.client.meta.endpoint_url)) if "client" in vars(self) else "the object store"


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


@contextlib.contextmanager
def _absent_is_none() -> Iterator[None]:
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if _code(error) not in _ABSENT:
            raise


def _age(answer: dict[str, Any]) -> float:
    """Seconds since an object was written: both times are those of the store, so clocks of machines do not matter."""
    from email.utils import parsedate_to_datetime

    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    now = parsedate_to_datetime(date) if date else answer["LastModified"]
    return float((now - answer["LastModified"]).total_seconds())
