"""benchmarks/gpu.py from end to end on a CPU, in small: that it runs when there is a GPU."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import script_environment

ROOT = Path(__file__).parents[2]
QUICK = ["models", "step", "resume", "throughput", "profile", "attention", "continuous", "shards", "waits"]
LONG = ["vllm", "trainer", "trl", "learning", "recipes"]


def run(folder: Path, parts: list[str]) -> dict[str, Any]:
    out, page = folder / "gpu.json", folder / "gpu.md"
    page.write_text("# Ours\n\n<!-- the rest is written by `benchmarks/gpu.py --write` -->\nold figures\n")
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--small", "--parts", *parts]
    command += ["--json", str(out), "--write", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=script_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert page.read_text().startswith("# Ours\n") and "old figures" not in page.read_text()
    assert f"### {parts[-1].capitalize()}" in page.read_text()
    assert "| wrong |" not in page.read_text()
    assert "MFU of an update at 1.5B: not measured, goal 0.45" in done.stdout
    results: dict[str, Any] = json.loads(out.read_text())
    assert set(results) == {"machine", *parts}
    return results


@pytest.mark.system
def test_every_part_of_our_own_runs(tmp_path: Path) -> None:
    results = run(tmp_path, QUICK)
    assert results["models"]["wrong"] == []
    assert results["resume"]["same_bits"]
    assert results["step"]["weights_lr"] == 0  # the CPU against itself
    assert results["attention"]["difference"] < 1e-4
    assert {"sampling_tokens_per_s", "generate_tokens_per_s"} <= set(results["throughput"]["small"])
    assert results["continuous"]["tokens_per_s"] > 0
    assert results["shards"]["read_by_shards"] and results["shards"]["gradients"] == 0
    assert {name: results["waits"][name] for name in ("sampling", "update")} == {"sampling": None, "update": None}


@pytest.mark.system
def test_the_comparisons_and_a_recipe_run(tmp_path: Path) -> None:
    results = run(tmp_path, LONG)
    for part, field in (("trainer", "tokens_per_s"), ("trl", "seconds")):
        assert len(results[part]) >= 2 and all(
            figures[field] > 0 for figures in results[part].values() if type(figures) is dict
        )
    assert len(results["learning"]["rewards"]) == 4
    assert results["recipes"]["tiny"]["base"] > 0


@pytest.fixture
def gpu_page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_page")


def table(gpu_page: Any, results: dict[str, Any], heading: str) -> dict[str, str]:
    """First and last column of a table of the page."""
    rows = gpu_page.page(results).partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return {row.split("|")[1].strip(): row.split("|")[-2].strip() for row in rows}


def test_goals_say_what_was_met_and_what_was_not_measured(gpu_page: Any) -> None:
    results = {
        "machine": "a GPU",
        "throughput": {"1.5B": {"mfu": 0.5, "as_trained": True}},
        "vllm": {"engine": 80.0, "vllm": 100.0},
        "trl": {"ours": {"seconds": 2.0, "gb": 8.0}, "trl": {"seconds": 5.0}},
    }
    assert [figure for _, _, figure in gpu_page.goals(results)] == [0.5, 0.8, 2.5, None]
    assert [*table(gpu_page, results, "goal").values()] == ["met", "missed", "met", ""]
    assert set(table(gpu_page, results, "check").values()) == {""}


def right() -> dict[str, Any]:
    """What an H200 gave, in short."""
    return {
        "machine": "a GPU",
        "models": {"rows": {}, "wrong": []},
        "step": {"weights_lr": 0.02, "sampler_difference": {"float32": {"mean": 2e-7}}},
        "resume": {"same_bits": True},
        "waits": {"sampling": 11, "update": 0},
        "shards": {"read_by_shards": True, "weights": 0.0, "gradients": 0.0},
        "attention": {"difference": 0.19},
        "learning": {"first": 0.2, "last": 0.6, "rewards": [0.2] * 20 + [0.6] * 20},
    }


WRONG = {
    "models: wrong kinds": ("models", {"wrong": ["llama"]}),
    "step: difference of a weight, learning rates": ("step", {"weights_lr": 7.0}),
    "step: sampler against trainer in float32, mean nats": ("step", {"sampler_difference": {"float32": {"mean": 0.1}}}),
    "resume: other bits": ("resume", {"same_bits": False}),
    "waits: in 64 steps of sampling": ("waits", {"sampling": 64}),
    "waits: in an update": ("waits", {"update": 1}),
    "shards: not read by shards": ("shards", {"read_by_shards": False}),
    "shards: difference of a weight": ("shards", {"weights": float("nan")}),
    "shards: difference of a gradient": ("shards", {"gradients": 1e-3}),
    "attention: FlexAttention, largest difference, nats": ("attention", {"difference": 3.0}),
    "learning: fall of the reward in 20 steps or more": ("learning", {"last": 0.1}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result_fails_its_check_alone(gpu_page: Any, name: str) -> None:
    assert gpu_page.wrong(right()) == []
    part, change = WRONG[name]
    results = right()
    results[part] |= change
    assert [check.name for check, _ in gpu_page.wrong(results)] == [name]
    assert {row for row, told in table(gpu_page, results, "check").items() if told == "wrong"} == {name}


def test_every_check_is_tried(gpu_page: Any) -> None:
    assert set(WRONG) == {check.name for check in gpu_page.CHECKS}


def test_bfloat16_is_held_against_what_it_does_to_transformers(monkeypatch: pytest.MonkeyPatch, gpu_page: Any) -> None:
    """A model whose log-probabilities are halved is off by nats, where bfloat16 rounds to hundredths."""
    gpu_checks = importlib.import_module("gpu_checks")
    found = gpu_checks.in_bfloat16("llama", "cpu")
    assert found["way"] == "packed"
    assert 0 < found["difference"] < 0.05 and 0 < found["theirs"] < 0.05
    assert not gpu_checks.is_wrong(found)
    logprobs = importlib.import_module("grpo.model.logprobs")
    true = logprobs.completion_logprobs
    monkeypatch.setattr(logprobs, "completion_logprobs", lambda *args: true(*args) / 2)
    assert gpu_checks.is_wrong(gpu_checks.in_bfloat16("llama", "cpu"))


PART = """
import sys, time
name = sys.argv[sys.argv.index("--part") + 1]
if name == "empty":
    sys.exit(print("{}"))
if name != "silent":
    print('{"rows": 1}')
print("INFO 08-01 vLLM says something, {not json}")
print("[1, 2]", flush=True)
if name == "slow":
    time.sleep(60)
if name == "failed":
    sys.exit("no such thing")
print('{"rows": 2}\\nbye' if name == "done" else "")
"""


@pytest.fixture
def gpu_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """With a script whose parts print other things between their results and after them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("gpu_run")
    (tmp_path / "gpu.py").write_text(PART)
    monkeypatch.setattr(module, "SCRIPT", tmp_path / "gpu.py")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    return module


def test_a_parts_result_is_its_last_json_object(gpu_run: Any) -> None:
    assert gpu_run.run_part("done", 30) == {"rows": 2}
    assert gpu_run.run_part("slow", 8) == {"rows": 1, "error": ["not done after 8 s"]}
    assert gpu_run.run_part("failed", 30) == {"rows": 1, "error": ["no such thing"]}
    assert gpu_run.run_part("empty", 30) == {}  # vllm where it is not installed
    assert gpu_run.run_part("silent", 30) == {"error": ["it ended without a result"]}
    assert gpu_run.last_object("INFO\n[1]\n1\nnull\n") is None


def test_the_total_stops_a_part_and_names_those_after_it(gpu_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "LEAST", 1.0)
    began = time.perf_counter()
    found = dict(gpu_run.run_parts(["done", "slow", "failed"], 30, began + gpu_run.GRACE + 9))
    assert time.perf_counter() - began < 9 + gpu_run.GRACE
    assert found["done"]["rows"] == 2 and found["failed"] is None
    assert re.fullmatch(r"not done after \d s", *found["slow"]["error"])
    assert found["slow"]["rows"] == 1


def test_the_script_ends_with_1_if_a_check_fails(
    gpu_run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`waits` prints what is too many; `shards` has no time."""
    gpu = importlib.import_module("gpu")
    found = {"resume": {"same_bits": True}, "waits": {"sampling": 64, "update": 0}, "shards": None}
    for parts, code in ((["resume"], 0), ([*found], 1)):
        monkeypatch.setattr(gpu, "run_parts", lambda names, *_: [(name, found[name]) for name in names])
        page = tmp_path / "page.md"
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--parts", *parts, "--write", str(page)])
        assert gpu.main() == code
    told = capsys.readouterr().out
    assert "wrong: waits: in 64 steps of sampling: 64, at most 12" in told
    assert "no time left of 1500 s for: shards" in told
    assert "There was no time for: shards." in page.read_text()
