"""Several processes (gloo, on the CPU) do what one does, and a checkpoint of one number of them serves any other.

Models compute in float64: what is left of the difference between numbers of processes is the order of sums.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo.config.common import Hardware
from grpo.distributed import tensor_io
from grpo.distributed.process_group import Parallel, divide, is_peer_failure
from grpo.errors import InputError
from tests.support import parallel_jobs as jobs
from tests.support.job_runner import ENVIRONMENT, ROOT

pytestmark = pytest.mark.system

CPU = Hardware(device="cpu")


@pytest.fixture(scope="module")
def teams():
    """teams[n](job, *args): what each of n processes returned."""
    started = {2: jobs.Team(2), 4: jobs.Team(4)}
    yield {1: lambda job, *args: [job(jobs.ALONE, *args)], **started}
    for team in started.values():
        team.dismiss()


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


# Who takes what


def test_the_dearest_goes_to_who_has_least():
    # 9 | 8 | then 7 to the second (15), 6 to the first (15), 5 to the first by number (20), 4 to the second (19)
    assert divide([4, 9, 6, 8, 5, 7], 2) == [[1, 2, 4], [0, 3, 5]]


def test_fewer_items_than_processes_leave_some_without():
    assert divide([3, 3], 4) == [[0], [1], [], []]


def test_items_of_one_cost_are_dealt_out_in_turn():
    assert divide([1] * 5, 2) == [[0, 2, 4], [1, 3]]


# Joining each other


def test_without_torchrun_there_is_one_process_and_no_group(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    parallel = Parallel.start(CPU)
    assert parallel == jobs.ALONE and parallel.is_main and not torch.distributed.is_initialized()
    assert (
        parallel.all_gather(3) == [3]
        and parallel.broadcast("x") == "x"
        and parallel.reduce({"loss": 2.0}) == {"loss": 2.0}
    )
    parallel.barrier()
    parallel.close()


@pytest.mark.parametrize(
    ("device", "environment", "gpus", "words"),
    [
        ("cuda", {}, 0, "finds no GPU"),
        ("cuda", {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 2, "^4 processes on a machine with 2 GPUs"),
        ("auto", {"WORLD_SIZE": "3"}, 2, "^3 processes on a machine with 2 GPUs"),
        ("mps", {"WORLD_SIZE": "2"}, 0, "'mps' works in one process"),
        ("cpu", {"WORLD_SIZE": "two"}, 0, "WORLD_SIZE is 'two' in the environment"),
    ],
)
def test_what_the_machine_lacks_is_said(monkeypatch, device, environment, gpus, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words):
        Parallel.start(Hardware(device=device))


def test_processes_tell_each_other(teams):
    for rank, told in enumerate(teams[4](jobs.talk)):
        assert told["gathered"] == [{"rank": r, "tokens": [r] * (r + 1)} for r in range(4)]
        assert told["same"] == "from 0"
        assert told["reduced"] == {"loss": 10.0, "ratio_max": 3.0, "ratio_min": 0.0, "only_others": 6.0}
        assert np.isnan(told["nan"]["ratio_max"])
        assert told["dealt"] == ["ae", "bf", "c", "d"][rank] and told["collected"] == [*"ABCDEF"]
        assert told["main"] == (rank == 0)


# Learning


def test_a_team_that_lost_a_process_tries_again(teams, tmp_path):
    with pytest.warns(UserWarning, match="die_once: rank 1 died with exit code -6; tried again"):
        assert teams[2](jobs.die_once, tmp_path) == [0, 1]
    assert teams[2](jobs.die_once, tmp_path) == [0, 1]


def test_a_jobs_error_is_not_tried_again(teams):
    with pytest.raises(AssertionError, match="(?s)rank 0: .*KeyError: 'unknown'"):
        teams[2](jobs.names_and_sums, "unknown")


@pytest.mark.parametrize("name", ["tied", "untied", "lora", "float32"])
def test_any_number_of_processes_learns_the_same(teams, name):
    tolerance = 1e-6 if name == "float32" else 1e-9
    (alone,) = teams[1](jobs.two_steps, name)
    assert alone["norm"] > 1, "gradients are clipped"
    for world in (2, 4):
        found = teams[world](jobs.two_steps, name)
        assert sum(result["fillers"] for result in found) == {2: 1, 4: 1}[world]
        for result in found:
            assert result["norm"] == pytest.approx(alone["norm"], rel=tolerance)
            assert distance(result["weights"], alone["weights"]) < tolerance
        assert sum(result["shares"] for result in found) == alone["shares"], "no weight is held twice"


@pytest.mark.parametrize("name", ["tied", "lora"])
def test_gradient_checkpointing_changes_nothing(teams, name):
    (alone,) = teams[1](jobs.two_steps, name)
    assert distance(teams[2](jobs.two_steps, name, True)[1]["weights"], alone["weights"]) < 1e-9


def test_a_loss_that_is_no_number_is_seen_by_all(teams):
    assert all(map(np.isnan, teams[2](jobs.nobody_learns_but_one)))


@pytest.mark.parametrize("world", [1, 2])
def test_a_scalar_head(teams, world):
    assert max(teams[world](jobs.reward_gradients)) < 1e-9


def test_a_value_head_of_another_type_on_the_policys_states(teams):
    assert max(teams[2](jobs.value_gradients)) < 0.01  # bfloat16, added in another order


@pytest.mark.parametrize("world", [1, 2])
def test_small_steps_move_float32_weights_that_compute_in_bfloat16(teams, world):
    for found in teams[world](jobs.rounded_arithmetic):
        assert found["loss"] == torch.bfloat16 and found["gradients"] == {torch.float32}
        assert found["sampling"] == {torch.bfloat16}
        assert (
            found["moved"] > 0.5
        )  # bfloat16 weights would stay where they are: 1e-6 is less than half of a last digit


# Sampling and references


@pytest.mark.parametrize("name", ["tied", "lora"])
def test_the_whole_model_is_called_as_often_as_each_process_likes(teams, name):
    for world in (1, 2, 4):
        for rank, same in enumerate(teams[world](jobs.sample_unevenly, name)):
            assert same == [True] * (2 * rank + 3)


@pytest.mark.parametrize("world", [1, 2])
def test_the_reference_is_the_policy_with_its_adapters_off(teams, world):
    # 3 blocks of 7 linear layers with 2 matrices each
    assert all(found == (pytest.approx(0, abs=1e-9), 42) for found in teams[world](jobs.reference_first))


def test_weights_changed_after_a_forward_without_gradients_are_seen(teams):
    assert max(teams[2](jobs.forward_after_change)) < 1e-9


def test_the_reference_moves_to_the_policy(teams):
    assert max(teams[2](jobs.moving_reference)) < 1e-9


# Weights by name


def test_full_tensors_have_the_names_of_transformers_files(teams):
    expected = {name: p.sum().item() for name, p in jobs.llama().named_parameters()}
    assert "lm_head.weight" not in expected and len(expected) == 3 * 9 + 2
    for world in (1, 2):
        for found in teams[world](jobs.names_and_sums, "tied"):
            assert found == pytest.approx(expected, abs=1e-9)


def test_full_tensors_have_their_adapters_merged(teams):
    merged = jobs.MODELS["lora"]().merge_and_unload()
    expected = {name: p.sum().item() for name, p in merged.named_parameters()}
    for world in (1, 2):
        for found in teams[world](jobs.names_and_sums, "lora"):
            assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ["tied", "lora"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_saved_model_opens(teams, tmp_path, name, world):
    teams[world](jobs.save_model, name, tmp_path)
    model = jobs.MODELS[name]()
    expected = model.merge_and_unload() if name == "lora" else model
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(jobs.logits_of(loaded, [1, 2, 3]), jobs.logits_of(expected, [1, 2, 3]), rtol=0, atol=1e-9)


# Checkpoints


@pytest.mark.parametrize("name", ["tied", "lora"])
def test_a_checkpoint_serves_any_number_of_processes(teams, tmp_path, name):
    saved = teams[2](jobs.start_and_save, name, tmp_path)[0]
    for world in (1, 2, 4):
        for found in teams[world](jobs.load_and_go_on, name, tmp_path):
            assert distance(found["saved"], saved["saved"]) == 0
            assert distance(found["next"], saved["next"]) < 1e-9


def test_moments_of_8_bits_do_not_depend_on_who_keeps_them(teams, tmp_path):
    saved = teams[2](jobs.start_and_save, "wide", tmp_path)[0]
    kinds = {name.rpartition(".")[2]: state.dtype for name, state in saved["state"].items() if "q_proj" in name}
    assert (kinds["exp_avg"], kinds["exp_avg_scale"]) == (np.uint8, np.float32)
    for world in (1, 2, 4):
        for found in teams[world](jobs.load_and_go_on, "wide", tmp_path):
            assert distance(found["saved"], saved["saved"]) == 0
            assert all((found["state"][name] == state).all() for name, state in saved["state"].items())
            # Sums in another order may fall to the next code, a few hundredths of a moment: of a step of about 0.01.
            assert distance(found["next"], saved["next"]) < 5e-4


def test_a_checkpoint_of_one_process_serves_two(teams, tmp_path):
    (saved,) = teams[1](jobs.start_and_save, "tied", tmp_path)
    found = teams[2](jobs.load_and_go_on, "tied", tmp_path)[1]
    assert distance(found["saved"], saved["saved"]) == 0
    assert distance(found["next"], saved["next"]) < 1e-9


def test_one_process_goes_on_bit_by_bit(teams, tmp_path):
    (saved,) = teams[1](jobs.start_and_save, "tied", tmp_path)
    (found,) = teams[1](jobs.load_and_go_on, "tied", tmp_path)
    assert distance(found["next"], saved["next"]) == 0


def test_another_model_is_refused(tmp_path):
    tensor_io.write(tmp_path, {"policy": torch.nn.Linear(3, 2)}, {})
    with pytest.raises(InputError, match=r"policy\.weight is \(2, 3\) there and \(2, 4\) here"):
        tensor_io.read(tmp_path, {"policy": torch.nn.Linear(4, 2)}, {})
    with pytest.raises(InputError, match=r"policy\.bias is \(2,\) there and missing here"):
        tensor_io.read(tmp_path, {"policy": torch.nn.Linear(3, 2, bias=False)}, {})


def test_weights_that_never_had_a_gradient_have_no_state(tmp_path):
    used, unused = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    modules = {"used": used, "unused": unused}
    optimizer = torch.optim.AdamW([*used.parameters(), *unused.parameters()])
    used(torch.ones(2)).backward()
    optimizer.step()
    tensor_io.write(tmp_path, modules, {"adamw": optimizer})
    # Meanwhile all learn; the checkpoint takes it back.
    fresh = torch.optim.AdamW([*used.parameters(), *unused.parameters()])
    (used(torch.ones(2)) + unused(torch.ones(2))).backward()
    fresh.step()
    tensor_io.read(tmp_path, modules, {"adamw": fresh})
    assert list(fresh.state) == [used.weight]
    assert torch.equal(fresh.state[used.weight]["exp_avg"], optimizer.state[used.weight]["exp_avg"])


def test_adapters_are_kept_without_their_base_and_frozen_models_whole(tmp_path):
    reference = torch.nn.Linear(2, 1).requires_grad_(False)
    modules = {"policy": jobs.MODELS["lora"](), "initial": reference}
    tensor_io.write(tmp_path, modules, {})
    saved = torch.distributed.checkpoint.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert sum(name.startswith("policy") for name in saved) == 42  # 3 blocks of 7 linear layers with 2 matrices each
    assert {name for name in saved if not name.startswith("policy")} == {"initial.weight", "initial.bias"}


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    tensor_io.write(tmp_path, {"policy": torch.nn.Linear(3, 2)}, {})

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match="mkdir has no place in a checkpoint"):
        tensor_io.read(tmp_path, {"policy": torch.nn.Linear(3, 2)}, {})
    assert not (tmp_path / "ran").exists()


# The end of a process


KILLED = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from grpo.config.common import Hardware
from grpo.distributed.process_group import Parallel, is_peer_failure
parallel = Parallel.start(Hardware(device="cpu"))
parallel.barrier()
if parallel.rank == 1:
    print("killed at", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
told = []  # torchrun's SIGTERM may come first
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
try:
    parallel.all_gather("waiting")
except Exception as error:
    print("lost peer:", is_peer_failure(error), flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not told:
        time.sleep(60)
    sys.exit(1)
"""


def test_a_killed_process_ends_the_job_and_is_blamed(tmp_path):
    (tmp_path / "job.py").write_text(KILLED.format(root=str(ROOT)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, tmp_path / "job.py"], env=ENVIRONMENT, capture_output=True, text=True, timeout=400
    )
    ended = time.time()
    assert done.returncode == 1
    assert "lost peer: True" in done.stdout
    assert ended - float(re.findall(r"killed at (\S+)", done.stdout)[0]) < 45
    rank, code = re.findall(r"rank\s*: (\d+) \(.*\n\s*exitcode\s*: (-?\d+) \(pid", done.stderr)[-1]
    assert (int(rank), int(code)) == (1, -signal.SIGKILL)


def test_nccls_words_for_a_lost_peer():
    assert is_peer_failure(RuntimeError("NCCL error: remote process exited or there was a network error"))


def test_other_errors_are_no_lost_peer():
    assert not is_peer_failure(RuntimeError("out of memory")) and not is_peer_failure(
        ValueError("Connection closed by peer")
    )
