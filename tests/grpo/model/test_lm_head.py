"""The head of a language model while it decodes."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.tiny_models import build
from grpo.config.common import Hardware
from grpo.model.decoder import Decoder
from grpo.model.lm_head import Head
from grpo.model.loading import load_policy


def test_a_decoder_in_bfloat16_widens_the_weights_once(tmp_path: Path) -> None:
    build("qwen3", tmp_path)
    policy = load_policy(str(tmp_path), Hardware(device="cpu", dtype="bfloat16"))
    states = torch.ones(2, policy.config.hidden_size, dtype=torch.bfloat16)
    with torch.no_grad():
        decoder, head = Decoder(policy), Head(policy)
        logits = head(states)
        assert logits.dtype == torch.float32 and torch.equal(decoder.head(states), logits)
        policy.get_output_embeddings().weight.zero_()
        assert not head(states).any()
        assert torch.equal(decoder.head(states), logits)  # of its own copy
