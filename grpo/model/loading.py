"""Loading and saving models: policies, with or without adapters, reward models, tokenizers."""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from grpo.config.common import Hardware, Lora
from grpo.dequantize import forget_quantization, plain_weights, whole_blocks
from grpo.errors import InputError
from grpo.model.forward_ways import Way, choose_way
from grpo.model.lm_head import backbone_of, is_policy
from grpo.model.packed.attention import is_packed
from grpo.model.packed.current import same_layout
from grpo.model.probe import attention_as
from grpo.model.rope import rope_limit
from grpo.model.training_mode import without_noise
from grpo.model_folder import TOKENIZER_OPTIONS, check_vocabulary, load_checked

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """A kind of model: its name in messages, and how transformers loads it. `new`: weights that a folder may lack,
    which are then drawn at random."""

    name: str
    loader: Any
    new: tuple[str, ...] = ()
    of_config: Mapping[str, Any] = field(default_factory=dict)

    def load(self, model: str, hardware: Hardware, config: Any = None, **options: Any) -> Any:
        """The model on the CPU, as it comes from its files, but with plain weights and with generation settings that
        can be saved. `config`: another one than the folder's."""
        options |= self.of_config if config is None else {"config": config}
        options |= (quantization := plain_weights(model))
        dtype = getattr(torch, hardware.dtype)
        with whole_blocks() if quantization else contextlib.nullcontext():
            loaded = load_checked(
                self.loader, model, self.name, self.new, remote_code=hardware.remote_code, dtype=dtype, **options
            )
        if quantization:
            forget_quantization(loaded)
            loaded = loaded.float() if dtype == torch.float32 else loaded  # MXFP4 is read as bfloat16
        if getattr(loaded, "generation_config", None) is not None:
            loaded.generation_config = _valid(loaded.generation_config)
        return loaded


def _valid(settings: GenerationConfig) -> GenerationConfig:
    """Generation settings of a folder, in a form that transformers saves: it reads those of sampling without
    `do_sample`, and other contradictions, but does not write them."""
    ends = {name: getattr(settings, name) for name in ("bos_token_id", "eos_token_id")}
    sampling = copy.deepcopy(settings)
    sampling.do_sample = True
    for each in (settings, sampling):
        with contextlib.suppress(ValueError):
            each.validate(strict=True)
            return each
    return GenerationConfig(**ends)


POLICY = Kind("language model", AutoModelForCausalLM)
REWARD_MODEL = Kind("reward model", AutoModelForSequenceClassification, ("score.weight",), {"num_labels": 1})
"""A language model with a scalar head; the head is new if the folder has only a policy's weights."""


def choose_device(hardware: Hardware) -> torch.device:
    """The device of a job; 'auto' takes a GPU if there is one."""
    if hardware.device != "auto":
        return torch.device(hardware.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model, with a padding token. Raises InputError if it has no end-of-sequence token."""
    tokenizer = load_checked(AutoTokenizer, model, "tokenizer")
    if tokenizer.eos_token_id is None:
        raise InputError(f"{model}: the tokenizer has no end-of-sequence token, so completions could not end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(model: str, hardware: Hardware, lora: Lora | None = None) -> Any:
    """Loads a causal language model. With `lora` only adapters are trained."""
    return load_model(POLICY, model, hardware, lora)


def load_model(kind: Kind, model: str, hardware: Hardware, lora: Lora | None = None) -> Any:
    """Loads a model onto its device, with dropout off (dropout would add noise to a policy's ratio)."""
    # The probe runs where the model will: a CPU would take longer, and other kernels would go unchecked.
    loaded = kind.load(model, hardware).to(choose_device(hardware))
    decide_way(loaded, model, hardware)
    prepare_training(loaded, model, hardware)
    if lora is not None:
        loaded = with_adapters(loaded, model, lora)
    return loaded.to(choose_device(hardware)).eval()


def decide_way(loaded: Any, model: str, hardware: Hardware) -> Way:
    """Makes a loaded model run packed or plain, in place, and says so if it is slower than others."""
    way = choose_way(loaded, model, hardware)
    _warn_if_slower(loaded, model, way)
    return way


def prepare_training(loaded: Any, model: str, hardware: Hardware) -> None:
    """Turns dropout off and, if the settings say so, recomputation of activations on, in place."""
    if hardware.gradient_checkpointing:
        try:
            loaded.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": same_layout})
        except ValueError as error:
            raise InputError(f"hardware.gradient_checkpointing: {model}: {error}") from None
        loaded.enable_input_require_grads()
    without_noise(loaded)


def with_adapters(policy: Any, model: str, lora: Lora) -> Any:
    """A policy with new adapters, of which alone gradients are computed. Raises InputError if it cannot have them."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.target_modules, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    try:
        adapted = get_peft_model(policy, config)
    except ValueError as error:
        message = textwrap.shorten(str(error), 200)
        raise InputError(f"lora.target_modules: {model} cannot have these adapters ({message})") from None
    base: Any = adapted.get_base_model()
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    # Logits are computed by the head's own weights. Merged into tied ones, an adapter would change the head as well.
    tied = head is not None and hasattr(embeddings, "lora_A") and embeddings.base_layer.weight is head.weight
    if refused := head if hasattr(head, "lora_A") else embeddings if tied else None:
        name = next(name for name, module in base.named_modules() if module is refused)
        raise InputError(
            f"lora.target_modules: {name!r} of {model} cannot have an adapter, as its head or as embeddings that are "
            "tied to its head; take it out of lora.target_modules"
        )
    return adapted


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Context in which a model computes without its adapters, if it has any, and they stay trainable.

    PEFT's own `disable_adapter` freezes them meanwhile, and adapters that are frozen when FSDP gathers them for the
    first time would never be trained.
    """
    layers: list[Any] = []
    if hasattr(model, "peft_config"):
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def way_of(model: str, hardware: Hardware) -> Way:
    """How a policy would run. Raises InputError if it cannot run."""
    policy = POLICY.load(model, hardware)
    check_vocabulary(policy, load_tokenizer(model), model)
    return choose_way(policy.to(choose_device(hardware)), model, hardware)


def _warn_if_slower(loaded: Any, model: str, way: Way) -> None:
    if way.problem is not None:
        logger.warning(
            "%s: runs plain, not packed (%s): slower and with more memory, because prompts are computed once for each "
            "completion, and only sequences of one length together%s",
            model,
            way.problem,
            f"; {way.by_transformers}" if way.by_transformers else "",
        )
    elif is_policy(loaded) and way.packed and not way.decodes:
        rows = ", with " if way.by_rows else "; "
        logger.warning("%s: trains packed%s%s", model, rows, way.by_transformers)
    elif way.by_transformers and not way.packed:
        logger.warning("%s: runs plain; %s", model, way.by_transformers)


def decodes_packed(model: Any, longest: int) -> bool:
    """Whether sequences of up to `longest` tokens can be decoded packed."""
    backbone = backbone_of(model)
    limit = rope_limit(backbone)
    decodes = is_packed(backbone) and getattr(backbone, "decodes_packed", True)
    return decodes and (limit is None or longest <= limit)


def decodes_exactly(model: Any) -> bool:
    """Whether decoding is known to give the log-probabilities of a forward pass over sequences of any length."""
    return decodes_packed(model, sys.maxsize)


def plain_attention(model: Any) -> AbstractContextManager[None]:
    """Context in which a model uses transformers' own attention."""
    backbone = backbone_of(model)
    return attention_as(model, getattr(backbone, "own_attention", backbone.config._attn_implementation))


def save_tokenizer(tokenizer: Any, model: str, out: Path) -> None:
    """Writes the tokenizer of `model` to the folder `out`, byte for byte if `model` is a folder.

    Loading and saving a tokenizer again keeps its content but changes its bytes, and checkpoints of one recipe must
    have equal tokenizer files. Where copies would be read as another tokenizer, transformers' own files stay.
    """
    names = [Path(written).name for written in tokenizer.save_pretrained(out)]
    for name in (*names, *_OLDER_FILES):
        original = Path(model).expanduser() / name
        if original.is_file():
            shutil.copyfile(original, out / name)
    copied = AutoTokenizer.from_pretrained(out, **TOKENIZER_OPTIONS)
    if _content(copied) != _content(tokenizer):
        for name in _OLDER_FILES:
            (out / name).unlink(missing_ok=True)
        tokenizer.save_pretrained(out)


_OLDER_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Files of a tokenizer that transformers reads, and no longer writes."""


def _content(tokenizer: Any) -> tuple[Any, ...]:
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    return tokenizer.get_vocab(), tokenizer.bos_token_id, end, end if pad is None else pad, tokenizer.chat_template
