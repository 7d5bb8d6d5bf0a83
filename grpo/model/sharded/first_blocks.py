"""The first blocks of a model, one of each kind at least: how the whole model runs is decided on them.

Which way a model runs (`grpo.model.forward_ways`) depends on its code and configuration. Blocks of one kind run the
same code, so the answer for the first of a kind holds for all. A process that keeps only shards of a model can hold its
first blocks whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from grpo.distributed.fsdp import shares_weights
from grpo.model.lm_head import backbone_of
from grpo.model.probe import set_attention


@dataclass(frozen=True)
class FirstBlocks:
    """`config` describes a model with only the first blocks of the whole one. `like[i]`: the block among them that has
    the kind of the whole model's block i. `path`: name of the list of blocks."""

    config: Any
    like: Sequence[int]
    path: str

    @classmethod
    def of(cls, model: Any) -> FirstBlocks | None:
        """The fewest first blocks of `model`, which may be on the meta device. None if it cannot be shortened: it has
        no single list of blocks, a block shares weights with other parts, or the last one is the first of a kind."""
        text = model.config.get_text_config()
        total = getattr(text, "num_hidden_layers", None)
        lists = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == total
        ]
        if len(lists) != 1 or not total:
            return None
        (path, blocks), per_block = lists[0], _per_block(text, total)
        kinds = [_kind(block, [values[i] for values in per_block.values()]) for i, block in enumerate(blocks)]
        like = [kinds.index(kind) for kind in kinds]
        count = max(like) + 1
        if count == total or shares_weights(model):
            return None
        config = deepcopy(model.config)
        shorter = config.get_text_config()
        for name, values in per_block.items():
            setattr(shorter, name, values[:count])
        shorter.num_hidden_layers = count
        return cls(config, like, path)

    def copy_way(self, short: Any, model: Any) -> None:
        """Makes `model` run as `short` does, the model of the first blocks for which a way was chosen."""
        set_attention(model, backbone_of(short).config._attn_implementation)
        parts = dict(short.named_modules())
        for name, module in [*model.named_modules()]:
            example = parts[self._name_in_short(name)]
            added = {key: value for key, value in vars(example).items() if key not in vars(module) and key[0] != "_"}
            for key, value in added.items():
                setattr(module, key, MethodType(value.__func__, module) if isinstance(value, MethodType) else value)

    def modules_like(self, model: Any, short: Any, examples: Sequence[nn.Module]) -> list[nn.Module]:
        """The modules of `model` that are in its blocks what `examples` are in those of `short`."""
        names = {name for name, module in short.named_modules() if module in examples}
        return [module for name, module in model.named_modules() if self._name_in_short(name) in names]

    def _name_in_short(self, name: str) -> str:
        inside = name.removeprefix(f"{self.path}.")
        if inside == name:
            return name
        number, dot, rest = inside.partition(".")
        return f"{self.path}.{self.like[int(number)]}{dot}{rest}"


def _per_block(text: Any, total: int) -> dict[str, list[Any]]:
    """Settings that have a value for each block, such as `layer_types`."""
    listed = {name: value for name, value in text.to_dict().items() if isinstance(value, list | tuple)}
    return {name: [*value] for name, value in listed.items() if len(value) == total}


def _kind(block: nn.Module, settings: Sequence[Any]) -> Hashable:
    """Equal for blocks that run the same code: classes, plain settings and shapes of weights of all their parts."""
    parts = []
    for name, module in block.named_modules():
        plain = sorted(
            (key, str(value))
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and key != "layer_idx"
        )
        weights = [(key, tuple(weight.shape)) for key, weight in module.named_parameters(recurse=False)]
        parts.append((name, type(module), tuple(plain), tuple(weights)))
    return (*parts, *map(str, settings))


def on_meta(loader: Any, config: Any, dtype: torch.dtype, **options: Any) -> Any:
    """The model that a configuration describes, without memory for its weights."""
    with torch.device("meta"):
        model = loader.from_config(config, dtype=dtype, **options)
    model.tie_weights()
    return model
