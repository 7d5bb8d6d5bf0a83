"""A judge at an endpoint that goes away in the middle of a stage: it waits, and fails when that takes too long."""

from __future__ import annotations

import json
import re
import shutil
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tasks.store.store import Store
from tests.support.faulty_endpoint import FaultyEndpoint
from tests.support.r1 import SMALLER

pytestmark = pytest.mark.system

BEFORE = 25
"""Requests that are answered before the endpoint goes away; the stage has some 120."""


class Judge:
    """Prefers the longer response, labels one prompt in two safe, and goes away once, for so many seconds."""

    def __init__(self, away_s: float):
        self.away_s = away_s
        self.left_at: float | None = None

    def __call__(self, number: int, body: dict[str, Any]) -> str:
        if number >= BEFORE:
            self.left_at = self.left_at or time.monotonic()
            if time.monotonic() - self.left_at < self.away_s:
                return "500"
        asked = body["messages"][0]["content"]
        if "Reply with one word" in asked:
            return "Yes."
        if "<response_a>" not in asked:
            return json.dumps({"analysis": "It is.", "safety": "safe" if len(asked) % 2 else "unsafe"})
        a, b = (re.search(f"<response_{name}>(.*?)</response_{name}>", asked, re.S) for name in "ab")
        assert a and b
        return json.dumps({"analysis": "Longer.", "verdict": "A>>B" if len(a[1]) > len(b[1]) else "B>>A"})


@pytest.fixture
def home(tmp_path: Path, r1: Any, first_run: dict[str, Any]) -> Path:
    """One with the stages before the reward models, of the session's first run."""
    for stage in ("problems", "sft"):
        shutil.copytree(r1.home / "artifacts" / stage, tmp_path / "artifacts" / stage)
    return tmp_path


def reward_models(r1: Any, endpoint: FaultyEndpoint, away_max_s: float) -> Any:
    judge = f'{{kind="openai",base_url="{endpoint.url}",model="m",backoff_s=0.05,away_max_s={away_max_s}}}'
    own = [f"reward_models.judge={judge}", "reward_models.prompts=20", "reward_models.responses_per_prompt=3"]
    sets = [part for value in [*SMALLER, *own] for part in ("--set", value)]
    return r1("run", "tiny", "--only", "reward_models", *sets, "--json")


def test_it_waits_and_nothing_is_scored_for_a_call_that_failed(home: Path, r1: Any) -> None:
    with closing(FaultyEndpoint(Judge(away_s=3))) as endpoint:
        done = reward_models(type(r1)(home), endpoint, away_max_s=60)
    assert done.returncode == 0, done.stderr[-3000:]
    assert endpoint.served["500"] > 2
    made = Store(home).resolve("latest:reward_models")
    assert made.metrics["judge_undecided_share"] == 0
    assert made.counts["labels_safe"] + made.counts["labels_unsafe"] == 60  # 20 prompts, 3 responses
    assert made.counts["labels_undecided"] == made.counts.get("pairs_undecided", 0) == 0


@pytest.mark.slow
def test_it_fails_with_the_reason_and_goes_on_when_the_judge_is_back(home: Path, r1: Any) -> None:
    judge, command = Judge(away_s=3600), type(r1)(home)
    with closing(FaultyEndpoint(judge)) as endpoint:
        failed = reward_models(command, endpoint, away_max_s=1)
        assert failed.returncode == 1
        (said,) = [line for line in failed.stderr.splitlines() if line.startswith("failed: ")]
        assert endpoint.url in said and re.search(r"has answered nothing for \d+ s", said) and "status 500" in said
        assert not [*home.glob("artifacts/reward_models/*/*/manifest.json")]
        judge.away_s = 0
        done = reward_models(command, endpoint, away_max_s=1)
    assert done.returncode == 0, done.stderr[-3000:]
    assert Store(home).resolve("latest:reward_models").metrics["judge_undecided_share"] == 0
