"""What benchmarks/gpu.py measures of an update, and the file that it keeps its results in."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


class Policy(torch.nn.Linear):
    device = torch.device("cpu")


@pytest.mark.parametrize("as_trained", [True, False])
def test_an_update_is_ordered_and_clipped_as_in_the_trainer(as_trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is 30 and 40, of norm 50: clipped to 1 it is 0.6 and 0.8."""
    import gpu_throughput

    order = importlib.import_module("grpo.model.packed.ordered_gradients")
    logprobs = importlib.import_module("grpo.model.logprobs")
    state: dict[str, Any] = {"ordered": False}

    @contextmanager
    def ordered(device: torch.device) -> Iterator[None]:
        state["ordered"] = True
        yield
        state["ordered"] = False

    policy = Policy(2, 1, bias=False)
    policy.weight.register_hook(lambda _: state.update(while_backward=state["ordered"]))
    x = torch.tensor([[30.0, 40.0]])
    monkeypatch.setattr(order, "ordered_gradients", ordered)
    monkeypatch.setattr(logprobs, "completion_logprobs", lambda *_: policy(x))
    step = torch.optim.AdamW.step

    def seen(self: torch.optim.AdamW) -> None:
        state["gradient"] = policy.weight.grad.clone()
        step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", seen)
    gpu_throughput.update_of(policy, 1, 1, 1, 1, ordered=as_trained, clipped=as_trained)()
    expected = torch.tensor([[0.6, 0.8]]) if as_trained else x
    assert state["while_backward"] is as_trained and torch.allclose(state["gradient"], expected, atol=1e-4)
    assert policy.weight.grad is None


def test_an_update_of_the_kit_is_as_trained_unless_the_part_says_otherwise() -> None:
    import gpu_throughput

    defaults = {name: of.default for name, of in inspect.signature(gpu_throughput.update_of).parameters.items()}
    assert defaults["ordered"] is True and defaults["clipped"] is True
    assert gpu_throughput.MAX_GRAD_NORM == 1.0


def test_the_goal_is_met_by_updates_as_trained_alone() -> None:
    import gpu_page

    def told(**of: Any) -> str:
        results = {"machine": "a GPU", "throughput": {"1.5B": of}}
        (line,) = [line for line in gpu_page.page(results).splitlines() if line.startswith(f"| {gpu_page.MFU} |")]
        return line.split("|")[-2].strip()

    assert told(mfu=0.454) == "only without fixed order and clipping"
    assert told(mfu=0.454, as_trained=True) == "met"
    assert told(mfu=0.44) == told(mfu=0.44, as_trained=True) == "missed"


def test_samplers_are_timed_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_throughput

    counts: list[int] = []
    monkeypatch.setattr(gpu_throughput, "times", lambda device, run, count=3: counts.append(count) or [1.0])
    monkeypatch.setattr(gpu_throughput, "update_of", lambda *_: None)
    given = argparse.Namespace(device="cpu", small=True)
    (*_, result) = gpu_throughput.of_shape(given, gpu_throughput.SMALL_SHAPES["small"], 4)
    assert counts == [3, 3, 2, 2] and result["generate_tokens_per_s"] == result["sampling_tokens_per_s"] == 4 * 4 * 16
    assert result["as_trained"] is True


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    import gpu

    monkeypatch.setattr(gpu, "run_parts", lambda names, *_: [(name, {"same_bits": True}) for name in names])
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--parts", "resume", *arguments])
    return gpu.main()


def test_a_part_has_its_commit_and_those_of_earlier_runs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu

    file = tmp_path / "gpu.json"
    machine = gpu.machine_name("cpu")
    file.write_text(json.dumps({"machine": machine, "no_time": ["waits"], "step": {"commit": "0ab"}}))
    assert run(monkeypatch, "--json", str(file)) == 0
    kept = json.loads(file.read_text())
    assert kept["machine"] == machine and kept["step"] == {"commit": "0ab"} and "no_time" not in kept
    assert kept["resume"] == {"same_bits": True, "commit": gpu.made_with()["commit"]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '{"machine": "NVIDIA H200, torch 2.11.0", "step": {}}',
            "its results are of NVIDIA H200, torch 2.11.0, not of",
        ),
        ('{"machine": "NVID', "no JSON: Unterminated string"),
        ("[]", "no results of benchmarks/gpu.py"),
    ],
    ids=["another machine", "half a file", "no results"],
)
def test_a_file_that_is_not_of_this_machine_is_refused_and_stays(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--json", str(file))
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and says in last and last.endswith("give another file")
    assert file.read_text() == text


def test_without_a_gpu_it_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert "--device cuda: torch finds no GPU here" in capsys.readouterr().err.splitlines()[-1]


def test_rows_of_architectures_are_kept_for_the_same_run_alone(tmp_path: Path) -> None:
    from benchmarks import architectures

    file, origin = tmp_path / "rows.json", architectures._origin("cpu")
    rows = [architectures.Row("llama", "packed", logprobs=1e-6)]
    architectures._keep(rows, file, origin)
    assert architectures._found(file, origin) == rows and architectures._found(tmp_path / "none", origin) == []
    with pytest.raises(ValueError, match=r"rows\.json: its rows are of another run \(device cpu\); give another file"):
        architectures._found(file, origin | {"device": "cuda"})
    file.write_text('[{"type": "llama", "way": "pa')
    with pytest.raises(ValueError, match="has no rows of this benchmark; give another file"):
        architectures._found(file, origin)


def test_trl_has_as_much_of_the_gpu_and_sleeps_as_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import trl_step
    from grpo_case import Case

    from grpo.config.engines import VLLM

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    case = Case(str(tmp_path), "model", [[]], 4, 8, 0.001, 4096, 4, 1, 1, 0)
    assert "use_vllm" not in trl_step.trl_arguments(case)
    on_gpu = trl_step.trl_arguments(Case(**{**vars(case), "device": "cuda"}))
    assert on_gpu["use_vllm"] and on_gpu["vllm_enable_sleep_mode"] is True
    assert on_gpu["vllm_gpu_memory_utilization"] == VLLM(kind="local").gpu_memory_utilization


def test_trl_knows_these_settings(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    import trl_step

    assert set(trl_step.vllm_arguments()) <= set(trl.GRPOConfig.__dataclass_fields__)


def test_vllm_makes_no_text_of_a_rollout_as_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import rollout_engines

    class Engine:
        def __init__(self, **_: Any) -> None:
            self.reset_prefix_cache = lambda: None

        def generate(self, asked: list[Any], settings: list[dict[str, Any]], use_tqdm: bool) -> list[Any]:
            assert all(of["detokenize"] is False and of["ignore_eos"] for of in settings)
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * of["max_tokens"])]) for of in settings]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=dict))
    limits = [[3, 5]]
    case = rollout_engines.Case("model", [[[1, 2]]], [limits], 0)
    assert rollout_engines.load_vllm(case)([[1, 2]], limits) == limits
