"""Writes an artifact's files and a card as a Hugging Face folder, atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from grpo.errors import InputError
from grpo.model_folder import check_model_folder, check_tokenizer_files
from tasks.store.manifest import Manifest
from tasks.store.store import Store

CARD = "README.md"


def check_folder(folder: Path) -> None:
    """Raises InputError if an artifact cannot be written there: the folder must be new or empty, and its parent must
    exist."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"{folder}: is no folder; give a new one")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder}: is not empty; give a new or an empty folder")
    if not folder.absolute().parent.is_dir():
        raise InputError(f"{folder.absolute().parent}: no such folder; make it first")


def check_model(folder: Path) -> None:
    """Raises InputError unless a folder holds a model and its tokenizer in file formats that are safe to load."""
    check_model_folder(folder)
    check_tokenizer_files(folder)


def export(artifact: Manifest, card: str, folder: Path, store: Store) -> None:
    """Compares the artifact's files with their hashes, copies them, and writes the card next to them. The umask decides
    the permissions of the copies.

    Raises:
        InputError: the folder is not empty or cannot be written, or the artifact's files do not match its manifest.
    """
    check_folder(folder)
    store.check(artifact, every_byte=True)
    partial = folder.absolute().with_name(f".{folder.name}.{os.getpid()}")
    try:
        write(artifact, card, partial, shutil.copyfile)
        partial.replace(folder)  # also replaces an empty folder
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; give a folder that can be written, with room enough") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write(artifact: Manifest, card: str, folder: Path, copy: Callable[[Path, Path], object]) -> None:
    """Creates `folder` from the artifact's files, each placed by `copy`, and the card."""
    folder.mkdir()
    for name in artifact.files:
        if name != CARD:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            copy(artifact.path / name, folder / name)
    (folder / CARD).write_text(card, encoding="utf-8")


def link(source: Path, target: Path) -> None:
    """Makes a hard link, or a copy if that is not possible (another file system, or one without hard links)."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
