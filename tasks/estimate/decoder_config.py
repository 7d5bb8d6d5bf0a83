"""A decoder's sizes in a model's config.json, whatever its type calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ALWAYS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "tie_word_embeddings")
"""Fields that every decoder has. A config.json may leave out those that are its type's defaults."""
_COUNT = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_EVERY = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step", "expert_layer_period")
_KINDS = ("mlp_layer_types", "moe_layer_freq")
"""Names of the same fields in different types."""
NOT_ADAPTED = frozenset(
    {"gpt_oss", "granitemoe", "granitemoeshared", "llama4", "llama4_text", "phimoe"}
    | {"qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text"}
)
"""Model types to whose experts peft gives no adapters: there its 'all-linear' finds neither linear layers nor tensors
that it converts from such (peft.utils.transformers_weight_conversion)."""

NOT_GATED = frozenset(
    {"apertus", "arcee", "gpt_neox", "jais2", "nanochat", "nemotron", "persimmon", "phi", "starcoder2"}
)
"""Model types whose feed-forward blocks have two matrices instead of three."""


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: each token passes through `active` of `count` feed-forward blocks, plus the `shared` ones."""

    count: int
    active: int
    shared: int
    width: int
    dense_layers: int  # the first layers have a plain block
    adapted: bool = True  # whether LoRA gives each expert adapters


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys are projected from a low-rank vector, and so
    are queries, unless `query_rank` is None."""

    query_rank: int | None
    key_rank: int
    plain: int  # width of a head's query and key without rotary position embedding
    rotary: int  # width of the part with rotary position embedding
    value: int


class DecoderConfig:
    """The decoder's fields in a config.json, of a model that may also see or hear.

    Raises ValueError if a field has no value that its name allows, and KeyError if a size is missing.
    """

    def __init__(self, config: Any):
        if not isinstance(config, Mapping):
            raise ValueError("it is no JSON object")
        self.fields = _with_defaults(config)
        if self.fields.get("hidden_size_per_layer_input"):
            raise ValueError("hidden_size_per_layer_input: models with embeddings in each layer are not counted")

    def size(self, *names: str) -> int:
        """The first of these fields that is there, above 0."""
        if (size := self.optional(*names)) is None:
            raise KeyError(names[0])
        if size < 1:
            raise ValueError(f"{' or '.join(names)} is {size}, and must be above 0")
        return size

    def optional(self, *names: str) -> int | None:
        """The first of these fields that is there; None without one."""
        for name in names:
            value = self.fields.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}, and must be a whole number")
            return value
        return None

    def is_set(self, name: str) -> bool:
        return bool(self.fields.get(name))

    @property
    def model_type(self) -> str:
        return str(self.fields.get("model_type"))

    @property
    def feed_forward(self) -> int:
        """Width of dense blocks. Where all layers have experts, some types have no field for it."""
        apart, of = self.optional("intermediate_size_mlp", "dense_intermediate_size"), self.experts
        if apart is None and of is not None:
            return self.optional("intermediate_size") or of.width
        return apart or self.size("intermediate_size")

    @property
    def latent(self) -> Latent | None:
        """Latent attention, if it has that."""
        if self.optional("kv_lora_rank") is None:
            return None
        return Latent(
            query_rank=self.optional("q_lora_rank"),
            key_rank=self.size("kv_lora_rank"),
            plain=self.size("qk_nope_head_dim"),
            rotary=self.size("qk_rope_head_dim"),
            value=self.size("v_head_dim"),
        )

    @property
    def experts(self) -> Experts | None:
        """Its mixture of experts, if it has one. Raises ValueError if it has one in fields that are not known here."""
        count = self.optional(*_COUNT)
        if count is None and (unknown := self._unknown_experts()):
            raise ValueError(f"{', '.join(unknown)}: experts in fields that are not known here")
        if count is None or count < 2:
            return None
        width = self.size("moe_intermediate_size", "intermediate_size")
        layers = self.size("num_hidden_layers")
        shared = self.optional(*_SHARED) or -(-(self.optional(*_SHARED_WIDTH) or 0) // width)
        if "intermediate_size_mlp" in self.fields:  # Llama 4, which has one shared expert and no field for it
            shared = 1
        return Experts(
            count=count,
            active=self.size(*_ACTIVE),
            shared=shared,
            width=width,
            dense_layers=layers - self._sparse_layers(layers),
            adapted=self.model_type not in NOT_ADAPTED,
        )

    def _unknown_experts(self) -> list[str]:
        """Fields that count experts, above one of them."""

        def counts(name: str, value: Any) -> bool:
            return not {"moe", "expert", "experts"}.isdisjoint(name.split("_")) and type(value) is int and value > 1

        return [name for name, value in self.fields.items() if counts(name, value)]

    def _sparse_layers(self, layers: int) -> int:
        """Number of layers with experts."""
        for name in _KINDS:
            kinds = self.fields.get(name)
            if isinstance(kinds, list) and len(kinds) == layers:
                return sum(kind not in ("dense", 0) for kind in kinds)
        first, every = self.optional(*_FIRST) or 0, self.optional(*_EVERY) or 1
        offset = self.optional("expert_layer_offset")
        offset = every - 1 if offset is None else offset
        plain = self.fields.get("mlp_only_layers") or []
        if not isinstance(plain, list):
            raise ValueError(f"mlp_only_layers is {plain!r}, and must be a list")
        return sum((layer - offset) % every == 0 and layer not in plain for layer in range(first, layers))


def _with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the decoder, with the defaults of its type if some are missing that every decoder has."""
    inner = config.get("text_config")
    inner = inner if isinstance(inner, Mapping) else {}
    written = {**config, **inner}
    if not inner and all(name in config for name in _ALWAYS):
        return written
    tied = {name: written[name] for name in ("tie_word_embeddings",) if name in written}
    return {**(_by_type(config) or written), **tied}


def _by_type(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The decoder's fields as transformers completes them; None if it does not know the type, or refuses the values.
    Importing transformers takes seconds, so it reads nothing that is complete."""
    if not isinstance(config.get("model_type"), str):
        return None
    from transformers import AutoConfig

    try:
        whole = AutoConfig.for_model(**config)
        tied = getattr(whole, "tie_word_embeddings", False)
        return {"tie_word_embeddings": tied, **whole.get_text_config().to_dict()}
    except Exception:  # whatever the class of a type raises for values that it does not expect
        return None
