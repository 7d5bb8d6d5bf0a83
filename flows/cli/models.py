"""Models as named in commands: a checkpoint, an artifact, a Hugging Face folder, or a name on the hub."""

from __future__ import annotations

import re
from pathlib import Path

from flows.home import store
from grpo.errors import InputError
from tasks.paths import expanded
from tasks.store.manifest import Manifest

_PLAIN = ("base", "r1_zero")
"""Stages whose models continue plain text and do not chat."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_model(name: str) -> tuple[str, Path | None]:
    """The folder or hub name of a model, and its plain-text template if it has no chat template.

    Raises:
        InputError: nothing has this name, the artifact with this name is not a checkpoint, or a folder is no model.
    """
    from flows.stage_contract.references import CHAMPION, artifact
    from flows.stages.base_model import ZERO_TEMPLATE_FILE
    from flows.stages.evaluate import CHECKPOINTS, checkpoints, stage_of
    from tasks.export.folder import check_model

    folder = expanded(name)
    if folder.is_dir():
        check_model(folder)
        return str(folder), folder / ZERO_TEMPLATE_FILE if (folder / ZERO_TEMPLATE_FILE).is_file() else None
    if name.startswith((".", "/", "~")):
        raise InputError(f"{name}: no such folder")
    if _HUB_NAME.fullmatch(name):
        return name, None
    stage = stage_of(name)
    if checkpoints([stage]):
        name = f"latest:{stage}"
    elif name.isidentifier() and name != CHAMPION and not re.fullmatch("[0-9a-f]{6,}", name):
        known = ", ".join([*CHECKPOINTS.values(), "student_NAME"])
        raise InputError(f"{name}: no checkpoint has this name; these do: {known}")
    manifest = store().check(artifact(name))
    if not checkpoints([manifest.stage]):
        known = ", ".join([*CHECKPOINTS, "student_NAME"])
        raise InputError(f"{name}: stage {manifest.stage!r} makes no checkpoint; these do: {known}")
    template = plain_template(manifest)
    if template is None and manifest.stage in _PLAIN:
        raise InputError(f"{name}: the base model that it was made from, with its template, is no longer in the store")
    return str(manifest.path), template


def plain_template(checkpoint: Manifest) -> Path | None:
    """The plain-text template of a checkpoint that was not trained to chat. None if it was, or if the base model, which
    has the template, is no longer in the store."""
    from flows.stages.base_model import ZERO_TEMPLATE_FILE

    if checkpoint.stage not in _PLAIN:
        return None
    base = checkpoint if checkpoint.stage == "base" else store().find(checkpoint.inputs["base"].key or "")
    return None if base is None else base.local(ZERO_TEMPLATE_FILE)
