"""Requests to vLLM, and those that are refused before they are sent."""

from __future__ import annotations

import itertools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import ValidationError

from grpo.config.common import Sampling
from grpo.config.engines import VLLM
from grpo.config.rl import RL
from grpo.errors import InputError
from grpo.generation import engine_choice, engines
from grpo.generation.engine_choice import Needs
from grpo.generation.engines import make_engine
from grpo.generation.vllm.client import ServerVLLM
from grpo.generation.vllm.local import LocalVLLM
from grpo.generation.vllm.request import check, check_ahead, parameters, prompt_seed
from grpo.generation.vllm.server import main, server_command

LONG = {
    "steps": 9000,
    "sampling": {"max_new_tokens": 16},
    "validate_every": 50,
    "optimizer": {"learning_rate": 1e-5},
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "server", "tensor_parallel_size": 2}, "tensor_parallel_size is the server's own"),
        ({"kind": "local", "url": "http://a:1"}, "url is for kind 'server' alone"),
        ({"kind": "server", "url": "http://a:1/v1"}, "pattern"),
        ({"kind": "local", "gpu_memory_utilization": 1.5}, "less than or equal to 1"),
        ({"kind": "remote"}, "'local' or 'server'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        VLLM(**fields)


def test_what_vllm_would_answer_otherwise_than_asked_is_refused():
    prompts = [[1] * 60, [1] * 40]
    check(prompts, Sampling(max_new_tokens=40), 100, True)
    with pytest.raises(InputError, match="needs 101 tokens, but vLLM takes 100"):
        check(prompts, Sampling(max_new_tokens=41), 100, True)
    with pytest.raises(InputError, match="after the nucleus cut"):
        check(prompts, Sampling(max_new_tokens=1, top_p=0.95), 100, True)
    check(prompts, Sampling(max_new_tokens=1, top_p=0.95), 100, False)
    with pytest.raises(InputError, match="temperature is 0.001"):
        check(prompts, Sampling(max_new_tokens=1, temperature=0.001), 100, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens_from": {8200: 65536}}, "needs 65537 tokens, but vLLM takes 32768"),
        ({"validation": {"sampling": {"max_new_tokens": 32768}}}, "needs 32769 tokens, but vLLM takes 32768"),
        ({"validation": {"sampling": {"max_new_tokens": 9, "temperature": 0.001}}}, "temperature is 0.001"),
    ],
)
def test_what_is_reached_late_is_refused_when_the_engine_is_made(fields, message, monkeypatch):
    class Engine:
        longest = 32768

        def __init__(self, *_, **__):
            pass

    monkeypatch.setattr(engines, "LocalVLLM", Engine)
    settings = {**LONG, "engine": {"kind": "local"}}
    make_engine("model", RL.model_validate(settings), None, 1)
    with pytest.raises(InputError, match=message):
        make_engine("model", RL.model_validate({**settings, **fields}), None, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens_from": {8200: 65536}, "steps": 8200},
        {"max_new_tokens_from": {0: 1024}, "sampling": {"max_new_tokens": 65536}},
    ],
)
def test_lengths_that_no_step_has_are_no_reason_to_refuse(fields):
    settings = RL.model_validate({**LONG, **fields})
    check_ahead(engines._samplings(settings), 32768)


def test_vllm_is_not_chosen_for_a_validation_that_it_refuses(monkeypatch):
    monkeypatch.setattr(engine_choice, "has_vllm", lambda: True)
    for temperature, chosen in ((0.6, "vllm"), (0.001, "own")):
        validation = {"sampling": {"max_new_tokens": 16, "temperature": temperature}}
        settings = RL.model_validate({**LONG, "validation": validation})
        needs = Needs(settings.sampling, engines._samplings(settings))
        assert engine_choice._choice(settings.hardware, needs, "cuda").name == chosen


def test_nothing_that_changes_the_distribution_is_left_to_the_model_folder():
    asked = parameters(16, Sampling(temperature=0.7, max_new_tokens=9), eos_id=2, seed=5, logprobs=True)
    assert (asked["n"], asked["max_tokens"], asked["temperature"], asked["seed"]) == (16, 9, 0.7, 5)
    assert (asked["top_p"], asked["top_k"], asked["min_p"], asked["repetition_penalty"]) == (1, 0, 0, 1)
    assert (asked["ignore_eos"], asked["stop_token_ids"], asked["logprobs"]) == (True, [2], 0)
    assert parameters(1, Sampling(max_new_tokens=9), eos_id=2, seed=5, logprobs=False)["logprobs"] is None


def test_seeds_of_prompts_lie_far_apart():
    """vLLM gives a prompt's completions the seeds s, s + 1, ...: two prompts must not share any."""
    seeds = sorted(prompt_seed(seed) for seed in range(9000))
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 100_000
    assert seeds[0] >= 0 and seeds[-1] < 2**63
    assert prompt_seed(12) == prompt_seed(12)


def test_one_command_starts_a_server_that_takes_weights():
    command, variables = server_command("folder", ["--port", "8123"])
    assert command[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "folder"]
    assert command[-2:] == ["--port", "8123"]
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"


def test_without_vllm_there_is_one_line(capsys, model_folder):
    assert main(["folder"]) == 2
    assert capsys.readouterr().err == "error: vllm is not installed here; pip install vllm\n"
    with pytest.raises(InputError, match="vllm is not installed here"):
        LocalVLLM(model_folder, VLLM(kind="local"), eos_id=1)


def test_a_server_that_is_not_there_is_one_line_with_the_command_that_starts_one(model_folder):
    settings = VLLM(kind="server", url="http://127.0.0.1:9", retries=0)
    with pytest.raises(
        InputError, match=r"no server: .* refused; start one with: python -m grpo.generation.vllm.server"
    ):
        ServerVLLM(model_folder, settings, eos_id=1)


def test_a_server_that_takes_no_weights_is_one_line(model_folder):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        settings = VLLM(kind="server", url=f"http://127.0.0.1:{other.server_address[1]}")
        with pytest.raises(InputError, match=r"takes no weights from a trainer \(status 404.*\); start one with"):
            ServerVLLM(model_folder, settings, eos_id=1)
        other.shutdown()


def test_a_key_that_is_not_set_is_named(model_folder, monkeypatch):
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(InputError, match="environment variable A_KEY is not set"):
        ServerVLLM(model_folder, VLLM(kind="server", api_key_env="A_KEY"), eos_id=1)
