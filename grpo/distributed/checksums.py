"""Hashes of the files in a folder, stored in the folder, so that a reader detects changed files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from grpo.distributed.process_group import Parallel

_NAME = "sha256.json"


def write(parallel: Parallel, folder: Path) -> None:
    """Hashes every file below `folder`, writes the hashes there and syncs them to disk. All processes must call it;
    each hashes its share, and the file is visible to the first process when it returns."""
    files = parallel.broadcast(sorted(path.relative_to(folder).as_posix() for path in _files(folder)))
    mine = {name: _sha256(folder / name) for name in files[parallel.rank :: parallel.world]}
    hashes = {name: value for share in parallel.all_gather(mine) for name, value in share.items()}
    if parallel.is_main:
        with (folder / _NAME).open("w", encoding="utf-8") as file:
            json.dump(hashes, file, indent=0, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())


def is_written(folder: Path) -> bool:
    """Whether the folder has hashes. Folders written by earlier versions have none."""
    return (folder / _NAME).exists()


def damage(parallel: Parallel, folder: Path) -> str | None:
    """What is wrong with the files of `folder`; None if they match their hashes or the folder has no hashes. All
    processes must call it and get the same answer."""
    hashes, problem = parallel.broadcast(_read(folder) if parallel.is_main else ({}, None))
    names = sorted(hashes)
    problems = [problem, *(_difference(folder / name, hashes[name]) for name in names[parallel.rank :: parallel.world])]
    mine = next(filter(None, problems), None)
    return next(filter(None, parallel.all_gather(mine)), None)


def _read(folder: Path) -> tuple[dict[str, str], str | None]:
    """The hash of each file, and what is wrong with the hashes."""
    try:
        hashes = json.loads((folder / _NAME).read_bytes())
        if isinstance(hashes, dict) and all(isinstance(value, str) for value in hashes.values()):
            return hashes, None
    except FileNotFoundError:
        return {}, None
    except (ValueError, RecursionError):
        pass
    return {}, f"{_NAME} is damaged"


def _difference(path: Path, expected: str) -> str | None:
    try:
        return None if _sha256(path) == expected else f"{path.name} has changed since it was written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        if error.errno != errno.EIO:  # an unreachable server, for example, says nothing about the file
            raise
        return f"{path.name}: {error.strerror}"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
