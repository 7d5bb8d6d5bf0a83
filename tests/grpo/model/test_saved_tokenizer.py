"""A checkpoint's tokenizer is the one that the model was loaded with, whatever files say so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo.model.loading import load_tokenizer, save_tokenizer


@pytest.fixture
def folder(model_folder: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def write(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    before = json.loads(path.read_text()) if path.exists() else {}
    kept = {key: value for key, value in {**before, **changes}.items() if value is not None}
    path.write_text(json.dumps(kept))


def saved(folder: Path) -> Any:
    """The tokenizer of a checkpoint, after it was held against the one of the model that it was made from."""
    out = shutil.copytree(folder, folder.with_name("out"), ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    own = load_tokenizer(str(folder))
    save_tokenizer(own, str(folder), out)
    found = load_tokenizer(str(out))
    assert found.get_vocab() == own.get_vocab() and found.chat_template == own.chat_template
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(found, name) == getattr(own, name), name
    for path in folder.glob("*token*"):
        assert (out / path.name).read_bytes() == path.read_bytes()
    return found


def test_files_that_transformers_writes_too(folder: Path) -> None:
    assert saved(folder).eos_token == "<|end|>"


def test_the_map_of_special_tokens_overrides_the_config(folder: Path) -> None:
    write(folder, "special_tokens_map.json", eos_token={"content": "<|bos|>"})
    assert saved(folder).eos_token == "<|bos|>"


def test_the_end_token_is_only_in_the_map(folder: Path) -> None:
    write(folder, "tokenizer_config.json", eos_token=None)
    write(folder, "special_tokens_map.json", eos_token="<|end|>")
    assert saved(folder).eos_token == "<|end|>"


def test_a_token_is_only_among_the_added_ones(folder: Path) -> None:
    number = len(load_tokenizer(str(folder)))
    write(folder, "added_tokens.json", **{"<marked>": number})
    assert saved(folder).get_vocab()["<marked>"] == number


def test_a_copy_that_would_be_another_tokenizer_is_not_kept(folder: Path) -> None:
    out = shutil.copytree(folder, folder.with_name("out"))
    write(folder, "special_tokens_map.json", eos_token="<|bos|>")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.eos_token = "<|pad|>"
    tokenizer.add_tokens(["<new>"])
    save_tokenizer(tokenizer, str(folder), out)
    found = load_tokenizer(str(out))
    assert (found.eos_token, found.get_vocab()) == ("<|pad|>", tokenizer.get_vocab())
    assert not (out / "special_tokens_map.json").exists()
