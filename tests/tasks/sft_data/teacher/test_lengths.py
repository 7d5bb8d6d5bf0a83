"""Lengths of a teacher's samples: those that SFT reads, not those of the request to the teacher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo.config.common import Optimizer
from grpo.config.supervised import Pretrain
from grpo.data.records import Problem, Sample, read_samples, write_rows
from grpo.training.pretrain import train_tokenizer
from tasks.sft_data.rejection import select_shard
from tasks.sft_data.teacher.asking import asked


@pytest.mark.parametrize(("lengths", "verdict"), [({}, "dropped"), ({"lengths_by": "tokenizer"}, "kept")])
def test_a_long_instruction_drops_no_short_answer(
    problem: Callable[..., Problem],
    sample: Callable[..., Sample],
    tmp_path: Path,
    lengths: dict[str, str],
    verdict: str,
) -> None:
    """300 words around "Say hello." with a context of 100 tokens; without the tokenizer, the request is counted."""
    greeting = problem(text="Say hello.", answer="", verifier="none", domain="general")
    (request,) = asked([greeting], "Think. " * 300 + "{question}")
    answer = sample(accuracy=None, tokens=10, prompt_tokens=len(request.text.split()))
    pretrain = Pretrain(vocabulary=320, steps=1, context=128, optimizer=Optimizer(learning_rate=1e-3))
    train_tokenizer([greeting.text, answer.completion] * 4, pretrain).save_pretrained(tmp_path / "tokenizer")
    for name, rows, kind in (("samples", [answer], Sample), ("problems", [greeting], Problem), ("none", [], Problem)):
        write_rows(tmp_path / name, rows, kind)
    settings: dict[str, Any] = {"filters": {"context": 100}, "judge": '{"kind": "rule"}', "judged": [], "seed": 0}
    settings |= {"keep_per_problem": 1, "held_out": [str(tmp_path / "none")]}
    settings |= {key: str(tmp_path / folder) for key, folder in lengths.items()}
    select_shard(tmp_path / "samples", tmp_path / "problems", tmp_path / "out", settings)
    (selected,) = read_samples(tmp_path / "out")
    assert selected.verdict == verdict, selected.reason
    assert (selected.prompt_tokens < 50) == bool(lengths)
