"""What the endpoint engine takes from a reply: whether the completion ended by itself, its lengths, and its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo.config.common import Sampling
from grpo.config.engines import Endpoint
from grpo.data.completions import TextCompletion, TextCompletions
from grpo.data.records import Problem
from grpo.errors import InputError, TrainingStopped
from grpo.generation.endpoint import EndpointEngine
from grpo.sampling.journal import Journal
from tests.support import faulty_endpoint
from tests.support.faulty_endpoint import FaultyEndpoint

USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Asks a service that sends these replies, the last one again and again, for one completion."""
    engines: list[EndpointEngine] = []
    services: list[FaultyEndpoint] = []

    def ask(*replies: dict[str, Any], retries: int = 1) -> tuple[TextCompletions, FaultyEndpoint]:
        for number, reply in enumerate(replies):
            monkeypatch.setitem(faulty_endpoint.FAULTS, f"reply {number}", faulty_endpoint.body(json.dumps(reply)))
        services.append(FaultyEndpoint(lambda number, _: f"reply {min(number, len(replies) - 1)}"))
        settings = Endpoint(kind="endpoint", base_url=services[0].url, model="m", retries=retries)
        engines.append(EndpointEngine(settings, "chat", None))
        problem = Problem("p", [{"role": "user", "content": "1 + 2?"}], "3", "number", "reasoning", "en", "sums")
        ((_, written),) = engines[0].write([problem], 1, Sampling(max_new_tokens=9), [5])
        return written, services[0]

    yield ask
    for closed in (*engines, *services):
        closed.close()


def reply(reason: str | None, text: str = "3", usage: Any = USAGE) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}, "finish_reason": reason}], "usage": usage}


@pytest.mark.parametrize(
    ("reason", "finished"),
    [
        *((reason, True) for reason in ("stop", "eos", "eos_token", "end_turn", "stop_sequence")),
        *((reason, False) for reason in ("length", "max_tokens", "content_filter", "tool_calls")),
    ],
)
def test_a_completion_ended_by_itself_or_was_cut_off(answers: Any, reason: str, finished: bool) -> None:
    written, service = answers(reply(reason))
    assert written == TextCompletions([TextCompletion("3", 3, finished)], 7) and len(service.bodies) == 1


@pytest.mark.parametrize("reason", ["insufficient_system_resource", "abort", "error", None])
def test_what_was_broken_off_is_asked_for_again(answers: Any, reason: str | None) -> None:
    written, service = answers(reply(reason, "I th"), reply("stop"))
    assert written == TextCompletions([TextCompletion("3", 3, True)], 7)
    assert [body["seed"] for body in service.bodies] == [5, 5]


def test_a_service_that_breaks_everything_off_stops_the_run(answers: Any) -> None:
    with pytest.raises(TrainingStopped, match=r"failed 2 times; the last: .* off \(finish_reason 'abort'\)$"):
        answers(reply("abort"))


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 7}, {"completion_tokens": 3}])
def test_a_service_must_count_tokens(answers: Any, usage: Any) -> None:
    """Without counts, every completion would be short enough for the filters."""
    with pytest.raises(InputError, match=r"without usage\.prompt_tokens and completion_tokens, which length") as raised:
        answers(reply("stop", usage=usage))
    assert "\n" not in str(raised.value)


def test_half_a_surrogate_pair_is_replaced(answers: Any, tmp_path: Path) -> None:
    written, _ = answers(reply("stop", "a\ud83d b \ud83d\ude00"))
    assert written.texts[0].text == "a? b \U0001f600"
    journal = Journal(tmp_path / "shard.journal")
    journal.append([written.texts[0].text])
    assert journal.lines() == [["a? b \U0001f600"]]
    journal.close()
