"""A trainer that has no vLLM, and a vLLM server beside it, really run: `make vllm` makes the server's environment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo.config.common import Sampling
from grpo.config.engines import VLLM
from grpo.errors import InputError, TrainingStopped
from grpo.generation.sampler import seed_of
from grpo.generation.vllm.client import ServerVLLM
from grpo.generation.vllm.weight_transfer import UNKNOWN
from grpo.model.loading import load_tokenizer
from tests.support.job_runner import ROOT
from tests.support.vllm_models import needs_vllm, tiny_llama
from tests.support.vllm_probe import largest_difference, perturb
from tests.support.vllm_server import served

pytestmark = [pytest.mark.slow, needs_vllm]

SMOLLM = ROOT / "build/real_model/SmolLM2-135M-Instruct"
EXACT = 2e-4


def loaded(model):
    """As transformers has it, to compare with."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().requires_grad_(False)


def trainer(model, url, eos_id, **settings):
    """Connecting waits for a server that is being started: ten attempts, 30 s apart at most."""
    return ServerVLLM(model, VLLM(kind="server", url=url, timeout_s=120, **{"retries": 10, **settings}), eos_id=eos_id)


@pytest.fixture(scope="module", params=["1", "2"], ids=["one worker", "two workers share the model"])
def setting(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    model = tiny_llama(folder / "model", tied=True)
    with served(model, folder / "log", "--tensor-parallel-size", request.param) as (url, _):
        yield model, url, load_tokenizer(model)


@pytest.fixture
def connected(setting):
    """An engine that has just been connected, a policy of the folder's weights, prompts."""
    model, url, tokenizer = setting
    policy = loaded(model)
    prompts = [tokenizer(f"compute {i} + {i}")["input_ids"] for i in range(4)]
    prompts.append((prompts[0] * 99)[:300])  # what vLLM keeps of a prompt for the next that begins like it: 128 tokens
    engine = trainer(model, url, tokenizer.eos_token_id)
    yield engine, policy, prompts
    engine.close()


def seeds(prompts, seed):
    return [seed_of(seed, number) for number in range(len(prompts))]


def sample(engine, prompts, seed=3, temperature=1.0, tokens=48):
    return dict(
        engine.sample(prompts, 4, Sampling(temperature=temperature, max_new_tokens=tokens), seeds(prompts, seed))
    )


def difference(engine, policy, prompts, temperature=1.0):
    return largest_difference(policy, prompts, sample(engine, prompts, temperature=temperature), temperature)


def running(url):
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    return sum(float(n) for n in re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", text, re.MULTILINE))


def test_nothing_is_sampled_before_the_trainers_weights_are_there(connected):
    engine, _, prompts = connected
    with pytest.raises(TrainingStopped, match="no weights from this trainer yet"):
        sample(engine, prompts)


def test_an_update_is_followed_and_a_missing_one_shows(connected):
    engine, policy, prompts = connected
    engine.update(policy.state_dict().items(), 0)
    assert max(difference(engine, policy, prompts, t) for t in (1.0, 0.7)) < EXACT
    perturb(policy)
    assert difference(engine, policy, prompts) > 0.5
    assert engine.version() == 0
    engine.update(policy.named_parameters(), 1)
    assert engine.version() == 1
    assert max(difference(engine, policy, prompts, t) for t in (1.0, 0.7)) < EXACT


def test_the_nucleus_is_cut_only_where_no_logprobs_are_needed(connected):
    engine, policy, prompts = connected
    engine.update(policy.named_parameters(), 1)
    nucleus = Sampling(top_p=0.5, max_new_tokens=48)
    cut = dict(engine.sample(prompts, 4, nucleus, seeds(prompts, 3), logprobs=False))
    assert sorted(cut) == [0, 1, 2, 3, 4]
    assert all(c.tokens and not c.logprobs for group in cut.values() for c in group)
    with pytest.raises(InputError, match=r"sampling\.top_p is 0\.5, but vLLM reports log-probabilities after"):
        next(engine.sample(prompts, 4, nucleus, seeds(prompts, 3)))


def test_groups_are_whole_and_the_seed_decides(connected):
    engine, policy, prompts = connected
    engine.update(policy.named_parameters(), 2)
    groups = sample(engine, prompts)
    assert sorted(groups) == [0, 1, 2, 3, 4]
    completions = [c for group in groups.values() for c in group]
    assert len(completions) == 20
    assert len({tuple(c.tokens) for c in completions}) > 17
    assert {c.finished for c in completions} == {True, False}
    assert all(c.finished == (c.tokens[-1] == engine._eos_id) for c in completions)
    assert all(c.finished or len(c.tokens) == 48 for c in completions)
    tokens = [[c.tokens for c in groups[i]] for i in range(5)]
    assert [[c.tokens for c in sample(engine, prompts)[i]] for i in range(5)] == tokens
    assert [[c.tokens for c in sample(engine, prompts, seed=4)[i]] for i in range(5)] != tokens


def test_part_of_an_update_raises_and_a_whole_one_repairs(connected):
    engine, policy, prompts = connected
    perturb(policy)
    with pytest.raises(TrainingStopped, match=r"version 3 .* got no tensor, 'model"):
        engine.update(list(policy.named_parameters())[:3], 3)
    assert engine.version() == UNKNOWN
    with pytest.raises(TrainingStopped, match="no module or parameter named 'nonsense'"):
        engine.update([("nonsense.weight", torch.zeros(2, 2))], 3)
    with pytest.raises(TrainingStopped, match="no weights from this trainer"):
        sample(engine, prompts)
    engine.update(policy.named_parameters(), 4)
    assert (engine.version(), difference(engine, policy, prompts) < EXACT) == (4, True)


def test_a_tensor_that_changes_under_way_is_noticed(connected):
    engine, policy, _ = connected

    class Flips(ServerVLLM):
        def part(self, **part):
            if "whole" in part:
                part["whole"]["checksum"] ^= 1  # as if the trainer had sent one bit more
            super().part(**part)

    engine.__class__ = Flips
    with pytest.raises(TrainingStopped, match="this is not what the trainer sent: .* checksum"):
        engine.update(policy.named_parameters(), 5)
    assert engine.version() == UNKNOWN


def test_a_trainer_killed_while_it_updates_leaves_a_server_that_the_next_can_use(connected, setting):
    engine, policy, prompts = connected
    engine._once("/pause?mode=wait")
    engine.start()
    engine._broadcast(list(policy.named_parameters())[:4])
    model, url, tokenizer = setting
    successor = trainer(model, url, tokenizer.eos_token_id)
    perturb(policy)
    successor.update(policy.named_parameters(), 6)
    assert (successor.version(), difference(successor, policy, prompts) < EXACT) == (6, True)


def test_completions_of_another_trainers_weights_are_not_taken(connected, setting):
    engine, policy, prompts = connected
    engine.update(policy.named_parameters(), 7)
    model, url, tokenizer = setting
    trainer(model, url, tokenizer.eos_token_id).update(policy.named_parameters(), 99)
    with pytest.raises(TrainingStopped, match="sampled by version 99 of the weights, not 7"):
        sample(engine, prompts)


def test_sampling_that_nobody_listens_to_ends_on_the_server(connected, setting):
    engine, policy, prompts = connected
    engine.update(policy.named_parameters(), 8)
    groups = engine.sample(prompts[:4] * 50, 8, Sampling(max_new_tokens=400), [*range(200)])
    next(groups)
    assert running(setting[1]) > 100
    groups.close()
    deadline = time.monotonic() + 20
    while running(setting[1]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert running(setting[1]) == 0
    assert len(sample(engine, prompts)) == 5


def test_a_prompt_in_parts_is_not_tried_on_a_cpu(connected):
    """Longer together than one step of the scheduler takes: vLLM 0.32 dies of it where prompts are cut."""
    engine, policy, _ = connected
    engine.update(policy.named_parameters(), 9)
    prompts = torch.randint(5, 200, (30, 400), generator=torch.Generator().manual_seed(0)).tolist()
    assert len(sample(engine, prompts, tokens=4)) == 30


def test_all_ranks_of_a_trainer_send_together_and_stop_together(setting, tmp_path):
    model, url, _ = setting
    script = ROOT / "tests/support/vllm_ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, model, url, tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    for rank in range(2):
        seen = json.loads((tmp_path / str(rank)).read_text())
        assert seen["version"] == 1
        assert seen["difference"] < EXACT
        assert "got no tensor" in seen["part"]


def test_another_model_is_refused(setting, tmp_path):
    _, url, tokenizer = setting
    other = tiny_llama(tmp_path / "other", tied=True, layers=2)
    with pytest.raises(InputError, match=r"serves another model than .*: its num_hidden_layers is 3, ours 2$"):
        trainer(other, url, tokenizer.eos_token_id)


def test_a_server_that_ends_stops_training_in_one_line(tmp_path):
    model = tiny_llama(tmp_path / "model", tied=True)
    tokenizer = load_tokenizer(model)
    with served(model, tmp_path / "log") as (url, pid):
        policy = loaded(model)
        trainer(model, url, tokenizer.eos_token_id).close()  # waits for it
        engine = trainer(model, url, tokenizer.eos_token_id, retries=1)
        engine.update(policy.named_parameters(), 1)
        groups = engine.sample([[5]] * 60, 8, Sampling(max_new_tokens=400), [*range(60)])
        next(groups)
        os.killpg(pid, signal.SIGKILL)
        with pytest.raises(TrainingStopped, match=rf"^vllm: {url}/inference/v1/generate failed 2 times: "):
            list(groups)
        with pytest.raises(TrainingStopped, match=rf"^vllm: {url}/pause.* failed: "):
            engine.update(policy.named_parameters(), 2)


@pytest.mark.skipif(not SMOLLM.is_dir(), reason="benchmarks/real_model.py makes the model")
def test_smollm2_agrees_and_its_update_takes_seconds(tmp_path):
    model = str(SMOLLM)
    tokenizer, policy = load_tokenizer(model), loaded(model)
    prompts = [tokenizer(f"The number {i} is")["input_ids"] for i in range(4)]
    prompt = torch.randint(100, 40_000, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    with served(model, tmp_path / "log") as (url, _):
        engine = trainer(model, url, tokenizer.eos_token_id)
        engine.update(policy.named_parameters(), 1)
        found = [difference(engine, policy, prompts, t) for t in (1.0, 0.7)]
        perturb(policy)
        stale, began = difference(engine, policy, prompts), time.perf_counter()
        engine.update(policy.named_parameters(), 2)
        update_s = time.perf_counter() - began
        found += [difference(engine, policy, prompts, t) for t in (1.0, 0.7)]
        began = time.perf_counter()
        ((_, group),) = engine.sample([prompt], 16, Sampling(max_new_tokens=128), [1])
        speed = sum(len(c.tokens) for c in group) / (time.perf_counter() - began)
    print({"differences": found, "stale": stale, "update_s": update_s, "tokens_per_s": speed})
    assert max(found) < EXACT
    assert stale > 0.5
    assert update_s < 20
    assert speed > 20
