"""One sampling job with three engines: transformers, vLLM with the policy's weights sent to it, and an endpoint."""

from __future__ import annotations

import pytest

from grpo.data.records import Problem, Sample, read_samples, write_rows
from tests.support.job_runner import CPU, ROOT, result, run, user, write_job
from tests.support.vllm_models import needs_vllm, tiny_llama
from tests.support.vllm_server import served

SMOLLM = ROOT / "build/real_model/SmolLM2-135M-Instruct"
MODELS = {
    "tiny": lambda folder: tiny_llama(folder / "model", tied=True),
    "SmolLM2-135M": lambda folder: str(SMOLLM),
}


def sampled(folder, model: str, engine: dict | None, template: str = "chat") -> list[Sample]:
    folder.mkdir()
    questions = [
        Problem(f"q{i}", user(f"What is {i} + 1?"), str(i + 1), "number", "reasoning", "en", "sums") for i in range(6)
    ]
    write_rows(folder / "problems.parquet", questions, Problem)
    task = {
        "name": "sums",
        "model": model,
        "policy": "digest",
        "problems": [folder / "problems.parquet"],
        "samples_per_problem": 3,
        "sampling": {"max_new_tokens": 32, "temperature": 0.8, "top_p": 0.95},
        "engine": engine,
        "template": template,
    }
    run(write_job(folder, "sample", tasks=[task], hardware=CPU, scoring={"workers": 1}), timeout=580)
    assert result(folder)["steps_completed"] == 6
    return read_samples(folder / "out" / "sums")


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("name", MODELS)
def test_three_engines_write_one_format(name, tmp_path):
    if name != "tiny" and not SMOLLM.is_dir():
        pytest.skip("benchmarks/real_model.py makes the model")
    model = MODELS[name](tmp_path)
    with served(model, tmp_path / "log") as (url, _):
        engines = {
            "endpoint": {"kind": "endpoint", "base_url": f"{url}/v1", "model": model, "retries": 12, "timeout_s": 300},
            "server": {"kind": "server", "url": url, "retries": 12, "timeout_s": 300},
            "transformers": None,
        }
        found = {kind: sampled(tmp_path / kind, model, engine) for kind, engine in engines.items()}
        zero = sampled(tmp_path / "zero", model, engines["endpoint"], template="r1_zero")
    for samples in (*found.values(), zero):
        assert [(s.problem_id, s.number) for s in samples] == [(f"q{i}", n) for i in range(6) for n in range(3)]
        assert all(s.rewards.keys() == {"accuracy", "format", "language"} for s in samples)
        assert all(0 < s.tokens <= 32 and s.prompt_tokens > 3 for s in samples)
        assert len({s.completion for s in samples}) > 12
    identities = {kind: {s.engine for s in samples} for kind, samples in found.items()}
    assert identities["endpoint"] == {f"{model} at {url}/v1"}
    assert identities["server"] == {f"vllm server {url}"}
    assert all(engine.startswith("transformers ") for engine in identities["transformers"])
    lengths = {kind: [s.prompt_tokens for s in samples] for kind, samples in found.items()}
    assert lengths["endpoint"] == lengths["server"] == lengths["transformers"]
