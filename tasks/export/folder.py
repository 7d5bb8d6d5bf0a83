"""Exports a checkpoint as a plain Hugging Face folder with a model card, atomically."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from grpo.errors import InputError
from tasks.export.model_card import About, card
from tasks.store.manifest import MANIFEST
from tasks.store.store import Store

CARD = "README.md"


def check_folder(folder: Path) -> None:
    """Raises InputError unless a checkpoint can be written there: the folder must be new or empty, and its parent
    exist."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"{folder}: is no folder; give a new one")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder}: is not empty; give a new or an empty folder")
    if not folder.absolute().parent.is_dir():
        raise InputError(f"{folder.absolute().parent}: no such folder; make it first")


def export(about: About, folder: Path, store: Store) -> None:
    """Copy the checkpoint's files, after comparing them with their hashes, and write the card beside them.

    Raises:
        InputError: for a folder that is not empty, or an artifact whose files are not what its manifest says.
    """
    check_folder(folder)
    checkpoint = about.checkpoint
    store.check(checkpoint, every_byte=True)
    partial = folder.absolute().with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.copytree(checkpoint.path, partial, ignore=shutil.ignore_patterns(MANIFEST))
        (partial / CARD).write_text(card(about), encoding="utf-8")
        partial.replace(folder)  # replaces an empty folder, too
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; give a folder that can be written, with room enough") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
