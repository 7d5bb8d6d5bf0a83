"""A real model as the judge, in process and behind a real vLLM server. SmolLM2-135M is no good judge, and need not be:
every claim must have a verdict or be undecided, and all must be counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo.config.judge import JudgeSettings
from grpo.data.records import Problem
from tasks.judges.base import Claim, Pair, Response
from tasks.judges.calibration import Verified, calibrate
from tasks.judges.create_judge import make_judge
from tests.support.job_runner import ROOT
from tests.support.vllm_models import needs_vllm
from tests.support.vllm_server import served

SMOLLM = ROOT / "build/real_model/SmolLM2-135M-Instruct"
GSM8K = ROOT / "build/real_model/gsm8k.jsonl"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SMOLLM.is_dir() and GSM8K.is_file()), reason="no SmolLM2 in build/real_model"),
]
GREETING = Problem("p", [{"role": "user", "content": "Say hello."}], "", "none", "general", "en", "test")


ENUM = {"type": "string", "enum": ["correct", "incorrect"]}
SHAPE = {
    "type": "object",
    "properties": {"analysis": {"type": "string", "maxLength": 80}, "correctness": ENUM},
    "required": ["analysis", "correctness"],
    "additionalProperties": False,
}


def items(number: int) -> list[Verified]:
    """Word problems with their right answers, and with answers that are 10 too large."""
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()[:number]]
    answers = [(row["question"], row["answer"].rpartition("#### ")[2].replace(",", "")) for row in rows]
    right = [Verified(Claim(question, answer, f"The answer is {answer}."), True) for question, answer in answers]
    return right + [Verified(Claim(q, answer, f"The answer is {int(answer) + 10}."), False) for q, answer in answers]


def judge_all(judge: Any, number: int) -> None:
    numbers = calibrate(judge, items(number), 0.0, size=2 * number)
    pairs = [Pair(GREETING, "Hello! How are you?", "No."), Pair(GREETING, "The moon is far.", "Hello!")]
    assert all(v is None or -2 <= v <= 2 for v in judge.compare_all(pairs))
    assert all(v in (True, False, None) for v in judge.good_all([Response(GREETING, "Hello!"), Response(GREETING, "")]))
    counts = judge.counts
    outcomes = {name: n for name, n in counts.to_dict().items() if name.startswith("outcome/")}
    print("calibration", numbers, "counts", counts.to_dict(), "shares", counts.shares(), sep="\n")
    assert numbers["right"] == numbers["wrong"] == number
    assert counts["items"] == 2 * number + 4
    assert counts["asked"] == 2 * number + 6 == sum(outcomes.values())  # pairs are asked about twice
    assert 0 < counts["completion_tokens"] <= 96 * (counts["asked"] + counts["asked_again"])
    assert counts["prompt_tokens"] > 100 * counts["asked"]


def test_in_process() -> None:
    settings = JudgeSettings(kind="local", path=SMOLLM, device="cpu", batch_size=8, max_tokens=96, compare_votes=2)
    judge_all(make_judge(settings), number=4)


@needs_vllm
def test_behind_a_vllm_server(tmp_path: Any) -> None:
    with served(str(SMOLLM), tmp_path / "log", "--max-model-len", "2048", "--served-model-name", "judge") as (url, _):
        settings = {"max_tokens": 96, "compare_votes": 2, "backoff_s": 2.0, "away_max_s": 240}
        judge = make_judge(JudgeSettings(kind="openai", base_url=f"{url}/v1", model="judge", **settings))
        judge_all(judge, number=10)  # asked at once: until the server listens it is away
        counts = judge.counts
        assert counts["fault/unreachable"] > 0 and counts["answered"] >= 26
        assert counts["requests"] == counts["asked"] + counts["asked_again"] + counts["retries"] + counts["probes"]
        # Longer than the model's 2048 tokens: this claim alone is undecided.
        claims = [Claim("What is 1 + 1?", "2", "2 " * 4000), Claim("What is 1 + 1?", "2", "2")]
        assert judge.correct_all(claims)[0] == "undecided"
        assert counts["outcome/refused"] == 1 and counts["fault/refused"] == 1
        # Held to the shape that is asked for, even this model decides almost everything.
        shape = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SHAPE}}
        judge = make_judge(
            JudgeSettings(
                kind="openai", base_url=f"{url}/v1", model="judge", **settings, request={"response_format": shape}
            )
        )
        numbers = calibrate(judge, items(10), 0.0, size=20)
        print("with a schema", numbers, judge.counts.to_dict(), sep="\n")
        assert numbers["undecided_share"] < 0.5
