"""``python -m tasks.estimate.calibrate`` measures this machine's CPU; the last line of stdout is JSON.

It measures three numbers with small Llamas with random weights: operations per second of a forward and backward pass
over many tokens, bytes per second of one token's pass through large layers, and the minimum seconds per layer. Each is
the best of several runs, because other processes may slow a run down.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.estimate.architecture import Architecture
from tasks.estimate.devices import forward_operations

TOKENS, REPEATS = 2048, 4


def calibrate() -> dict[str, float]:
    """`operations` and `bandwidth` (bytes) per second, and `layer_s`, in float32 with torch's number of threads."""
    torch.manual_seed(0)
    middle, large, small = _model(256, 4), _model(1024, 2), _model(32, 8)
    many = torch.randint(0, 256, (8, TOKENS // 8))
    one = many[:1, :1]

    def learn() -> None:
        middle(many, labels=many).loss.backward()

    @torch.inference_mode()
    def read(model: Any = large) -> None:
        model(one)

    learnt = TOKENS * 3 * forward_operations(_shape(middle), TOKENS / 8) / _best(learn)
    layer_s = _best(lambda: read(small)) / 8
    weights = 4 * _shape(large).weights()
    reading = max(1e-9, _best(read) - 2 * layer_s)
    return {"operations": learnt, "bandwidth": weights / reading, "layer_s": layer_s}


def _model(hidden: int, layers: int) -> Any:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def _shape(model: Any) -> Architecture:
    return Architecture.from_config(model.config.to_dict())


def _best(run: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS + 1):  # the first run is a warm-up
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times[1:])


if __name__ == "__main__":
    print(json.dumps(calibrate()))
