"""Checks untrusted model folders before transformers reads them, restricts how it may read them, and checks what it
read.

Pickled weights (`pytorch_model.bin`) and a folder's own modules (`auto_map`) would run foreign code.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from grpo.errors import InputError

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.*", "spiece.model", "*.tiktoken")


def loading_options(remote_code: bool = False) -> dict[str, Any]:
    """Options of transformers' `from_pretrained` for a model. Always passed, because it would otherwise ask on the
    terminal."""
    return {"use_safetensors": True, "trust_remote_code": remote_code}


TOKENIZER_OPTIONS: Mapping[str, Any] = {"trust_remote_code": False}
"""The same for a tokenizer; a tokenizer's own code never runs."""


def check_model_folder(model: str | Path, remote_code: bool = False) -> None:
    """Raises InputError if a local path is not a model folder that may be loaded, before transformers reads it.

    `remote_code`: whether the folder may contain its own code.
    """
    path = Path(model).expanduser()
    looks_local = str(model).startswith((".", "/", "~")) or path.exists()
    if not looks_local:
        return
    if not path.is_dir():
        raise InputError(f"{model}: no such model folder; give a Hugging Face folder or a hub name")
    if (path / "adapter_config.json").is_file():
        raise InputError(_adapters_in(model))
    if not (path / "config.json").is_file():
        raise InputError(f"{model}: not a model folder (config.json is missing)")
    config = _config(path, model)
    if not any(path.glob("*.safetensors")):
        if pickles := sorted(file.name for pattern in _PICKLES for file in path.glob(pattern)):
            raise InputError(
                f"{model}: its weights are not in safetensors but in {pickles[0]}, and reading such files can run "
                "code; save them again with transformers' save_pretrained where you trust them"
            )
        raise InputError(f"{model}: not a model folder (no *.safetensors weights)")
    if not remote_code and (reason := _needs_own_code(config)):
        raise InputError(
            f"{model}: {reason}, and code from a model folder is not run; set remote_code = true (in base for the "
            "recipe's model, in a section's hardware for what that loads) if you trust it"
        )


def _adapters_in(model: str | Path) -> str:
    return (
        f"{model}: it has adapters beside its weights (adapter_config.json); merge them into the weights with peft's "
        "merge_and_unload, or remove that file if they are merged"
    )


def hub_snapshot(model: str, also: Sequence[str] = ()) -> Path:
    """The folder with the weights of a model: `model` itself, or where a model of the hub is kept on this machine,
    after a download if necessary. `also`: patterns of further files in the repository's root. Raises InputError."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    import huggingface_hub

    try:
        # What `from_pretrained` reads: the weights in the repository's root, not those in formats of other programs.
        kept = huggingface_hub.snapshot_download(
            model, allow_patterns=["*.safetensors", *also], ignore_patterns=["*/*", "consolidated*"]
        )
    except Exception as error:  # no network, no such model, no right to read it: the hub's own words
        message = textwrap.shorten(str(error), 300) or type(error).__name__
        raise InputError(f"{model}: cannot load a language model from here: {message}") from error
    return Path(kept)


def stored_dtype(folder: Path) -> Literal["float32", "bfloat16"]:
    """The type that holds all weights of a model folder without rounding: bfloat16 if all of its floating-point weights
    have this type, else float32. Raises InputError if a file of weights cannot be read."""
    from safetensors import SafetensorError, safe_open

    kinds: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                kinds |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (no dictionary)
        except (OSError, SafetensorError) as error:
            message = textwrap.shorten(f"{path.name}: {error}", 300)
            raise InputError(f"{folder}: cannot load a language model from here: {message}") from None
    floating = {kind for kind in kinds if kind.startswith(("F", "BF"))}
    return "bfloat16" if floating == {"BF16"} else "float32"


def check_tokenizer_files(model: str | Path) -> None:
    """Raises InputError if a local model folder has no tokenizer."""
    path = Path(model).expanduser()
    if path.is_dir() and not any(file for pattern in _TOKENIZERS for file in path.glob(pattern)):
        raise InputError(
            f"{model}: there is no tokenizer in this folder (no tokenizer.json); copy the files of the one that the "
            "model was trained with into it"
        )


def generation_settings(model: str) -> Any:
    """What the generation_config.json of a model says, such as more end tokens than the tokenizer's; None if there is
    none. Raises InputError if it cannot be read."""
    from transformers import GenerationConfig

    path = Path(model).expanduser()
    if path.exists() and not (path / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(str(path) if path.exists() else model)
    except Exception as error:  # of an untrusted folder, or a hub without the file
        if not path.exists():
            return None
        message = textwrap.shorten(str(error), 200)
        raise InputError(f"{model}: generation_config.json cannot be read ({message}); correct or remove it") from None


def _config(path: Path, model: str | Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{model}: config.json cannot be read as JSON ({str(error)[:200] or 'empty'})") from None
    if not isinstance(config, dict):
        raise InputError(f"{model}: config.json is not a JSON object")
    return config


def _needs_own_code(config: dict[str, Any]) -> str | None:
    """Why transformers cannot build the model without the folder's own code; None if it can, or if that code would not
    help."""
    if not isinstance(config.get("auto_map"), dict):
        return None
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return None
    return f"its architecture, model_type {str(kind)[:60]!r}, is code of its own (auto_map in config.json)"


def check_vocabulary(model: Any, tokenizer: Any, name: str) -> None:
    """Raises InputError if the tokenizer has a token for which the model has no embedding."""
    rows, largest = model.get_input_embeddings().weight.shape[0], max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise InputError(
            f"{name}: the tokenizer is another model's: it has a token {largest}, the model's vocabulary ends at "
            f"{rows - 1}"
        )


def load_checked(
    loader: Any,
    model: str,
    what: str,
    new: tuple[str, ...] = (),
    remote_code: bool = False,
    shortened: bool = False,
    **options: Any,
) -> Any:
    """Calls `loader.from_pretrained` of a transformers class. Checks a model's weights: none is missing, for another
    number of layers, or not finite. Raises InputError.

    `new`: weights that a folder may lack. Any other missing weight is an error; transformers would silently initialize
    it at random. `shortened`: the caller's `config` asks for fewer layers than there are, on purpose.
    """
    from transformers import AutoTokenizer

    # A tokenizer is found without the model's code.
    check_model_folder(model, remote_code or loader is AutoTokenizer)
    path = Path(model).expanduser()
    if loader is AutoTokenizer:
        check_tokenizer_files(model)
        options |= TOKENIZER_OPTIONS
    else:
        options |= {"output_loading_info": True, **loading_options(remote_code)}
    try:
        loaded = loader.from_pretrained(str(path) if path.exists() else model, **options)
    except Exception as error:  # a model's files are untrusted, and their loaders raise all kinds of exceptions
        message = textwrap.shorten(str(error), 300) or type(error).__name__
        raise InputError(f"{model}: cannot load a {what} from here: {message}") from error
    if loader is AutoTokenizer:
        return loaded
    loaded, info = loaded
    if getattr(loaded, "_hf_peft_config_loaded", False):  # of a hub's model
        raise InputError(_adapters_in(model))
    if missing := sorted(name for name in info["missing_keys"] if not name.endswith(new)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{model}: not a whole {what}: weights are missing, {missing[0]!r}{more}")
    _check_scales(loaded, model, info["unexpected_keys"])
    if not shortened:
        _check_layers(loaded, model, info["unexpected_keys"])
    _check_finite(loaded, model)
    return loaded


def _check_layers(loaded: Any, model: str, unused: Iterable[str]) -> None:
    """Raises InputError if there are weights for more layers than config.json says; transformers would ignore them."""
    lists = {name: part for name, part in loaded.named_modules() if type(part).__name__ == "ModuleList"}
    for name in sorted(unused):
        for prefix, layers in lists.items():
            number = name.removeprefix(f"{prefix}.").partition(".")[0]
            if name.startswith(f"{prefix}.") and number.isdecimal() and int(number) >= len(layers):
                raise InputError(
                    f"{model}: config.json describes {len(layers)} of {prefix}, but there are weights of more "
                    f"({name!r}); its config belongs to another model"
                )


def _check_scales(loaded: Any, model: str, unused: Iterable[str]) -> None:
    """Raises InputError if there are scales of weights, which were not used: the weights are quantized, and config.json
    does not say so."""
    weights = dict(loaded.named_parameters())
    if scales := sorted(name for name in unused if name.removesuffix("_scale_inv") in weights):
        raise InputError(
            f"{model}: its weights are quantized ({scales[0]!r} are scales), but its config.json has no "
            "quantization_config; take the config.json that belongs to them"
        )


def _check_finite(loaded: Any, model: str) -> None:
    import torch

    for name, weight in loaded.named_parameters():
        weight = weight.to_local() if hasattr(weight, "to_local") else weight  # a shard
        # One pass without a copy: a sum is finite unless a term is not.
        if weight.is_floating_point() and not torch.isfinite(weight.detach().sum(dtype=torch.float32)):
            raise InputError(
                f"{model}: its weights are damaged: {name!r} has numbers in it that are not finite (NaN or infinity)"
            )
