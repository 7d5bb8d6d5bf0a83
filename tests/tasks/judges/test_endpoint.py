"""A judge at an endpoint that answers, fails in every way, or is away: real sockets, and everything is counted."""

from __future__ import annotations

import json
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from grpo.config.judge import JudgeSettings
from grpo.data.records import Problem
from grpo.errors import InputError
from tasks.judges.base import Claim, Pair, Response
from tasks.judges.model_judge import ModelJudge
from tests.support.faulty_endpoint import KINDS, FaultyEndpoint

GREETING = Problem("p", [{"role": "user", "content": "Say hello."}], "", "none", "general", "en", "test")
Start = Callable[..., FaultyEndpoint]


def says(word: str, key: str = "correctness") -> str:
    return json.dumps({"analysis": "It is.", key: word})


def prompt_of(body: dict[str, Any]) -> str:
    return body["messages"][0]["content"]


def is_probe(body: dict[str, Any]) -> bool:
    return "Reply with one word" in prompt_of(body)


def right(_: int, body: dict[str, Any]) -> str:
    """A judge that knows: an answer is right if it says so."""
    return "Yes." if is_probe(body) else says("correct" if "right one" in prompt_of(body) else "incorrect")


def in_turn(*acts: str | None) -> Callable[[int, dict[str, Any]], str | None]:
    """Replies with one act per request, in this order; the last one repeats."""
    return lambda number, _: acts[min(number, len(acts) - 1)]


@pytest.fixture
def start() -> Iterator[Start]:
    running = []

    def make(plan: Any) -> FaultyEndpoint:
        running.append(FaultyEndpoint(plan if callable(plan) else in_turn(*plan)))
        return running[-1]

    yield make
    for endpoint in running:
        endpoint.close()


def judge_at(endpoint: FaultyEndpoint, **settings: Any) -> ModelJudge:
    settings = {"backoff_s": 0.01, "retries": 3, "timeout_s": 5, "ask_again": False, **settings}
    return ModelJudge(JudgeSettings(kind="openai", base_url=endpoint.url, model="m", **settings))


def faults(judge: ModelJudge) -> dict[str, float]:
    return {name.removeprefix("fault/"): n for name, n in judge.counts.to_dict().items() if name.startswith("fault/")}


def outcomes(judge: ModelJudge) -> dict[str, float]:
    counts = judge.counts.to_dict()
    return {name.removeprefix("outcome/"): n for name, n in counts.items() if name.startswith("outcome/")}


def assert_counts_add_up(judge: ModelJudge, endpoint: FaultyEndpoint) -> None:
    counts = judge.counts
    assert counts["asked"] == sum(outcomes(judge).values())
    assert counts["requests"] == counts["answered"] + sum(faults(judge).values())
    assert counts["requests"] == counts["asked"] + counts["asked_again"] + counts["retries"] + counts["probes"]
    assert counts["requests"] == len(endpoint.bodies)
    assert counts["prompt_tokens"] == 7 * counts["answered"] and counts["completion_tokens"] == 3 * counts["answered"]


def test_what_is_asked_and_answered(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    replies = [says("correct"), says("incorrect"), says("B>A", "verdict"), says("unsafe", "safety")]
    endpoint = start([*replies, says("good", "quality"), says("poor", "quality")])
    judge = judge_at(endpoint, api_key_env="JUDGE_KEY", concurrency=1)
    assert judge.correct("1+1?", "2", "two") == "correct"
    assert judge.correct("1+1?", "2", "3") == "incorrect"
    assert judge.compare(GREETING, "hello", "hi") == -1.0
    assert judge.safe(GREETING, "hello") is False
    assert judge.good_all([Response(GREETING, "hello"), Response(GREETING, "hi")]) == [True, False]
    assert endpoint.keys == ["Bearer secret"] * 6
    assert endpoint.bodies[0].keys() == {"model", "messages", "temperature", "max_tokens"}
    assert "<answer_to_check>\ntwo\n</answer_to_check>" in prompt_of(endpoint.bodies[0])
    assert "<reference_answer>\n(none)\n</reference_answer>" in prompt_of(endpoint.bodies[4])
    assert outcomes(judge) == {"decided": 6} and judge.counts["items"] == 6
    assert_counts_add_up(judge, endpoint)


def test_all_messages_of_a_prompt_are_shown(start: Start) -> None:
    texts = {"system": "Only in French.", "user": "Hi", "assistant": "Salut"}
    turns = [{"role": role, "content": text} for role, text in texts.items()]
    talk = replace(GREETING, messages=[*turns, {"role": "user", "content": "Say hello."}])
    replies = [says("A>B", "verdict"), says("safe", "safety"), says("good", "quality"), says("refused", "refusal")]
    endpoint = start([*replies, says("A>B", "verdict")])
    judge = judge_at(endpoint, concurrency=1)
    assert (
        judge.compare(talk, "hello", "bonjour") == 1.0 and judge.safe(talk, "bonjour") and judge.good(talk, "bonjour")
    )
    assert judge.refused_all([Response(talk, "non")]) == [True]
    shown = [prompt_of(body).split("<prompt>\n")[1].split("\n</prompt>")[0] for body in endpoint.bodies]
    assert shown == ["[system]\nOnly in French.\n\n[user]\nHi\n\n[assistant]\nSalut\n\n[user]\nSay hello."] * 4
    judge.compare(GREETING, "hello", "bonjour")
    assert "<prompt>\nSay hello.\n</prompt>" in prompt_of(endpoint.bodies[4])


def test_more_fields_of_a_request(start: Start) -> None:
    endpoint = start(right)
    judge = judge_at(endpoint, request={"response_format": {"type": "json_object"}, "max_tokens": None})
    assert judge.correct("1+1?", "2", "right one") == "correct"
    assert endpoint.bodies[0]["response_format"] == {"type": "json_object"} and "max_tokens" not in endpoint.bodies[0]


# --- one fault at a time


@pytest.mark.parametrize("fault", [fault for fault in KINDS if fault != "400"])
def test_passing_faults_are_repeated_and_counted(start: Start, fault: str) -> None:
    endpoint = start([fault, fault, says("correct")])
    judge = judge_at(endpoint, timeout_s=0.5 if KINDS[fault] == "timeout" else 5)
    assert judge.correct("1+1?", "2", "2") == "correct"
    assert faults(judge) == {KINDS[fault]: 2} and judge.counts["retries"] == 2
    assert_counts_add_up(judge, endpoint)


@pytest.mark.parametrize("fault", ["hang", "drip", "drip of headers"])
def test_a_deadline_holds_for_the_whole_request(start: Start, fault: str) -> None:
    endpoint = start([fault, says("correct")])
    began = time.monotonic()
    assert judge_at(endpoint, timeout_s=0.5).correct("1+1?", "2", "2") == "correct"
    assert 0.5 < time.monotonic() - began < 4


def test_all_wait_as_long_as_the_endpoint_asks(start: Start) -> None:
    endpoint = start(["429 wait", says("correct")])
    judge = judge_at(endpoint, concurrency=1)
    assert judge.correct_all([Claim("?", "1", "1")] * 2) == ["correct"] * 2
    first, second, _ = endpoint.times
    assert second - first >= 0.2


def test_being_too_busy_is_no_failure(start: Start) -> None:
    endpoint = start([*["429", "503"] * 4, says("correct")])
    judge = judge_at(endpoint, retries=0)
    assert judge.correct("1+1?", "2", "2") == "correct"
    assert faults(judge) == {"429": 4, "503": 4} and judge.counts["probes"] == 0


@pytest.mark.parametrize(
    ("content", "outcome"),
    [
        (says("correct")[:20], "no_json"),
        (says("maybe"), "wrong_verdict"),
        ("It is correct.", "no_json"),
        ('{"correctness": "correct"}', "wrong_keys"),
        ("", "empty"),
        (None, "empty"),
        ("cut reply", "too_long"),
    ],
)
def test_unreadable_verdicts_are_undecided(start: Start, content: str | None, outcome: str) -> None:
    endpoint = start([content])
    judge = judge_at(endpoint)
    assert judge.correct("1+1?", "2", "2") == "undecided"
    assert outcomes(judge) == {outcome: 1} and judge.counts["items/undecided"] == 1
    assert_counts_add_up(judge, endpoint)


# --- the repair


def test_the_model_may_correct_its_reply_once(start: Start) -> None:
    endpoint = start(["It is correct.", says("correct")])
    judge = judge_at(endpoint, ask_again=True)
    assert judge.correct("1+1?", "2", "2") == "correct"
    assert outcomes(judge) == {"asked_again": 1} and judge.counts["asked_again"] == 1
    assert [m["role"] for m in endpoint.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert endpoint.bodies[1]["messages"][1]["content"] == "It is correct."
    assert_counts_add_up(judge, endpoint)


def test_what_is_broken_twice_is_undecided(start: Start) -> None:
    endpoint = start(["It is correct.", "Yes, correct.", says("correct")])
    judge = judge_at(endpoint, ask_again=True)
    assert judge.correct("1+1?", "2", "2") == "undecided"
    assert len(endpoint.bodies) == 2 and outcomes(judge) == {"no_json": 1}
    assert_counts_add_up(judge, endpoint)


def test_an_object_inside_other_text_needs_no_second_question(start: Start) -> None:
    endpoint = start([f"```json\n{says('correct')}\n```"])
    judge = judge_at(endpoint, ask_again=True)
    assert judge.correct("1+1?", "2", "2") == "correct"
    assert len(endpoint.bodies) == 1 and outcomes(judge) == {"in_text": 1}


# --- votes


@pytest.mark.parametrize(
    ("votes", "verdict", "asked"),
    [
        ("cc", "correct", 2),  # the third could change nothing
        ("ii", "incorrect", 2),
        ("cic", "correct", 3),
        ("ici", "incorrect", 3),
        ("ciu", "undecided", 3),
        ("cuc", "correct", 3),
        ("uu", "undecided", 2),
    ],
)
def test_the_majority_of_three_decides(start: Start, votes: str, verdict: str, asked: int) -> None:
    words = {"c": says("correct"), "i": says("incorrect"), "u": "Who knows?"}
    endpoint = start([words[vote] for vote in votes])
    judge = judge_at(endpoint, votes=3, temperature=0.7, concurrency=1)
    assert judge.correct("1+1?", "2", "2") == verdict
    assert len(endpoint.bodies) == judge.counts["asked"] == asked and judge.counts["items"] == 1
    assert judge.counts["items/undecided"] == (verdict == "undecided")
    assert judge.counts["items/no_majority"] == (votes == "ciu")


def test_votes_have_different_seeds_and_the_same_in_each_run(start: Start) -> None:
    endpoint = start(right)
    for _ in range(2):
        judge_at(endpoint, votes=5, temperature=0.7, seed=4, concurrency=1).correct("1+1?", "2", "right one")
    seeds = [body["seed"] for body in endpoint.bodies]
    assert len(set(seeds[:3])) == 3 and seeds[3:] == seeds[:3]


def test_equal_claims_have_votes_of_their_own(start: Start) -> None:
    """Two rounds: the second vote of each claim is wrong, so a third is needed."""
    said = {}

    def plan(_: int, body: dict[str, Any]) -> str:
        number = said.setdefault(body["seed"], len(said))
        return says("incorrect" if number in (1, 3) else "correct")

    endpoint = start(plan)
    judge = judge_at(endpoint, votes=3, temperature=0.7, seed=4, concurrency=1)
    assert judge.correct_all([Claim("?", "1", "1")] * 2) == ["correct"] * 2
    seeds = [body["seed"] for body in endpoint.bodies]
    assert len(seeds) == len(set(seeds)) == 6
    # The first claim's are those that it has alone.
    assert judge.correct_all([Claim("?", "1", "1")]) == ["correct"]
    assert [body["seed"] for body in endpoint.bodies[6:]] == [seeds[0], seeds[1], seeds[4]]


def test_single_votes_of_equal_claims_are_draws_in_order(start: Start) -> None:
    endpoint = start(right)
    claim = Claim("?", "1", "right one")
    judge_at(endpoint, temperature=0.7, seed=4, concurrency=1).correct_all([claim] * 3)
    dialogue = endpoint.bodies[0]["messages"]
    seeds = [zlib.crc32(json.dumps([4, draw, dialogue]).encode()) % 2**31 for draw in (0, 1, 2)]
    assert [body["seed"] for body in endpoint.bodies] == seeds


def first_wins(_: int, body: dict[str, Any]) -> str:
    return says("A>B", "verdict")


def longer_wins(_: int, body: dict[str, Any]) -> str:
    a, b = (prompt_of(body).split(f"<response_{x}>\n")[1].split(f"\n</response_{x}>")[0] for x in "ab")
    return says("A>>B" if len(a) > len(b) else "B>>A", "verdict")


PAIRS = [Pair(GREETING, "long", "s"), Pair(GREETING, "s", "long"), Pair(GREETING, "s", "longer")]


def test_pairs_are_compared_in_both_orders(start: Start) -> None:
    endpoint = start(longer_wins)
    judge = judge_at(endpoint, compare_votes=4, temperature=0.7)
    assert judge.compare_all(PAIRS) == [2.0, -2.0, -2.0]
    assert len(endpoint.bodies) == 12 and judge.counts["items"] == 3
    assert judge.counts.shares() == {
        "undecided_share": 0.0,
        "repaired_share": 0.0,
        "position_bias": 0.0,
        "first_share": 0.5,
    }


def test_a_judge_that_likes_the_first_ties_and_is_found_out(start: Start) -> None:
    judge = judge_at(start(first_wins), compare_votes=2)
    assert judge.compare_all(PAIRS) == [0.0, 0.0, 0.0]
    assert judge.counts.shares()["position_bias"] == judge.counts.shares()["first_share"] == 1.0


def test_a_pair_with_an_undecided_vote_is_undecided(start: Start) -> None:
    judge = judge_at(start([says("A>B", "verdict"), "Hm.", says("A=B", "verdict")]), compare_votes=2, concurrency=1)
    assert judge.compare_all(PAIRS[:2]) == [None, 0.0]
    assert judge.counts["both_orders"] == 1 and judge.counts["flipped"] == 0


# --- whose fault it is


def test_a_prompt_that_always_fails_is_undecided_and_the_others_are_judged(start: Start) -> None:
    endpoint = start(lambda n, body: "500" if "poison" in prompt_of(body) else right(n, body))
    judge = judge_at(endpoint, concurrency=2)
    claims = [Claim("?", "1", text) for text in ("right one", "poison", "other", "right one")]
    assert judge.correct_all(claims) == ["correct", "undecided", "incorrect", "correct"]
    # A failure more where the others' answers came too early to tell.
    assert faults(judge) == {"500": 4 + judge.counts["probes"]} and outcomes(judge) == {"decided": 3, "no_reply": 1}
    assert_counts_add_up(judge, endpoint)


def test_a_prompt_that_always_fails_alone_is_found_by_a_probe(start: Start) -> None:
    endpoint = start(lambda n, body: "500" if "poison" in prompt_of(body) else right(n, body))
    judge = judge_at(endpoint)
    assert judge.correct("?", "1", "poison") == "undecided"
    assert judge.counts["probes"] == 1 and outcomes(judge) == {"no_reply": 1}
    assert_counts_add_up(judge, endpoint)


@pytest.mark.parametrize("fault", ["400", "403"])  # 403: gateways that moderate
def test_a_prompt_that_is_refused_is_undecided_and_the_others_are_judged(start: Start, fault: str) -> None:
    endpoint = start(lambda n, body: fault if "x" * 1000 in prompt_of(body) else right(n, body))
    judge = judge_at(endpoint, concurrency=1)
    claims = [Claim("?", "1", text) for text in ("x" * 1000, "right one", "x" * 2000)]
    assert judge.correct_all(claims) == ["undecided", "correct", "undecided"]
    assert outcomes(judge) == {"decided": 1, "refused": 2} and faults(judge) == {"refused": 2}
    assert judge.counts["retries"] == 0
    assert_counts_add_up(judge, endpoint)


@pytest.mark.parametrize("fault", ["400", "401", "403", "404"])
def test_an_endpoint_that_refuses_everything_is_an_error_at_once(start: Start, fault: str) -> None:
    endpoint = start([fault])
    with pytest.raises(InputError, match=rf"refused with status {fault}: out of order; check base_url, model, api_key"):
        judge_at(endpoint, concurrency=2).correct_all([Claim("?", "1", str(i)) for i in range(200)])
    assert len(endpoint.bodies) < 100  # it would be 200 or more


@pytest.mark.parametrize("fault", ["html", "no choices", "list", "error in 200"])
def test_what_is_no_such_endpoint_is_named(start: Start, fault: str) -> None:
    with pytest.raises(InputError, match="is base_url OpenAI-compatible"):
        judge_at(start([fault]), retries=1).correct("1+1?", "2", "2")


def test_an_endpoint_that_comes_back_in_time_has_judged_everything(start: Start) -> None:
    began = time.monotonic()
    endpoint = start(lambda n, body: "500" if time.monotonic() - began < 1.0 else right(n, body))
    judge = judge_at(endpoint, retries=1, away_max_s=60)
    assert judge.correct_all([Claim("?", "1", "right one")] * 20) == ["correct"] * 20
    assert outcomes(judge) == {"decided": 20} and faults(judge)["500"] > 40
    assert_counts_add_up(judge, endpoint)


def test_a_request_is_not_blamed_for_failing_while_others_were_answered_once(start: Start) -> None:
    """The endpoint may have come back only after it was sent."""
    early = iter(["hang"])
    endpoint = start(lambda n, body: ("early" in prompt_of(body) and next(early, None)) or right(n, body))
    judge = judge_at(endpoint, retries=0, timeout_s=1)
    assert judge.correct_all([Claim("?", "1", f"{when} right one") for when in ("early", "late")]) == ["correct"] * 2
    assert faults(judge) == {"timeout": 1}
    assert_counts_add_up(judge, endpoint)


def test_a_request_is_not_blamed_that_failed_as_the_endpoint_went_away(start: Start) -> None:
    """The other one, sent at the same time, was still answered; then nobody is, for longer than there are retries."""
    began = time.monotonic()

    def plan(number: int, body: dict[str, Any]) -> str:
        if number == 1:
            time.sleep(0.02)
            return right(number, body)
        return "500" if number == 0 or time.monotonic() - began < 3 else right(number, body)

    judge = judge_at(start(plan), retries=2, backoff_s=0.5, concurrency=2, away_max_s=60)
    assert judge.correct_all([Claim("?", "1", "right one")] * 2) == ["correct"] * 2


@pytest.mark.parametrize(("fault", "named"), [("500", "status 500"), ("hang", "timed out"), ("429", "status 429")])
def test_an_endpoint_that_stays_away_raises(start: Start, fault: str, named: str) -> None:
    endpoint = start([fault])
    judge = judge_at(endpoint, retries=1, timeout_s=0.2 if fault == "hang" else 5, away_max_s=0.7)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=rf"has answered nothing for \d+ s, at last with: .*{named}"):
        judge.correct_all([Claim("?", "1", str(i)) for i in range(50)])
    assert 0.7 <= time.monotonic() - began < 30
    assert judge.counts["asked"] == 0  # nothing of it counts as undecided


def test_nobody_listens(start: Start) -> None:
    endpoint = start(right)
    judge = judge_at(endpoint, retries=1, away_max_s=0.3)
    endpoint.close()
    with pytest.raises(ConnectionError, match="answered nothing .*refused"):
        judge.correct("1+1?", "2", "2")
    assert set(faults(judge)) == {"unreachable"}


def test_an_endpoint_that_dies_midway_raises_and_ends_what_hangs(start: Start) -> None:
    endpoint = start(lambda n, body: right(n, body) if n < 30 else "hang" if n == 30 else "closed")
    judge = judge_at(endpoint, concurrency=8, timeout_s=30, away_max_s=1.0, retries=1)
    before, began = {*threading.enumerate()}, time.monotonic()
    with pytest.raises(ConnectionError, match="answered nothing"):
        judge.correct_all([Claim("?", "1", str(i)) for i in range(100)])
    assert time.monotonic() - began < 10  # and not the 30 s that the others would still wait
    assert not [t for t in {*threading.enumerate()} - before if t.name.startswith("ThreadPoolExecutor")]


# --- many at once


def test_batches_keep_their_order_and_the_concurrency(start: Start) -> None:
    endpoint = start(right)
    claims = [Claim("?", "1", "right one" if i % 3 else "other") for i in range(60)]
    judge = judge_at(endpoint, concurrency=3)
    assert judge.correct_all(claims) == ["correct" if i % 3 else "incorrect" for i in range(60)]
    assert endpoint.most_at_once <= 3
    assert judge.correct_all([]) == []


def test_requests_a_minute(start: Start) -> None:
    endpoint = start(right)
    judge = judge_at(endpoint, requests_per_minute=600)
    began = time.monotonic()
    for _ in range(2):  # the limit is the judge's, not the batch's
        judge.correct_all([Claim("?", "1", "1")] * 5)
    times = sorted(endpoint.times)
    assert times[-1] - began >= 9 * 0.1 - 0.01  # the first may arrive late
    assert times[-1] - times[0] < 8


REPLIES = ("It is correct.", "", None, '{"correctness": "correct"}', says("right"), "cut reply")


def test_all_faults_at_random_over_500_claims(start: Start) -> None:
    """Nothing is lost, no verdict is wrong, and both sides count the same."""
    rng, lock = random.Random(5), threading.Lock()
    quick = [fault for fault in KINDS if KINDS[fault] not in ("timeout", "refused")]
    slow = [fault for fault in KINDS if KINDS[fault] == "timeout"]

    def plan(number: int, body: dict[str, Any]) -> str | None:
        with lock:
            kind, fault = rng.random(), rng.choice(quick)
            if kind < 0.3:
                return fault
            if kind < 0.31:
                return rng.choice(slow)
            if kind < 0.41 and not is_probe(body):
                return rng.choice(REPLIES)
        return right(number, body)

    endpoint = start(plan)
    judge = judge_at(endpoint, concurrency=16, timeout_s=3, retries=5, ask_again=True)
    claims = [Claim(f"{i}?", "1", "right one" if i % 2 else "other") for i in range(500)]
    verdicts = judge.correct_all(claims)
    expected = ["correct" if i % 2 else "incorrect" for i in range(500)]
    assert len(verdicts) == 500
    assert all(verdict in (truth, "undecided") for verdict, truth in zip(verdicts, expected, strict=True))
    counts = judge.counts
    assert verdicts.count("undecided") == counts["items/undecided"] < 50
    assert counts["items"] == counts["asked"] == 500 and counts["asked_again"] > 10
    assert_counts_add_up(judge, endpoint)
    served: dict[str, float] = {}
    for fault, n in endpoint.served.items():
        if fault in KINDS:
            served[KINDS[fault]] = served.get(KINDS[fault], 0) + n
    assert faults(judge) == served and set(served) == set(KINDS.values()) - {"refused"}


def test_missing_key_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(InputError, match="environment variable JUDGE_KEY is not set"):
        judge_at(start(right), api_key_env="JUDGE_KEY")
