"""Manifests: the description of an artifact, with the key it was made under and the digest of its contents."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_NEWER = {"machine", "peak_memory", "origin", "checksum"}
"""Fields that earlier versions did not write; omitted if None."""
ONCE_HASHED = frozenset({"save_every", "samples_every"})
"""Settings that are no part of a key any more, because they do not change the result. Earlier versions hashed them:
their artifacts have them in `config`, and are found under both keys (`Manifest.key_today`)."""


class FileEntry(TypedDict):
    """Size in bytes and SHA-256 (hex) of a file."""

    size: int
    sha256: str


Files = dict[str, FileEntry]
"""Relative path -> {"size": bytes, "sha256": hex}."""
TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
}


def canonical_json(value: Any) -> str:
    """The canonical JSON text of a value, from which hashes are computed. Raises ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def artifact_key(stage: str, version: int, config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """Key (SHA-256) of what `stage` makes from `config` and `inputs` (name -> digest). Equal keys mean equal work."""
    parts = {"stage": stage, "version": version, "config": dict(config), "inputs": dict(inputs)}
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


def artifact_digest(key: str, files: Mapping[str, FileEntry]) -> str:
    """SHA-256 over a key and the names and hashes of the files."""
    hashes = sorted((name, entry["sha256"]) for name, entry in files.items())
    return hashlib.sha256(canonical_json([key, hashes]).encode()).hexdigest()


def tokenizer_digest(files: Mapping[str, FileEntry]) -> str | None:
    """SHA-256 over the tokenizer files and the chat template; None if there are none."""
    # By base name: the same tokenizer counts as one, even in two folders or in artifacts with different layouts.
    hashes = {(Path(name).name, entry["sha256"]) for name, entry in files.items() if Path(name).name in TOKENIZER_FILES}
    return hashlib.sha256(canonical_json(sorted(hashes)).encode()).hexdigest() if hashes else None


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flushes a file or a folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class RemoteFiles(ABC):
    """Where the files of an artifact are, if that is not this machine."""

    @abstractmethod
    def url(self, manifest: Manifest) -> str:
        """Address of the artifact's files, for people."""

    @abstractmethod
    def fetch(self, manifest: Manifest, names: Collection[str]) -> None:
        """Brings these files below `manifest.path`. Raises InputError if one is missing or differs from its hash."""


@dataclass(frozen=True)
class InputRef:
    """One input of a stage: its digest and its origin, either an earlier artifact or a path given by the user."""

    digest: str
    stage: str | None = None
    key: str | None = None
    path: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Description of an artifact, and the only thing that stages pass to each other.

    `digest` covers the key and the contents, so equal contents under two keys never share a digest. `files` maps a
    relative path to ``{"size": bytes, "sha256": hex}``. A metric that is not finite is stored as None.
    `tokenizer_sha256` covers the tokenizer files and the chat template, in whichever folder of the artifact they are.
    `seconds` is the duration of the work; `created` is UTC in ISO format. `machine` and `peak_memory` are defined in
    `tasks.estimate.measured`. They are None if an attempt continued an earlier one, whose time is not in `seconds`.
    `origin` holds code, user, machine and libraries, as named in `tasks.estimate.origin`. `checksum` is the SHA-256 of
    all other fields. The last four are None in manifests of earlier versions.

    `path` and `remote` are not part of the manifest's file. `path` is the artifact's folder on this machine. If
    `remote` is set, a file is there only after `local` has fetched it.
    """

    stage: str
    stage_version: int
    key: str
    digest: str
    attempt: int
    created: str
    seconds: float
    config: dict[str, Any]
    inputs: dict[str, InputRef]
    files: Files
    counts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float | None] = field(default_factory=dict)
    steps_completed: int | None = None
    tokenizer_sha256: str | None = None
    mlflow_run_id: str | None = None
    machine: str | None = None
    peak_memory: int | None = None
    origin: dict[str, str] | None = None
    checksum: str | None = None
    path: Path = field(default=Path(), compare=False)
    remote: RemoteFiles | None = field(default=None, compare=False, repr=False)

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)

    def local(self, name: str = "") -> Path:
        """Path of a file or a folder of the artifact, by default of all of it, on this machine. Fetches what an object
        store has of it and this machine does not.

        Raises:
            InputError: a file is missing in the object store or differs from its hash.
        """
        if self.remote is not None:
            self.remote.fetch(self, [n for n in self.files if not name or n == name or n.startswith(f"{name}/")])
        return self.path / name

    @property
    def location(self) -> str:
        """Where its files are, for people: a folder, or an address in an object store."""
        return str(self.path) if self.remote is None else self.remote.url(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without `path` and `remote`, which are valid only on this machine."""
        here = ("path", "remote")
        values = {k: v for k, v in vars(self).items() if k not in here and not (v is None and k in _NEWER)}
        return {**values, "inputs": {name: dict(vars(ref)) for name, ref in self.inputs.items()}}

    def sealed(self) -> Manifest:
        """A copy with its checksum filled in."""
        values = dataclasses.replace(self, checksum=None).to_dict()
        return dataclasses.replace(self, checksum=hashlib.sha256(canonical_json(values).encode()).hexdigest())

    @property
    def config_today(self) -> dict[str, Any]:
        """`config` without the settings that only earlier versions hashed."""
        config: dict[str, Any] = _without_once_hashed(self.config)
        return config

    @property
    def key_today(self) -> str:
        """The key that the same work has in this version; differs from `key` only for artifacts of earlier versions."""
        if (config := self.config_today) == self.config:
            return self.key
        digests = {name: ref.digest for name, ref in self.inputs.items()}
        return artifact_key(self.stage, self.stage_version, config, digests)

    @property
    def ref(self) -> InputRef:
        """This artifact as the input of a later stage."""
        return InputRef(self.digest, stage=self.stage, key=self.key)


def _without_once_hashed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_once_hashed(v) for k, v in value.items() if k not in ONCE_HASHED}
    return [_without_once_hashed(v) for v in value] if isinstance(value, list) else value


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in an artifact's folder. None, with a warning, if the manifest or the files are damaged."""
    manifest, problem = examine(folder)
    if problem:
        logger.warning("ignoring the damaged artifact %s: %s", folder / MANIFEST, problem)
        return None
    return manifest


def examine(folder: Path) -> tuple[Manifest | None, str | None]:
    """Returns the manifest in an artifact's folder (None if it cannot be read) and what is wrong with the artifact.

    Checks that the manifest is consistent and that the names and sizes of the files match it. `tasks.store.checks`
    compares the contents of the files.
    """
    try:
        with open(folder / MANIFEST, "rb") as file:
            text = file.read()
    except OSError as error:
        return None, error.strerror
    manifest, problem = parse(text, folder)
    if manifest is not None and not problem:
        try:
            check_sizes(manifest)
        except (OSError, ValueError) as error:
            return manifest, str(error)
    return manifest, problem


def parse(text: bytes, folder: Path) -> tuple[Manifest | None, str | None]:
    """Returns the manifest of the artifact in `folder` (None if it cannot be read) and what is wrong with it, without a
    look at the files."""
    try:
        manifest = dataclasses.replace(_JSON.validate_json(text, strict=True), path=folder, remote=None)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return None, f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    try:
        _check(manifest)
    except ValueError as error:
        return manifest, str(error)
    return manifest, None


def trusted(text: bytes, folder: Path) -> Manifest:
    """A manifest that was valid when last read. Raises an error of any kind if it is not."""
    values = json.loads(text)
    inputs = {name: InputRef(**ref) for name, ref in values["inputs"].items()}
    return Manifest(**{**values, "inputs": inputs, "path": folder})


def _check(manifest: Manifest) -> None:
    """Raises ValueError if the manifest is inconsistent; the message says how."""
    if manifest.path.parts[-3:] != (manifest.stage, manifest.key, str(manifest.attempt)):
        raise ValueError("it belongs to another artifact")
    if datetime.fromisoformat(manifest.created).tzinfo is None:
        raise ValueError("created has no time zone")
    inputs = {name: ref.digest for name, ref in manifest.inputs.items()}
    if manifest.key != artifact_key(manifest.stage, manifest.stage_version, manifest.config, inputs):
        raise ValueError("it was edited: the key is not that of its configuration and inputs")
    if manifest.digest != artifact_digest(manifest.key, manifest.files):
        raise ValueError("it was edited: the digest is not that of its files")
    if manifest.checksum not in (None, manifest.sealed().checksum):
        raise ValueError("it was edited: its checksum is another")


def check_sizes(manifest: Manifest) -> None:
    """Raises ValueError if a file of the artifact is missing or has a different size."""
    folder = os.fspath(manifest.path)
    for name, entry in manifest.files.items():
        try:
            size = os.stat(f"{folder}/{name}").st_size
        except FileNotFoundError:
            raise ValueError(f"{name} is missing") from None
        if size != entry["size"]:
            raise ValueError(f"{name} has {size} bytes instead of {entry['size']}")


_JSON = TypeAdapter(Manifest)
