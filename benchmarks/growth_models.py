"""Models of the growth axes, from the demo's to SmolLM2-135M, in folders made when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from growth_points import SHAPES
from inputs import demo_model, smollm2, without_end
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from grpo.model.loading import load_tokenizer, save_tokenizer


class Models:
    """Folders of models, made when they are first asked for; those that sample never end a completion."""

    def __init__(self, build: Path, work: Path):
        self.build, self.work = build, work
        self.made: dict[str, Path] = {}

    def __call__(self, name: str, *, endless: bool = True) -> Path:
        if name not in self.made:
            makers: dict[str, Callable[[], Path]] = {
                "demo": lambda: demo_model(self.work),
                "135M": lambda: smollm2(self.build),
            }
            self.made[name] = makers.get(name, lambda: self._random(name))()
            without_end(self.made[name], self.work / f"endless-{name}")
        return self.work / f"endless-{name}" if endless else self.made[name]

    def _random(self, name: str) -> Path:
        layers, width, feed_forward, heads = SHAPES[name]
        demo = self("demo", endless=False)
        like = AutoConfig.from_pretrained(demo)
        shape = {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": width // heads,
        }
        torch.manual_seed(0)
        folder = self.work / name
        LlamaForCausalLM(LlamaConfig(**{**like.to_dict(), **shape})).save_pretrained(folder)
        save_tokenizer(load_tokenizer(str(demo)), str(demo), folder)
        return folder

    def millions(self, name: str) -> float:
        config = AutoConfig.from_pretrained(self(name))
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        return sum(p.numel() for p in model.parameters()) / 1e6
