"""A decoder's architecture, read from its config.json, and its parameter count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: each token passes through `active` of `count` feed-forward blocks, plus the `shared` ones."""

    count: int
    active: int
    shared: int
    width: int
    dense_layers: int  # the first layers have a plain block


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries and keys are projected from low-rank
    vectors."""

    query_rank: int
    key_rank: int
    plain: int  # width of a head's query and key without rotary position embedding
    rotary: int  # width of the part with rotary position embedding
    value: int


_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
"""Fields of config.json for the number of experts, in different architectures."""


@dataclass(frozen=True)
class Architecture:
    """A decoder as transformers builds it. `feed_forward` is the width of dense blocks."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    tied: bool
    query_bias: bool = False  # whether queries, keys and values have biases, as in Qwen2
    experts: Experts | None = None
    latent: Latent | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Reads a model's config.json, with transformers' field names. Raises KeyError if a size is missing."""
        heads = config["num_attention_heads"]
        experts = latent = None
        count = next((config[name] for name in _EXPERT_COUNTS if config.get(name)), None)
        if count is not None:
            width = config.get("moe_intermediate_size") or config["intermediate_size"]
            shared = config.get("shared_expert_intermediate_size") or 0
            experts = Experts(
                count=count,
                active=config["num_experts_per_tok"],
                shared=config.get("n_shared_experts") or -(-shared // width),
                width=width,
                dense_layers=config.get("first_k_dense_replace") or len(config.get("mlp_only_layers") or ()),
            )
        if "kv_lora_rank" in config:
            latent = Latent(
                query_rank=config["q_lora_rank"],
                key_rank=config["kv_lora_rank"],
                plain=config["qk_nope_head_dim"],
                rotary=config["qk_rope_head_dim"],
                value=config["v_head_dim"],
            )
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            feed_forward=config["intermediate_size"],
            heads=heads,
            key_heads=config.get("num_key_value_heads") or heads,
            head_width=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            query_bias=config.get("model_type") == "qwen2" or bool(config.get("attention_bias", False)),
            experts=experts,
            latent=latent,
        )

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each linear layer of a dense block, without those of latent attention."""
        h, f, q, kv = self.hidden, self.feed_forward, self.heads * self.head_width, self.key_heads * self.head_width
        return [(h, q), (h, kv), (h, kv), (q, h), (h, f), (h, f), (f, h)]

    @property
    def attention_weights(self) -> int:
        if latent := self.latent:
            key = latent.plain + latent.rotary
            down = self.hidden * (latent.query_rank + latent.key_rank + latent.rotary)
            up = self.heads * (latent.query_rank * key + latent.key_rank * (latent.plain + latent.value))
            norms = latent.query_rank + latent.key_rank
            return down + up + norms + self.heads * latent.value * self.hidden
        bias = (self.heads + 2 * self.key_heads) * self.head_width if self.query_bias else 0
        return sum(a * b for a, b in self.linears[:4]) + bias

    def block_weights(self, *, sparse: bool, active: bool = False) -> int:
        """Parameter count of a transformer block; `active`: only the parameters that one token passes through."""
        if not sparse or self.experts is None:
            return self.attention_weights + 3 * self.hidden * self.feed_forward + 2 * self.hidden
        of = self.experts
        each = 3 * self.hidden * of.width
        router = of.count * (self.hidden + 1)  # including the bias that balances the load
        blocks = ((of.active if active else of.count) + of.shared) * each
        return self.attention_weights + blocks + router + 2 * self.hidden

    @property
    def largest_block(self) -> int:
        return max(self.block_weights(sparse=False), self.block_weights(sparse=True))

    def gathered_block(self, parts: int) -> float:
        """Parameter count of the largest block as a process gathers it where `parts` processes divide its layers
        (`grpo.distributed.divided_layers`)."""

        def of_each(weights: int, *counts: int) -> float:
            return weights / parts if all(count % parts == 0 for count in counts) else weights

        latent, of = self.latent is not None, self.experts
        attention = self.attention_weights if latent else of_each(self.attention_weights, self.heads, self.key_heads)
        blocks = [of_each(3 * self.hidden * self.feed_forward, self.feed_forward)]
        if of is not None:
            each = 3 * self.hidden * of.width
            divided = of_each(of.count * each, of.count) + of_each(of.shared * each, of.shared * of.width)
            blocks.append(divided + of.count * (self.hidden + 1))
        return attention + max(blocks) + 2 * self.hidden

    @property
    def first_blocks(self) -> int:
        """Parameter count of the outer weights and of the first blocks, up to the first of the last kind."""
        if self.experts is None:
            return self.outer_weights + self.block_weights(sparse=False)
        dense = self.experts.dense_layers * self.block_weights(sparse=False)
        return self.outer_weights + dense + self.block_weights(sparse=True)

    @property
    def outer_weights(self) -> int:
        """Parameter count of the embeddings, of the head if it is not tied to them, and of the final norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    def weights(self, *, active: bool = False) -> int:
        dense = self.experts.dense_layers if self.experts else self.layers
        sparse = self.layers - dense
        blocks = dense * self.block_weights(sparse=False) + sparse * self.block_weights(sparse=True, active=active)
        return blocks + self.outer_weights

    def adapter_weights(self, rank: int) -> int:
        """Parameter count of LoRA adapters on every linear layer except the head: two low-rank matrices each."""
        return self.layers * rank * sum(a + b for a, b in self.linears)

    @property
    def cache_numbers(self) -> int:
        """Numbers that the key-value cache of all layers holds per token. Latent attention caches the latent vector, as
        in vLLM."""
        if self.latent:
            return self.layers * (self.latent.key_rank + self.latent.rotary)
        return self.layers * 2 * self.key_heads * self.head_width
