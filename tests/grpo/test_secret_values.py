"""What counts as a secret in settings, and what of a message is masked."""

from __future__ import annotations

import time

import pytest

from grpo.errors import InputError
from grpo.http.client import Http, Refused
from grpo.secret_values import is_secret_name, masked, secret_in, without_user
from tests.support.faulty_endpoint import FaultyEndpoint


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"judge": {"base_url": "https://me:pw@host/v1"}}, "judge.base_url: this address"),
        ({"judge": {"base_url": "https://token@host/v1"}}, "judge.base_url: this address"),
        ({"judge": {"base_url": "https://me:p/w@host/v1"}}, "judge.base_url: this address"),
        ({"engine": {"url": "http://host/?a=1&api_key=abc"}}, "engine.url: this address"),
        ({"judge": {"request": {"api_key": "abc"}}}, "judge.request.api_key: looks like"),
        ({"judge": {"request": {"extra": [{"headers": {"X-Api-Key": 7}}]}}}, "judge.request.extra.0.headers.X-Api-Key"),
        ({"judge": {"request": {"headers": {"Cookie": ["a=b"]}}}}, "judge.request.headers.Cookie"),
        ({"description": "call it with Bearer 8f3a90b1c2"}, "description: this looks like a key"),
        ({"judge": {"api_key_env": "sk-" + "a1" * 20}}, "judge.api_key_env: this looks like a key"),
        ({"judge": {"api_key_env": "0a1b" * 8}}, "judge.api_key_env: this looks like a key, not like the name"),
        ({"sources": [{"path": "hf_" + "aB" * 17}]}, "sources.0.path: this looks like a key"),
        ({"request": {"sk-" + "a1" * 20: 1}}, "request.***: its name"),
    ],
)
def test_secrets_are_found_in_settings(settings: dict, where: str) -> None:
    said = secret_in(settings)
    assert said is not None and said.startswith(where) and "environment variable" in said


@pytest.mark.parametrize(
    "settings",
    [
        {"judge": {"base_url": "http://node7:8000/v1", "api_key_env": "JUDGE_KEY", "max_tokens": 1024}},
        {"url": "http://[::1]:8000/models/@me", "path": "/data/a@b/model", "revision": "0123456789abcdef" * 3},
        {"options": {"eos_token": "</s>", "password": "", "token": None, "use_auth": True, "key": "question"}},
        {"description": "a basic instruction of the bearer, max_tokens=5; see https://host/a:b@c"},
        {"a": {"b": [1.5, None, True, {"c": "d"}]}},
    ],
)
def test_other_settings_hold_none(settings: dict) -> None:
    assert secret_in(settings) is None


def test_settings_may_be_nested_deeply() -> None:
    nested: object = "https://me:pw@host"
    for _ in range(100_000):
        nested = [nested]
    assert "this address" in str(secret_in(nested))


def test_names() -> None:
    secret = ("api_key", "apiKey", "X-API-Key", "hf_token", "token", "Authorization", "db_password", "clientSecret")
    assert [name for name in secret if not is_secret_name(name)] == []
    open_ = ("api_key_env", "max_tokens", "eos_token", "tokenizer", "key", "keep_per_problem", "passes", "author")
    assert [name for name in open_ if is_secret_name(name)] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("MLflow at https://me:pw@host:5/x failed", "MLflow at https://***@host:5/x failed"),
        ("postgresql://r1:pw@127.0.0.1:5/x", "postgresql://***@127.0.0.1:5/x"),
        ("--set a.api_key=abc: no field", "--set a.api_key=*** no field"),
        ("{'api_key': 'abc', 'n': 1}", "{'api_key': ***, 'n': 1}"),
        ("Authorization: Bearer abc12345", "Authorization: Bearer ***"),
        ("http://host/?token=abc&n=1", "http://host/?token=***&n=1"),
        ("sqlite:////home/a@b/mlflow.db, max_tokens=5", "sqlite:////home/a@b/mlflow.db, max_tokens=5"),
    ],
)
def test_messages_are_masked(text: str, shown: str) -> None:
    assert masked(text) == str(InputError(text)) == shown


def test_an_address_without_its_user() -> None:
    assert without_user("https://me:pw@host:5/x") == "https://host:5/x"


@pytest.mark.parametrize(
    "piece", ["://:x", "-eyJ", 'password="', "bearer ", "://", "a://b:c", "sk-", "eyJaaaaaaaaaaa."]
)
def test_masking_takes_time_linear_in_the_length(piece: str) -> None:
    """A quadratic expression would take minutes for a megabyte, and the test would not come back."""
    began = time.monotonic()
    masked(piece * (1_000_000 // len(piece)))
    assert time.monotonic() - began < 60


def test_a_service_that_repeats_the_key_is_not_quoted() -> None:
    endpoint = FaultyEndpoint(lambda number, body: "401 with the key")
    try:
        http = Http(endpoint.url, 10, 0, key="plain-words-as-a-key")
        with pytest.raises(Refused) as refused:
            http.post("/v1/chat/completions", {})
    finally:
        endpoint.close()
    assert endpoint.keys == ["Bearer plain-words-as-a-key"]
    assert "no such key" in str(refused.value) and "plain-words" not in str(refused.value)


def test_an_error_stays_one_line_whatever_it_quotes() -> None:
    said = str(InputError(f"a: {'x' * 100_000}\n\x1b[31mred\r\n  remedy"))
    assert said.startswith("a: xxx") and said.endswith(" [31mred remedy") and len(said) < 1_600
