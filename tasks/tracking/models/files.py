"""Checkpoints in MLflow's model format, so that `models:/tiny@champion` can be downloaded, loaded and served.

The weights are hard links to the files of the store's artifact, so a model takes no extra space. If the artifact is in
an object store, or MLflow's artifacts are on a different file system, no files are written, and the model is only a
reference to the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tasks.store.manifest import TOKENIZER_FILES, Manifest

MLMODEL = "MLmodel"
_WEIGHTS, _TOKENIZER = "model", "components/tokenizer"
_EXAMPLE, _SERVING_EXAMPLE = "input_example.json", "serving_input_example.json"
_PACKAGES = ("mlflow", "torch", "transformers", "accelerate")


def local_folder(location: str) -> Path | None:
    """The folder of an MLflow artifact location; None if it is not on this machine."""
    return Path(unquote(urlsplit(location).path)) if location.startswith("file://") else None


def write_model(folder: Path, checkpoint: Manifest, model_id: str, run_id: str | None) -> bool:
    """Makes `folder` an MLflow model of a checkpoint. Returns False if the artifact is not a language model that
    transformers can load, or if its files cannot be hard-linked there."""
    if (folder / MLMODEL).exists():
        return True
    if checkpoint.remote is not None:  # a link to a copy would keep its space in use after the copy's removal
        return False
    config = _read_json(checkpoint.path / "config.json")
    tokenizer = _read_json(checkpoint.path / "tokenizer_config.json")
    architecture = next(iter(config.get("architectures") or []), "")
    if not architecture.endswith(("ForCausalLM", "LMHeadModel")) or "tokenizer_class" not in tokenizer:
        return False
    try:
        _link(checkpoint, checkpoint.files, folder / _WEIGHTS)
        _link(checkpoint, TOKENIZER_FILES.intersection(checkpoint.files), folder / _TOKENIZER)
    except OSError:  # another file system, or one without hard links
        remove_model(folder)
        return False
    chat = "chat_template.jinja" in checkpoint.files or "chat_template" in tokenizer
    _write(folder, _flavor(config, tokenizer, architecture), chat, model_id, run_id)
    return True


def remove_model(folder: Path) -> None:
    """Removes what `write_model` wrote, including the hard links to the store's files."""
    shutil.rmtree(folder, ignore_errors=True)


def _link(checkpoint: Manifest, names: Iterable[str], folder: Path) -> None:
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # left by a killed process
        os.link(checkpoint.path / name, target)


def _flavor(config: dict[str, Any], tokenizer: dict[str, Any], architecture: str) -> dict[str, Any]:
    return {
        "code": None,
        "components": ["tokenizer"],
        "instance_type": "TextGenerationPipeline",
        "model_binary": _WEIGHTS,
        "pipeline_model_type": architecture,
        "task": "text-generation",
        "tokenizer_type": tokenizer["tokenizer_class"],
        "torch_dtype": f"torch.{config.get('dtype') or config.get('torch_dtype') or 'float32'}",
        "transformers_version": _version("transformers"),
    }


def _write(folder: Path, flavor: dict[str, Any], chat: bool, model_id: str, run_id: str | None) -> None:
    from mlflow.models import Model, ModelSignature
    from mlflow.types import llm

    task = f"llm/v1/{'chat' if chat else 'completions'}"
    if chat:
        signature = ModelSignature(llm.CHAT_MODEL_INPUT_SCHEMA, llm.CHAT_MODEL_OUTPUT_SCHEMA)
        example: dict[str, Any] = {"messages": [{"role": "user", "content": "compute 1 + 2"}]}
    else:
        signature = ModelSignature(llm.COMPLETIONS_MODEL_INPUT_SCHEMA, llm.COMPLETIONS_MODEL_OUTPUT_SCHEMA)
        example = {"prompt": "compute 1 + 2"}
    for name in (_EXAMPLE, _SERVING_EXAMPLE):
        (folder / name).write_text(json.dumps(example))
    requirements = [f"{name}=={number}" for name in _PACKAGES if (number := _version(name))]
    (folder / "requirements.txt").write_text("\n".join(requirements) + "\n")
    python = {"python": platform.python_version(), "dependencies": ["-r requirements.txt"]}
    (folder / "python_env.yaml").write_text(json.dumps(python))
    model = Model(
        run_id=run_id,
        model_id=model_id,
        signature=signature,
        saved_input_example_info={
            "artifact_path": _EXAMPLE,
            "serving_input_path": _SERVING_EXAMPLE,
            "type": "json_object",
        },
        metadata={"task": task},
    )
    model.add_flavor("transformers", inference_task=task, **flavor)
    environment = {"virtualenv": "python_env.yaml"}
    loader = {"loader_module": "mlflow.transformers", "python_version": platform.python_version()}
    model.add_flavor("python_function", env=environment, **loader)
    model.save(str(folder / MLMODEL))  # last: a folder without this file is written again


def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
