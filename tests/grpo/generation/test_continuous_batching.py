"""transformers' continuous batching for real, on a CPU, and the choice of a sampler on a GPU by a switch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from grpo.config.common import Hardware, Sampling
from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.generation import engine_choice as choice
from grpo.generation import engines
from grpo.generation.continuous_batching import sample_continuously
from grpo.generation.engine_choice import Needs, choose_sampler
from grpo.generation.engines import ContinuousBatching
from grpo.generation.text_engines import Prompting, make_text_engine
from grpo.model.loading import load_policy
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.attention import NAME
from tests.support.parallel_jobs import Team
from tests.support.sampling_jobs import refusing, sampled_continuously

PROMPTS = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8, 9, 10, 11]]
SETTINGS = Sampling(max_new_tokens=8, temperature=1.3)
OPTIONS: dict[str, Any] = dict(eos_id=1, seeds=[1, 2, 3])


class Models:
    """A policy, as an engine reads it."""

    sampler_version, sampler_is_exact, packed = 0, True, True

    def __init__(self, policy: Any):
        self.policy, self.gathered = policy, 0

    @contextmanager
    def sampler(self) -> Iterator[Any]:
        self.gathered += 1
        yield self.policy

    def sampler_weights(self, *, as_in_files: bool = False) -> Any:
        return []


def test_completions_have_the_policys_logprobs(model_folder: str) -> None:
    policy = load_policy(model_folder, Hardware(device="cpu"))
    before = torch.get_rng_state()
    groups = dict(sample_continuously(policy, PROMPTS, 3, SETTINGS, **OPTIONS))
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(groups) == [0, 1, 2] and {len(group) for group in groups.values()} == {3}
    assert policy.config._attn_implementation == NAME
    for number, group in groups.items():
        assert len({tuple(c.tokens) for c in group}) > 1  # forks draw tokens of their own
        for c in group:
            assert c.finished == (c.tokens[-1] == 1) and (c.finished or len(c.tokens) == 8)
            with torch.no_grad():
                expected = completion_logprobs(policy, [PROMPTS[number]], [c.tokens], 1.3)[0]
            torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)


def test_top_p_would_change_the_logprobs(model_folder: str) -> None:
    policy = load_policy(model_folder, Hardware(device="cpu"))
    with pytest.raises(InputError, match="sampling.top_p is 0.9"):
        next(sample_continuously(policy, PROMPTS, 3, SETTINGS.model_copy(update={"top_p": 0.9}), **OPTIONS))


def test_a_model_that_is_refused_is_sampled_by_our_own(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engines, "sample_continuously", refusing)
    models = Models(load_policy(model_folder, Hardware(device="cpu")))
    engine = ContinuousBatching(models, 1)
    assert len(dict(engine.sample(PROMPTS, 2, SETTINGS, [1, 2, 3]))) == 3
    assert models.gathered == 1
    assert engine.name == "own" and not engine.exact
    assert "refuses this model (no such cache)" in caplog.text


def test_no_prompts_need_no_other_sampler(model_folder: str) -> None:
    """A process without prompts gathers the weights with the others, once."""
    models = Models(load_policy(model_folder, Hardware(device="cpu")))
    engine = ContinuousBatching(models, 1)
    assert [*engine.sample([], 2, SETTINGS, [])] == []
    assert (engine.name, models.gathered) == ("continuous", 1)


@pytest.mark.system
@pytest.mark.parametrize(
    ("shares", "refused", "names"),
    [
        ([PROMPTS, []], None, ["continuous", "continuous"]),
        ([PROMPTS[:2], PROMPTS[2:]], 1, ["continuous", "own"]),
    ],
    ids=["one has no prompts", "one is refused"],
)
def test_processes_that_sample_differently_do_not_wait_for_each_other(
    model_folder: str, shares: list[list[list[int]]], refused: int | None, names: list[str]
) -> None:
    team = Team(2)
    try:
        found = team(sampled_continuously, model_folder, shares, refused)
    finally:
        team.dismiss()
    assert [process["completed"] for process in found] == [[[*range(len(share))] for share in shares]] * 2
    assert [process["name"] for process in found] == names


@pytest.mark.parametrize(
    ("vllm", "needs", "expected"),
    [
        (True, Needs(SETTINGS), "vllm"),
        (False, Needs(SETTINGS), "own"),
        (True, Needs(SETTINGS, ahead=True), "own"),
        (True, Needs(SETTINGS.model_copy(update={"top_p": 0.9})), "own"),
        (False, Needs(), "own"),
        (True, Needs(others=[SETTINGS.model_copy(update={"top_p": 0.9})]), "vllm"),
        (True, Needs(others=[SETTINGS, SETTINGS.model_copy(update={"temperature": 0.001})]), "own"),
    ],
)
def test_the_choice_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, vllm: bool, needs: Needs, expected: str
) -> None:
    monkeypatch.setattr(choice, "has_vllm", lambda: vllm)
    assert choose_sampler(Hardware(device="cuda"), needs).name == expected
    assert caplog.text.count("samples with") == 1 and f"samples with {expected}: " in caplog.text
    assert choose_sampler(Hardware(device="cpu"), needs).name == "own"
    assert choose_sampler(Hardware(device="cuda", sampler="own"), needs).name == "own"
    assert choose_sampler(Hardware(device="cpu", sampler="continuous"), needs).name == "continuous"


def test_a_forced_sampler_is_no_part_of_a_record_by_default() -> None:
    assert "sampler" not in Hardware().model_dump()
    assert Hardware(sampler="own").model_dump()["sampler"] == "own"


def test_text_is_written_with_it(model_folder: str) -> None:
    prompting = Prompting("chat", None)
    engine = make_text_engine(None, model_folder, prompting, Hardware(device="cpu", sampler="continuous"))
    problem = Problem("p", [{"role": "user", "content": "hello"}], "", "none", "reasoning", "en", "test")
    ((index, written),) = engine.write([problem], 2, SETTINGS.model_copy(update={"top_p": 0.9}), [7])
    assert engine.identity.endswith("generate_batch")
    assert index == 0 and [0 < c.tokens <= 8 for c in written.texts] == [True, True]


def test_completions_do_not_depend_on_how_fast_prompts_are_handed_over(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal calls schedule alike, so that a job that was killed and goes on samples what it would have sampled."""
    policy = load_policy(model_folder, Hardware(device="cpu"))
    prompts = [[5 + i, 6, 7, *[8] * i] for i in range(4)]

    def completions() -> list[list[list[int]]]:
        groups = dict(sample_continuously(policy, prompts, 3, SETTINGS, eos_id=1, seeds=[1, 2, 3, 4]))
        return [[completion.tokens for completion in groups[i]] for i in range(4)]

    expected = completions()
    add = ContinuousBatchingManager.add_request

    def slowly(self: Any, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return add(self, *arguments, **options)

    monkeypatch.setattr(ContinuousBatchingManager, "add_request", slowly)
    assert completions() == expected
