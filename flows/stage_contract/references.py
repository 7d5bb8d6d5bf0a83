"""References: how to name a stage's input, or an artifact to look at.

3fa4c1                   a key or a digest, or a prefix of one
latest:STAGE             the newest artifact of a stage; only `latest` if the stage is clear
RUN:STAGE                what an MLflow run made, reused or read; RUN is its id or a prefix of it
champion, alias:NAME     a model in MLflow's registry by its alias; NAME@RECIPE if several recipes have it
./FOLDER, /FILE, ~/FILE  something of the user's, by its contents
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from flows.home import home, store, tracking
from grpo.errors import InputError
from grpo.secret_values import walk
from tasks.paths import expanded
from tasks.store.manifest import InputRef, Manifest
from tasks.store.whole_file import write_whole
from tasks.tracking.lineage import artifact_of
from tasks.tracking.models.registry import CHAMPION


@dataclass(frozen=True)
class Input:
    """A resolved input: its reference, and the artifact or the place of the user's file or folder."""

    ref: InputRef
    place: Path
    manifest: Manifest | None = None

    @property
    def path(self) -> Path:
        """Its path on this machine. An artifact in an object store is fetched first, so this can take a while."""
        return self.place if self.manifest is None else self.manifest.local()

    @property
    def exact(self) -> str:
        """A reference to this very input, whenever and wherever it is resolved: a digest, or an absolute path."""
        return str(self.place) if self.manifest is None else self.ref.digest


def resolve(reference: str, stage: str | None = None) -> Input:
    """The input that a reference names, after checking that its contents on this machine are unchanged. `latest` alone
    is the newest artifact of `stage`."""
    if reference.startswith((".", "/", "~")):
        return external(reference)
    manifest = store().check_here(artifact(reference, stage))
    return Input(manifest.ref, manifest.path, manifest)


def artifact(reference: str, stage: str | None = None) -> Manifest:
    """The artifact in the store that a reference names."""
    if reference.startswith((".", "/", "~")):
        raise InputError(f"{reference}: is a path; give an artifact of the store, `r1 stages` lists them")
    if reference == "latest":
        if stage is None:
            raise InputError("latest: of which stage? write latest:STAGE")
        reference = f"latest:{stage}"
    if reference == CHAMPION or "@" in reference or reference.startswith("alias:"):
        alias, _, recipe = reference.removeprefix("alias:").partition("@")
        return tracking().models.by_alias(alias, recipe or None, store())
    run, colon, of_run = reference.partition(":")
    if colon and run != "latest":
        return artifact_of(run, of_run, tracking(), store())
    return store().resolve(reference)


def external(name: str | Path) -> Input:
    """A user's file or folder, identified by its contents. A string that is not a local path is a hub name and
    identifies itself. A Path must exist."""
    path = expanded(name)
    if not path.exists():
        if isinstance(name, Path) or name.startswith((".", "/", "~")):
            raise InputError(f"{name}: no such file or folder")
        return Input(InputRef(hashlib.sha256(name.encode()).hexdigest(), path=name), Path(name))
    return Input(InputRef(_contents_digest(path), path=str(path.absolute())), path.absolute())


def named_files(paths: Mapping[str, str | Path], settings: BaseModel, around: str = "") -> dict[str, Input]:
    """Files and folders named in settings, as inputs. `around`: prefix of their fields in error messages.

    Raises:
        InputError: one is missing; the message names its field.
    """
    found = {}
    for name, path in paths.items():
        try:
            found[name] = external(path)
        except InputError as error:
            places = walk(settings.model_dump(mode="json"))
            field = next((f"{around}{place}: " for place, value in places if value == str(path)), "")
            raise InputError(f"{field}{error}") from None
    return found


def _contents_digest(path: Path) -> str:
    """SHA-256 over names and contents. Cached by size and time, so that a model folder is not read in every run."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    state = hashlib.sha256(
        json.dumps([[str(p), (s := p.stat()).st_size, s.st_mtime_ns] for p in files]).encode()
    ).hexdigest()
    cache = home() / "digests" / state
    if cache.is_file():
        return cache.read_text()
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(f"{file.relative_to(path)}\0{hashlib.file_digest(opened, 'sha256').hexdigest()}\n".encode())
    write_whole(cache, digest.hexdigest())
    return digest.hexdigest()
