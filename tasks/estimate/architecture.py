"""A decoder's architecture, read from its config.json, and its parameter count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tasks.estimate.decoder_config import NOT_GATED, DecoderConfig, Experts, Latent


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
    gated: bool = True  # whether dense blocks have a gate
    experts: Experts | None = None
    latent: Latent | None = None

    @classmethod
    def from_config(cls, config: Any) -> Architecture:
        """Reads a model's config.json. Raises KeyError if a size is missing, and ValueError if one is no size, or if
        the model has experts in fields that are not known here."""
        of = DecoderConfig(config)
        heads, hidden = of.size("num_attention_heads"), of.size("hidden_size")
        return cls(
            layers=of.size("num_hidden_layers"),
            hidden=hidden,
            feed_forward=of.feed_forward,
            heads=heads,
            key_heads=of.optional("num_key_value_heads") or heads,
            head_width=of.optional("head_dim") or hidden // heads,
            vocabulary=of.size("vocab_size"),
            tied=of.is_set("tie_word_embeddings"),
            query_bias=of.model_type == "qwen2" or of.is_set("attention_bias"),
            gated=of.model_type not in NOT_GATED,
            experts=of.experts,
            latent=of.latent,
        )

    @property
    def attention_linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each linear layer of attention."""
        h, q, kv = self.hidden, self.heads * self.head_width, self.key_heads * self.head_width
        if latent := self.latent:
            q, rank = self.heads * (latent.plain + latent.rotary), latent.query_rank
            queries = [(h, q)] if rank is None else [(h, rank), (rank, q)]
            keys = (h, latent.key_rank + latent.rotary), (latent.key_rank, self.heads * (latent.plain + latent.value))
            return [*queries, *keys, (self.heads * latent.value, h)]
        return [(h, q), (h, kv), (h, kv), (q, h)]

    @property
    def feed_forward_linears(self) -> list[tuple[int, int]]:
        """The same for a dense feed-forward block."""
        h, f = self.hidden, self.feed_forward
        return [(h, f), (f, h), *([(h, f)] if self.gated else [])]

    @property
    def feed_forward_weights(self) -> int:
        return sum(a * b for a, b in self.feed_forward_linears)

    @property
    def attention_weights(self) -> int:
        bias = (self.heads + 2 * self.key_heads) * self.head_width if self.query_bias else 0
        norms = 0
        if latent := self.latent:
            bias, norms = 0, (latent.query_rank or 0) + latent.key_rank
        return sum(a * b for a, b in self.attention_linears) + bias + norms

    def block_weights(self, *, sparse: bool, active: bool = False) -> int:
        """Parameter count of a transformer block; `active`: only the parameters that one token passes through."""
        if not sparse or self.experts is None:
            return self.attention_weights + self.feed_forward_weights + 2 * self.hidden
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
        blocks = [of_each(self.feed_forward_weights, self.feed_forward)]
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

    @property
    def adapted_linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the linear layers in a block with adapters: in one of experts if there are any."""
        of, h = self.experts, self.hidden
        if of is None:
            return self.attention_linears + self.feed_forward_linears
        # peft takes experts for what they once were, linear layers with the names of those of dense and shared blocks,
        # and then finds only the experts under these names.
        shared = of.shared * of.width
        others = [(h, of.count)] if of.adapted else [(h, shared), (h, shared), (shared, h)] if shared else []
        return self.attention_linears + others

    def adapter_weights(self, rank: int) -> int:
        """Parameter count of LoRA adapters as peft's 'all-linear' makes them: two low-rank matrices for each linear
        layer except the head, and for each expert. An expert's gate and up are one tensor, with twice the rank."""
        of = self.experts
        sparse = self.layers - of.dense_layers if of else 0
        weights = sparse * sum(a + b for a, b in self.adapted_linears)
        if of is not None and of.adapted:
            gate_up, down = 2 * (self.hidden + 2 * of.width), of.width + self.hidden
            weights += sparse * of.count * (gate_up + down)
        in_dense = self.attention_linears + ([] if of and of.adapted else self.feed_forward_linears)
        weights += (self.layers - sparse) * sum(a + b for a, b in in_dense)
        return rank * weights

    @property
    def cache_numbers(self) -> int:
        """Numbers that the key-value cache of all layers holds per token. Latent attention caches the latent vector, as
        in vLLM."""
        if self.latent:
            return self.layers * (self.latent.key_rank + self.latent.rotary)
        return self.layers * 2 * self.key_heads * self.head_width
