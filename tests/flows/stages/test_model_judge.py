"""Rejection sampling whose answers a real model judges: what is kept, what is counted, and what is asked again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.stages.problems import HELD_OUT, TRAIN
from flows.stages.sft_data import SAMPLES
from grpo.data.records import Problem, Sample, read_rows, write_rows
from tasks.store.manifest import artifact_key
from tasks.store.store import Store
from tests.support.job_runner import user
from tests.support.judge_model import train_judge

pytestmark = pytest.mark.slow

SETTINGS = [
    'sft_data.engine={kind="function",function="tests.support.user_engines:adder"}',
    "sft_data.problems=100",
    "sft_data.general=0",
    "sft_data.samples_per_problem=8",
    "sft_data.sampling={temperature=0.5,max_new_tokens=32}",  # right every second time
    "sft_data.filters={language_min=0}",
    "sft_data.keep_per_problem=8",
]


def asked(first: int, source: str, verifier: str) -> list[Problem]:
    return [
        Problem(f"{source}{i}", user(f"What is {i} + 1?"), str(i + 1), verifier, "reasoning", "en", source)
        for i in range(first, 9, 2)
    ]


def publish(home: Path, name: str, *problems: Problem) -> str:
    with Store(home).attempt(name, artifact_key(name, 1, {}, {})) as attempt:
        if problems:
            write_rows(attempt.out / TRAIN, problems, Problem)
            write_rows(attempt.out / HELD_OUT, [], Problem)
        else:
            (attempt.out / "no-weights").touch()
        return attempt.publish(stage_version=1, config={}).key


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pairs = [(f"What is {i} + 1?", str(i + 1), str(i + 1 + off)) for i in range(9) for off in range(10)]
    return train_judge(tmp_path_factory.mktemp("judge"), pairs)


def test_a_model_judges_what_has_no_rule(tmp_path: Path, r1: Any, judge: Path) -> None:
    command = type(r1)(tmp_path)
    problems = publish(tmp_path, "problems", *asked(0, "ruled", "number"), *asked(1, "judged", "judge"))
    inputs = ["--input", f"problems={problems}", "--input", f"reasoning_rl={publish(tmp_path, 'reasoning_rl')}"]

    def run(**judged: Any) -> Any:
        fields = {"kind": "local", "path": str(judge), "device": "cpu", "max_tokens": 32, "calibration": 40}
        fields |= {"batch_size": 1, **judged}
        model = ",".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
        sets = [part for value in [*SETTINGS, f"sft_data.judge={{{model}}}"] for part in ("--set", value)]
        return command("run", "tiny", "--only", "sft_data", *sets, *inputs, "--json")

    def stage(done: Any) -> dict[str, Any]:
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])["stages"][0]

    # The budget is spent after a few replies, which are not asked for again with more of it.
    stopped = run(budget_requests=5)
    assert stopped.returncode == 2 and "judge: budget_requests is spent" in stopped.stderr.splitlines()[-1]
    first = stage(run())
    manifest = Store(tmp_path).resolve(first["key"])
    answers = {problem.id: problem.answer for problem in [*asked(0, "ruled", "number"), *asked(1, "judged", "judge")]}
    samples = list(read_rows(manifest.path / SAMPLES, Sample))
    judged = [sample for sample in samples if sample.source == "judged"]
    # The model's verdicts, one for each problem and answer, are what those samples were scored by.
    verdicts = {(sample.problem_id, sample.answer): sample.rewards["judge"] for sample in judged}
    assert len(judged) == 4 * 8 and {sample.rewards["judge"] for sample in judged} == {0.0, 1.0}
    assert all(sample.rewards["accuracy"] == verdicts[sample.problem_id, sample.answer] for sample in judged)
    agreeing = sum((sample.answer == answers[sample.problem_id]) == sample.rewards["judge"] for sample in judged)
    assert agreeing / len(judged) > 0.6
    assert all(sample.verdict == "dropped" for sample in judged if sample.rewards["accuracy"] == 0)
    assert any(sample.verdict == "kept" for sample in judged)
    # The manifest has the counts, and the agreement on answers that a rule had verified.
    assert manifest.counts["reasoning_sampled"] == (5 + 4) * 8
    assert 0.6 < manifest.metrics["judge_agreement"] <= 1 and manifest.metrics["judge_undecided_share"] == 0
    # Equal answers are asked about once, and what the first run was told is not asked again.
    judged_again, known = manifest.metrics["answers_judged"], manifest.metrics["judge_replies_known"]
    assert known > 0 and judged_again - known + 5 == len(verdicts) and manifest.metrics["answers_undecided"] == 0
    assert first["status"] == "ran" and stage(run())["status"] == "reused"
