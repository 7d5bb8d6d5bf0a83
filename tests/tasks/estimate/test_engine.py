"""What vLLM holds in the trainer's process, by numbers worked by hand, and what a stage that samples with it needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo.config.common import Hardware, Sampling
from grpo.config.engines import VLLM
from grpo.config.rl import RL
from tasks.estimate.architecture import Architecture
from tasks.estimate.decoder_config import Latent
from tasks.estimate.devices import DEVICES, Device
from tasks.estimate.engine import engine_memory
from tasks.estimate.misfits import fits
from tasks.estimate.stages import Estimator

# 2 layers: attention 4 x 10 x 10, feed-forward 3 x 10 x 20, norms 2 x 10; 50 tokens, tied, a last norm.
SMALL = Architecture(layers=2, hidden=10, feed_forward=20, heads=4, key_heads=2, head_width=5, vocabulary=50, tied=True)
WEIGHTS = SMALL.weights()
A_TOKEN = 2 * 2 * 2 * 5  # layers, keys and values, heads, their width
ROUND = replace(DEVICES["H100"], memory=1e6, host_memory=1e12)
SAMPLING = Sampling(max_new_tokens=30)


def vllm(**more) -> VLLM:
    return VLLM(kind="local", **more)


def test_weights_and_a_longest_sequence_are_in_its_share() -> None:
    of = engine_memory(SMALL, vllm(gpu_memory_utilization=0.5), "bfloat16", 1e6, longest=100)
    assert of is not None
    assert (of.taken, of.weights, of.cache) == (5e5, 2 * WEIGHTS, 100 * A_TOKEN * 2)
    assert of.room == 5e5 - 2 * WEIGHTS - 100 * A_TOKEN * 2 - 3e4
    wide = engine_memory(SMALL, vllm(dtype="float32", max_model_len=7), "bfloat16", 1e6, longest=100)
    assert wide is not None and (wide.weights, wide.cache) == (4 * WEIGHTS, 7 * A_TOKEN * 4)


def test_devices_divide_weights_and_as_many_heads_as_there_are() -> None:
    of = engine_memory(SMALL, vllm(tensor_parallel_size=4), "bfloat16", 1e6, longest=100)
    assert of is not None and (of.weights, of.cache) == (2 * WEIGHTS / 4, 100 * A_TOKEN * 2 / 2)
    latent = replace(SMALL, latent=Latent(query_rank=4, key_rank=6, plain=3, rotary=2, value=3))
    of = engine_memory(latent, vllm(tensor_parallel_size=4), "bfloat16", 1e6, longest=100)
    assert of is not None and of.cache == 100 * 2 * (6 + 2) * 2  # whole on each


def test_a_cache_of_a_size_of_its_own_comes_on_top_of_the_weights() -> None:
    of = engine_memory(SMALL, vllm(kv_cache_gb=1.0), "bfloat16", 1e6, longest=100)
    assert of is not None and of.taken == 2 * WEIGHTS + 2**30


def test_engines_elsewhere_take_nothing() -> None:
    assert engine_memory(SMALL, VLLM(kind="server"), "bfloat16", 1e6, 100) is None
    assert engine_memory(SMALL, None, "bfloat16", 1e6, 100) is None


@pytest.mark.parametrize(("share", "starts"), [(0.045, True), (0.035, False)])
def test_a_share_that_does_not_hold_the_weights_does_not_fit(share: float, starts: bool) -> None:
    """2 x 4,690 bytes of weights and 30,000 for its passes, in 45,000 or 35,000."""
    sampled = Estimator(SMALL, ROUND).sampled(
        8,
        2,
        Sampling(max_new_tokens=1),
        Hardware(dtype="bfloat16"),
        vllm(gpu_memory_utilization=share, max_model_len=1),
    )
    assert fits(sampled, ROUND) is starts


def test_one_process_has_as_many_devices_as_share_its_model() -> None:
    """Its vLLM reads its parts from files; so no process has the whole model in main memory."""
    of, hardware = Estimator(SMALL, ROUND), Hardware(dtype="bfloat16")
    two = of.sampled(8, 2, SAMPLING, hardware, vllm(tensor_parallel_size=2))
    assert two.devices == 2 and two.host == 2e9
    three_actors = of.sampled(8, 2, SAMPLING, Hardware(processes=3), vllm(tensor_parallel_size=2))  # on Ray
    assert three_actors.devices == 6
    assert of.sampled(8, 2, SAMPLING, hardware).host == 2e9 + 2 * WEIGHTS
    assert of.sampled(8, 2, SAMPLING, hardware, vllm(), reward_models=2).host == 2e9 + 2 * WEIGHTS


def test_beside_a_server_the_reward_models_count() -> None:
    of, hardware = Estimator(SMALL, Device("a", "cuda", 1e9, 1e9, 1e9, 1e9, 1e9)), Hardware(dtype="bfloat16")
    assert of.sampled(8, 2, SAMPLING, hardware, VLLM(kind="server")).memory is None
    scored = of.sampled(8, 2, SAMPLING, hardware, VLLM(kind="server"), reward_models=2)
    assert scored.memory is not None and scored.memory.peak == 2 * 2 * WEIGHTS


def test_the_sampler_that_the_hardware_names_counts_as_an_engine() -> None:
    of, named = Estimator(SMALL, ROUND), Hardware(dtype="bfloat16", sampler="vllm")
    written = of.sampled(8, 2, SAMPLING, Hardware(dtype="bfloat16"), vllm())
    assert of.sampled(8, 2, SAMPLING, named) == written != of.sampled(8, 2, SAMPLING, Hardware(dtype="bfloat16"))
    rl = {"steps": 2, "kl_coef": 0.0, "sampling": SAMPLING, "optimizer": {"learning_rate": 1e-3}}
    engine = RL(**rl, engine=vllm(), hardware=Hardware(dtype="bfloat16", sampler="vllm"))
    assert of.rl(RL(**rl, hardware=named)) == of.rl(engine)
