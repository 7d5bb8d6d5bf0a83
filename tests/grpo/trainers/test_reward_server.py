"""The server that gives an engine elsewhere this library's rewards. No engine is needed to ask it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo.config.jobs import RLJob
from grpo.data.records import Problem
from grpo.data.template import completion_tokens, prompt_tokens
from grpo.errors import TrainingStopped
from grpo.scoring.scorer import Scorer
from grpo.trainers.verl.protocol import TOKEN_HEADER
from grpo.trainers.verl.rewards import LOCAL, RewardServer, Row
from tests.support.job_runner import RL, user

RIGHT, WRONG = "<think>add</think><answer>3</answer>", "<think>add</think><answer>4</answer>"
LONGEST = 24


@pytest.fixture
def asked(tokenizer, tmp_path):
    """A server for two problems, and a function that asks it: (row, completion) -> reward."""
    servers = []

    def started(rewards: dict, prompts: int, group_size: int):
        names = {name: {"weight": weight} for name, weight in rewards.items()}
        size = {"prompts_per_step": prompts, "group_size": group_size}
        places = {name: tmp_path / name for name in ("out", "state", "metrics", "result")}
        job = RLJob(
            settings={**RL, "rewards": names, "minibatches": 1, **size},
            model="m",
            problems=[tmp_path],
            seed=0,
            **places,
        )
        problems = [Problem(f"p{i}", user(f"1 + {i}?"), "3", "number", "reasoning", "en", "t") for i in (2, 3)]
        rows = [Row(problem, prompt_tokens(tokenizer, problem.messages, "chat"), LONGEST) for problem in problems]
        scorer = Scorer({name: {} for name in rewards}, job.settings.scoring)
        address = tmp_path / "rewards.json"
        server = RewardServer(job, tokenizer, scorer, rows, address, LOCAL)
        servers.append((server, scorer))

        def ask(row: int, said: str | list[int], token: str | None = None) -> float:
            place = json.loads(address.read_text())
            tokens = completion_tokens(tokenizer, said) if isinstance(said, str) else said
            sent = {"row": row, "tokens": tokens, "logprobs": []}
            headers = {TOKEN_HEADER: token or place["token"], "Content-Type": "application/json"}
            request = urllib.request.Request(place["url"], json.dumps(sent).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)["reward"]

        return server, ask, address

    yield started
    for server, scorer in servers:
        server.close()
        scorer.close()


def test_rewards_are_the_weighted_sum_and_are_kept_by_row(asked):
    server, ask, _ = asked({"accuracy": 2.0, "format": 0.5}, prompts=2, group_size=2)
    with ThreadPoolExecutor() as threads:
        told = [*threads.map(ask, [0, 1, 1, 0], [RIGHT, WRONG, RIGHT, "no answer"])]
    assert told == [2.5, 0.5, 2.5, 0.0]
    groups, failures = server.take(0)
    assert [group.problem.id for group in groups] == ["p2", "p3"]
    assert sorted(groups[0].rewards.tolist()) == [0.0, 2.5] and sorted(groups[1].rewards.tolist()) == [0.5, 2.5]
    assert {response.text for response in groups[0].responses} == {RIGHT, "no answer"}
    assert all(completion.finished for group in groups for completion in group.completions)
    assert failures.completions == 4 and not failures.kinds


def test_a_completion_that_does_not_end_with_the_end_token_is_truncated(asked, tokenizer):
    server, ask, address = asked({"accuracy": 1.0}, prompts=1, group_size=4)
    assert json.loads(address.read_text())["end"] == tokenizer.eos_token_id
    cut = completion_tokens(tokenizer, "a b " * LONGEST)[:LONGEST]
    for tokens in (cut, cut[:-1], [*cut[:-1], tokenizer.eos_token_id], [*cut[:3], tokenizer.eos_token_id]):
        ask(0, tokens)
    (group,), _ = server.take(0)
    assert [completion.finished for completion in group.completions] == [False, False, True, True]


def test_a_group_of_which_completions_are_missing_is_not_trained_on_in_silence(asked):
    server, ask, _ = asked({"accuracy": 1.0}, prompts=1, group_size=4)
    ask(0, RIGHT)
    with pytest.raises(TrainingStopped, match="1 of 4 completions to problem p2 were scored"):
        server.take(0)


def test_others_on_the_machine_are_not_answered(asked):
    _, ask, address = asked({"accuracy": 1.0}, prompts=1, group_size=2)
    assert address.stat().st_mode & 0o777 == 0o600
    with pytest.raises(urllib.error.HTTPError, match="403"):
        ask(0, RIGHT, token="guess")


def test_no_engine_trains_on_a_rollout_whose_rewards_failed(asked):
    server, ask, _ = asked({"tests.support.user_rewards:broken": 1.0}, prompts=1, group_size=2)
    assert ask(0, RIGHT) == 0.0
    server.check()
    with pytest.raises(urllib.error.HTTPError, match="500"):  # the last one is not answered
        ask(0, RIGHT)
    with pytest.raises(TrainingStopped, match="rewards failed for 2 of 2 completions"):
        server.check()
