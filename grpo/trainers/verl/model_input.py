"""The model that verl begins with: a folder that it may read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo.config.common import Hardware
from grpo.errors import InputError
from grpo.model_folder import check_model_folder, hub_snapshot

_READ = ("*.json", "*.jinja", "*.txt", "*.model")
"""What verl reads of a folder besides its weights and its code."""


def folder_for_verl(model: str, hardware: Hardware) -> Path:
    """The model's folder, after a download if it is a model of the hub. Raises InputError if it may not be read: verl
    would also read weights that can run code, and with `remote_code` it would run a tokenizer's."""
    folder = hub_snapshot(model, (*_READ, *(["*.py"] if hardware.remote_code else [])))
    check_model_folder(folder, hardware.remote_code)
    if hardware.remote_code and "auto_map" in _fields(folder / "tokenizer_config.json"):
        raise InputError(
            f"{model}: its tokenizer is code of its own (auto_map in tokenizer_config.json), which verl would run, but "
            "remote_code is for models only; save it as tokenizer.json and remove auto_map, or leave out "
            "hardware.trainer"
        )
    return folder


def without_noise(folder: Path) -> dict[str, float]:
    """What changes a model's config.json so that verl trains as this library: no dropout, no router jitter. Field -> 0,
    for fields that are not 0."""
    config = _fields(folder / "config.json")
    return {
        name: 0.0
        for name, value in config.items()
        if ("drop" in name or "jitter" in name) and isinstance(value, float) and value > 0
    }


def _fields(file: Path) -> dict[str, Any]:
    """Of a JSON object; none if the file is missing or something else."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
