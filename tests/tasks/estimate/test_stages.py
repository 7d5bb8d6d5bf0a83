"""Estimates, by numbers that can be checked by hand, and against what trainers really held."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo.config.common import Hardware, Sampling
from grpo.config.rl import RL
from grpo.config.supervised import SFT
from grpo.processes.peak_memory import FILE
from tasks.estimate.architecture import Architecture
from tasks.estimate.devices import DEVICES, Device, forward_operations, learn_s, read_s, sample_s
from tasks.estimate.local_device import calibrate, processor
from tasks.estimate.stages import Assumed, Estimate, Estimator

ROOT = Path(__file__).parents[3]
# 2 layers: attention 4 x 10 x 10, feed-forward 3 x 10 x 20, norms 2 x 10; 50 tokens, tied, a last norm.
SMALL = Architecture(layers=2, hidden=10, feed_forward=20, heads=2, key_heads=2, head_width=5, vocabulary=50, tied=True)
WEIGHTS = 2 * (400 + 600 + 20) + 500 + 10
ROUND = Device("round", "cuda", 1e9, 1e6, 1e5, 1e6, 1e6, learning_share=0.5, sampling_share=0.5, layer_s=0.001)
RATE = {"optimizer": {"learning_rate": 1e-3}}


def test_operations_are_two_a_weight_and_attentions_own() -> None:
    assert SMALL.weights() == WEIGHTS == 2550
    assert forward_operations(SMALL, 30) == 2 * 2550 + 2 * 2 * 10 * 30
    # A head of its own is multiplied by, embeddings are looked up.
    assert forward_operations(replace(SMALL, tied=False), 30) == forward_operations(SMALL, 30)


def test_seconds_are_operations_over_the_rate_and_what_layers_take_at_least() -> None:
    # 1000 tokens x 6300 / (1e6 x 0.5), and 10 batches x 2 layers x 0.001.
    assert read_s(ROUND, SMALL, 1000, 30, 100, number=2) == pytest.approx(12.6 + 0.02)
    assert read_s(ROUND, SMALL, 1000, 30, 100, number=4) == pytest.approx(126 + 0.02)
    assert learn_s(ROUND, SMALL, 1000, 30, 100, 2, again=False) == pytest.approx(3 * 12.62)
    assert learn_s(ROUND, SMALL, 1000, 30, 100, 2, again=True) == pytest.approx(4 * 12.62)


def test_a_token_that_is_sampled_reads_all_weights() -> None:
    fast = replace(ROUND, operations_16=1e12)
    # One row: 20 steps, each (2 x (2550 weights + 40 cached numbers x (10 + 5) tokens) / 5e5, and 2 layers.
    one = sample_s(fast, SMALL, 1, prompt=10, steps=20, mean=10, rows=8, number=2, engine=True)
    assert one == pytest.approx(20 * (2 * (2550 + 40 * 15) / 5e5 + 2 * 0.001 * 0.2))
    # Eight rows of eight read the weights once a step, rows that ended no cache.
    eight = sample_s(fast, SMALL, 8, prompt=10, steps=20, mean=10, rows=8, number=2, engine=False)
    assert eight == pytest.approx(20 * (2 * (2550 + 4 * 40 * 15) / 5e5 + 2 * 0.001))


def test_devices_divide_the_time_and_not_the_hours() -> None:
    of = Estimator(SMALL, replace(ROUND, network=1e12))
    alone = of.supervised(SFT(micro_batch_tokens=64, **RATE), 6400, 32)
    four = of.supervised(SFT(micro_batch_tokens=64, hardware=Hardware(processes=4), **RATE), 6400, 32)
    assert alone.seconds == pytest.approx(4 * four.seconds) and four.devices == 4
    assert alone.device_seconds == pytest.approx(four.device_seconds)
    # Each of the four goes through 25 micro-batches, and receives 8 bytes a weight for each.
    assert (alone.network, four.network) == (0, 25 * 8 * 2550)


def test_sizes_on_disk_follow_the_type_that_is_kept() -> None:
    of = Estimator(SMALL, ROUND)
    hardware = Hardware(dtype="bfloat16")
    assert of.supervised(SFT(**RATE), 100, 10).disk == 4 * 2550
    made = of.supervised(SFT(hardware=hardware, **RATE), 100, 10)
    assert (made.disk, made.scratch) == (2 * 2550, 2 * 3 * 2 * 2550)
    mixed = of.supervised(SFT(hardware=Hardware(dtype="bfloat16", mixed_precision=True), **RATE), 100, 10)
    assert mixed.disk == 4 * 2550


def rl(**more: Any) -> RL:
    sampling = Sampling(max_new_tokens=20, batch_size=8)
    return RL(**{"steps": 10, "prompts_per_step": 2, "group_size": 4, "sampling": sampling, **RATE, **more})


def test_reinforcement_learning_takes_longer_with_all_that_it_does() -> None:
    of = Estimator(SMALL, ROUND, Assumed(prompt_tokens=10, completion_share=0.5))
    plain = of.rl(rl(kl_coef=0.0))
    assert of.rl(rl(kl_coef=0.0, steps=20)).seconds == pytest.approx(2 * plain.seconds)
    # The reference passes 10 steps x 8 completions x 20 tokens forwards, all of a step at once.
    length, batch = 20, 8 * 20
    reference = read_s(ROUND, SMALL, 10 * 8 * length, length, 4 * batch, 4)
    assert of.rl(rl(kl_coef=0.1)).seconds == pytest.approx(plain.seconds + reference)
    # So it does wherever the method reads it: a KL budget needs it without a penalty, online RFT never does.
    budget = {"kl_budget": {"limit": 1.0}}
    assert of.rl(rl(kl_coef=0.0, health=budget)).seconds == pytest.approx(plain.seconds + reference)
    assert of.rl(rl(kl_coef=0.1, method="online_rft")).seconds == pytest.approx(plain.seconds)
    longer = of.rl(rl(kl_coef=0.0, max_new_tokens_from={5: 40}))
    assert plain.seconds < longer.seconds < of.rl(rl(kl_coef=0.0, max_new_tokens_from={0: 40})).seconds
    assert of.rl(rl(kl_coef=0.0, inner_epochs=2)).seconds < plain.seconds  # half as much is sampled


def test_minibatches_are_sampled_at_once_as_far_as_the_batch_size_allows() -> None:
    assumed = Assumed(prompt_tokens=10, completion_share=0.5)
    of, large = Estimator(SMALL, ROUND, assumed), Sampling(max_new_tokens=20, batch_size=256)

    def sampling_s(completions: int, rows: int) -> float:
        return sample_s(ROUND, SMALL, completions, 10, steps=20, mean=10, rows=rows, number=4, engine=False)

    plain = of.rl(rl(kl_coef=0.0)).seconds
    # Ten rollouts of 8 completions. Without more of them a larger batch size saves nothing.
    assert of.rl(rl(kl_coef=0.0, sampling=large)).seconds == pytest.approx(plain)
    # Two of 40: 8 at a time they take as long, all at once they do not.
    assert of.rl(rl(kl_coef=0.0, minibatches=5)).seconds == pytest.approx(plain)
    at_once = of.rl(rl(kl_coef=0.0, minibatches=5, sampling=large)).seconds
    assert at_once == pytest.approx(plain - 10 * sampling_s(8, 8) + 2 * sampling_s(40, 40))
    # One of 80, although it might have been larger.
    assert of.rl(rl(kl_coef=0.0, minibatches=99, sampling=large)).seconds == pytest.approx(
        plain - 10 * sampling_s(8, 8) + sampling_s(80, 80)
    )
    # Groups of 4 are never divided.
    whole, single = (Sampling(max_new_tokens=20, batch_size=size) for size in (4, 1))
    assert of.rl(rl(kl_coef=0.0, sampling=single)).seconds == pytest.approx(
        of.rl(rl(sampling=whole, kl_coef=0.0)).seconds
    )


def test_what_is_measured_of_a_rollout_is_measured_once() -> None:
    of = Estimator(SMALL, replace(ROUND, network=1e12), Assumed(prompt_tokens=10, completion_share=0.5))
    # Forwards 10 steps x 8 completions x 20 tokens, as in the test above.
    forward = read_s(ROUND, SMALL, 10 * 8 * 20, 20, 4 * 8 * 20, 4)
    twice = {"inner_epochs": 2}
    reference = of.rl(rl(kl_coef=0.1, **twice)).seconds - of.rl(rl(kl_coef=0.0, **twice)).seconds
    assert reference == pytest.approx(forward / 2)
    # vLLM's log-probabilities are not the policy's, so the trainer computes those of several updates before the first.
    server = {"kl_coef": 0.0, "engine": {"kind": "server"}, "minibatches": 5}
    own = {**server, "engine": None, "method": "online_rft"}
    assert of.rl(rl(**own)).seconds == pytest.approx(of.rl(rl(kl_coef=0.0, minibatches=5)).seconds)
    initial = of.rl(rl(**server, method="rft")).seconds  # whose completions no policy of this run has sampled
    assert of.rl(rl(**server)).seconds - initial == pytest.approx(forward)
    # Weights go to the server once a rollout, not once a step.
    assert of.rl(rl(**server)).network == pytest.approx(2 * 4 * WEIGHTS)
    assert of.rl(rl(**server, **twice)).network == pytest.approx(4 * WEIGHTS)
    # A value model reads the rollout as well, and then learns as much as the policy.
    learning = learn_s(ROUND, SMALL, 10 * 8 * 20, 20, 8 * 20, 4, again=False)
    ppo = of.rl(rl(kl_coef=0.0, method="ppo")).seconds - of.rl(rl(kl_coef=0.0)).seconds
    assert ppo == pytest.approx(forward + learning)


def test_only_a_server_saves_time_by_sampling_ahead() -> None:
    of = Estimator(SMALL, replace(ROUND, network=1e12), Assumed(prompt_tokens=10, completion_share=0.5))
    asked: dict[str, Any] = {"kl_coef": 0.0}
    assert of.rl(rl(**asked, rollouts_ahead=1)).seconds == pytest.approx(of.rl(rl(**asked)).seconds)
    asked["engine"] = {"kind": "server"}
    assert of.rl(rl(**asked, rollouts_ahead=1)).seconds < of.rl(rl(**asked)).seconds


def test_reward_models_and_a_value_model_are_held_too() -> None:
    of = Estimator(SMALL, ROUND)
    held = of.rl(rl(kl_coef=0.0)).memory
    scored = of.rl(rl(kl_coef=0.0), reward_models=2).memory
    ppo = of.rl(rl(kl_coef=0.0, method="ppo")).memory
    assert held and scored and ppo
    assert scored.peak - held.peak == 2 * 4 * 2550
    assert ppo.peak - held.peak == 4 * 4 * 2550  # weights, gradients, two moments


def test_stages_after_each_other_add_up_and_hold_the_larger() -> None:
    of = Estimator(SMALL, ROUND)
    sampled, learnt = of.sampled(4, 2, Sampling(max_new_tokens=8), Hardware()), of.supervised(SFT(**RATE), 1000, 10)
    both = sampled + learnt
    assert both.seconds == pytest.approx(sampled.seconds + learnt.seconds)
    assert both.memory and sampled.memory and learnt.memory
    assert both.memory.peak == max(sampled.memory.peak, learnt.memory.peak)
    assert set(both.memory.phases) == {"sampling", "loading", "update"}
    assert (Estimate() + learnt) == learnt


def test_a_service_that_samples_holds_nothing_here() -> None:
    from grpo.config.engines import Endpoint

    endpoint = Endpoint(kind="endpoint", base_url="http://h/v1", model="m")
    made = Estimator(SMALL, ROUND).sampled(100, 4, Sampling(max_new_tokens=8), Hardware(), endpoint)
    assert (made.seconds, made.memory, made.disk) == (0, None, 100 * 4 * 4 * 5)


@pytest.mark.slow
def test_calibration_is_remembered_and_of_this_machine(tmp_path: Path) -> None:
    assert not processor(tmp_path).name.endswith("as measured")
    device = calibrate(tmp_path)
    assert processor(tmp_path) == device and device.name.endswith("as measured")
    assert 1e8 < device.operations_32 < 1e14 and 1e8 < device.bandwidth < 1e13 and 1e-7 < device.layer_s < 1


@pytest.mark.slow
def test_memory_is_a_bound_near_what_a_trainer_really_holds(tmp_path: Path) -> None:
    """Pretraining of 8 M parameters holds no more than the estimate, and no less than it without what it adds for the
    program and its libraries."""
    settings = {
        "vocabulary": 400, "hidden": 384, "feed_forward": 1024, "layers": 5, "heads": 6, "context": 256,
        "batch_size": 16, "steps": 3, "optimizer": {"learning_rate": 1e-3},
    }  # fmt: skip
    (tmp_path / "corpus").write_text(
        "\n\n".join(f"{a} and {b} make {a + b}, say I" for a in range(99) for b in range(99))
    )
    job = {name: str(tmp_path / name) for name in ("out", "state", "metrics", "corpus")}
    job |= {"kind": "pretrain", "seed": 0, "result": str(tmp_path / "result.json"), "settings": settings}
    (tmp_path / "job.json").write_text(json.dumps(job))
    # As in benchmarks/sizes.py: what is measured is what is held, not gaps of the heap.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "grpo.train", str(tmp_path / "job.json")]
    subprocess.run(command, check=True, env=environment, cwd=ROOT)
    used = json.loads((tmp_path / FILE).read_text())
    assert used["device"] == "cpu"
    shape = Architecture.from_config(json.loads((tmp_path / "out" / "config.json").read_text()))
    from grpo.config.supervised import Pretrain

    estimated = Estimator(shape, DEVICES["cpu"]).supervised(Pretrain.model_validate(settings), 3 * 16 * 128, 128).memory
    assert estimated is not None
    assert estimated.peak - estimated.parts["program"] < used["peak_bytes"] < estimated.peak, (used, estimated)
