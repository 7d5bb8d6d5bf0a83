"""The settings that benchmarks/grpo_vs_trl.py compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inputs import as_prompts, demo_model, long_prompts, questions, smollm2, sums

from grpo.data.records import Message
from grpo.model.loading import load_tokenizer

Run = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    model: Callable[[Path, Path], Path]  # (build folder, a folder to write in) -> the model's
    prompts: Callable[[Path, Path], list[list[Message]]]  # (model, a folder to write in)
    group_size: int
    max_new_tokens: int
    micro_batch_tokens: int
    steps: int  # timed ones of a run
    trl_rows: tuple[int, int]  # completions of TRL's micro-batches
    why: str  # these


WARM_UP = 2


"""Steps that are not timed: the optimizer's moments come into being at the end of the first, and memory takes its final
size in the second."""


SETTINGS = {
    "small": Setting(
        model=lambda build, work: smollm2(build),
        prompts=lambda model, work: as_prompts(questions(4, work)),
        group_size=8,
        max_new_tokens=64,
        micro_batch_tokens=600,
        steps=2,
        trl_rows=(32, 8),
        why="the whole step, and a quarter of it",
    ),
    "long": Setting(
        model=lambda build, work: smollm2(build),
        prompts=lambda model, work: long_prompts(2, 512, load_tokenizer(str(model)), work),
        group_size=16,
        max_new_tokens=64,
        micro_batch_tokens=2048,
        steps=1,
        trl_rows=(8, 4),
        why="the whole step, 32 x 576 tokens, needs some 50 GB there",
    ),
    "demo": Setting(
        model=lambda build, work: demo_model(work),
        prompts=lambda model, work: as_prompts(sums(16)),
        group_size=8,
        max_new_tokens=48,
        micro_batch_tokens=16384,
        steps=30,
        trl_rows=(128, 32),
        why="the whole step, and a quarter of it",
    ),
}
