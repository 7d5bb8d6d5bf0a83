"""Every kind of job as it is really run: ``python -m grpo.train job.json`` in its own process, some of them killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config import SFTJob
from grpo.data import Problem, read_problems, read_samples, write_rows
from grpo.errors import InputError
from grpo.pretrain import read_documents
from grpo.reward_model import read_preferences
from grpo.sft import read_pairs

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "grpo.train"]
CPU = {"device": "cpu"}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT.pop("R1FLOW_PARENT_PID", None)


def write_job(folder: Path, kind: str, **fields) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: str(folder / name) for name in ("out", "state")}
    job = {"kind": kind, **own, "metrics": str(folder / "metrics.jsonl"), "result": str(folder / "result.json")}
    path = folder / "job.json"
    path.write_text(json.dumps({**job, "seed": 0, **fields}, default=str))
    return path


def run(path: Path, expected: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*COMMAND, path], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == expected, done.stderr
    return done


def kill_at(path: Path, step: int) -> None:
    """Start the job and kill it once `step` stands in its metrics."""
    process = subprocess.Popen([*COMMAND, path], cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: process.poll() is not None or len(metrics(path.parent)) >= step)
    finally:
        process.kill()
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    assert not (path.parent / "result.json").exists()


def wait_until(condition, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def metrics(folder: Path) -> list[dict]:
    """The complete lines."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in metrics(folder)]


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


PRETRAIN = {
    "vocabulary": 300,
    "hidden": 32,
    "feed_forward": 64,
    "layers": 2,
    "heads": 2,
    "context": 128,
    "batch_size": 4,
    "steps": 30,
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 3},
    "hardware": CPU,
}
SFT = {
    "epochs": 10,
    "batch_size": 8,
    "micro_batch_size": 4,
    "max_tokens": 64,
    "optimizer": {"learning_rate": 0.01, "final_learning_rate_share": 0.1},
    "hardware": CPU,
    "save_every": 10,
}
GRPO = {
    "steps": 40,
    "prompts_per_step": 2,
    "group_size": 4,
    "minibatches": 2,
    "clip_eps_low": 10,
    "clip_eps_high": 10,
    "kl_coef": 0.01,
    "reference_refresh_steps": 5,
    "sampling": {"max_new_tokens": 10, "batch_size": 16},
    "micro_batch_tokens": 128,
    "optimizer": {"learning_rate": 0.003},
    "hardware": CPU,
    "save_every": 6,
    "samples_every": 10,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    sums = [f"What is {a} + {b}? <think>add</think><answer>{a + b}</answer>" for a in range(5) for b in range(5)]
    (folder / "corpus.txt").write_text("\n\n".join(sums * 8))
    run(write_job(folder, "pretrain", settings=PRETRAIN, corpus=folder / "corpus.txt"))
    return folder


@pytest.fixture(scope="module")
def sft_fields(base) -> dict:
    """Answers drawn at random, so that the policy trained on them is right sometimes: GRPO needs the variance."""
    rng = random.Random(0)
    questions = [user(f"What is {a} + {b}?") for a in range(5) for b in range(5)]
    completions = [f"<think>add</think><answer>{rng.randint(1, 3)}</answer>" for _ in questions]
    rows = [{"messages": q, "completion": c} for q, c in zip(questions, completions, strict=True)]
    pq.write_table(pa.Table.from_pylist(rows), base / "sft.parquet")
    return {"settings": SFT, "model": base / "out", "data": base / "sft.parquet"}


@pytest.fixture(scope="module")
def sft(sft_fields, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    run(write_job(folder, "sft", **sft_fields))
    return folder


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("problems")
    rows = [
        Problem(f"{a}+{b}", user(f"What is {a} + {b}?"), str(a + b), "number", "reasoning", "en", "test")
        for a in range(4)
        for b in range(1, 4)
        if a + b <= 3
    ]
    general = [Problem(f"g{i}", user(f"Say {i}"), "", "none", "general", "en", "test") for i in range(4)]
    write_rows(folder / "problems.parquet", rows + general, Problem)
    return folder / "problems.parquet"


@pytest.fixture(scope="module")
def grpo_fields(sft, problems) -> dict:
    return {"settings": GRPO, "model": sft / "out", "problems": [problems]}


@pytest.fixture(scope="module")
def grpo(grpo_fields, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    run(write_job(folder, "grpo", **grpo_fields))
    return folder


@pytest.fixture(scope="module")
def reward_models(sft, tmp_path_factory) -> dict[str, Path]:
    """Trained on what is plain to see: 'yes' is better, and safer, than 'no'."""
    folders = {}
    pairs = [
        {"messages": user(f"Say {i}"), "chosen": f"yes {i % 7}", "rejected": f"no {i % 5}", "held_out": i % 4 == 0}
        for i in range(40)
    ]
    points = [
        {"messages": user(f"Say {i % 7}"), "response": ["no", "yes"][i % 2], "label": i % 2, "held_out": i % 8 < 2}
        for i in range(40)
    ]
    settings = {**SFT, "optimizer": {"learning_rate": 0.003, "warmup_steps": 4, "final_learning_rate_share": 0.1}}
    for loss, rows in (("pairs", pairs), ("points", points)):
        folder = tmp_path_factory.mktemp(loss)
        pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
        fields = {"settings": settings, "model": sft / "out", "data": folder / "data.parquet", "loss": loss}
        run(write_job(folder, "reward_model", **fields))
        folders[loss] = folder
    return folders


def test_pretrain(base):
    written = result(base)
    assert written["steps_completed"] == written["steps_planned"] == 30
    assert written["counts"]["documents"] == 200
    assert steps(base) == list(range(1, 31))
    losses = [record["loss"] for record in metrics(base)]
    assert losses[-1] < losses[0] / 2
    model = AutoModelForCausalLM.from_pretrained(base / "out")
    assert written["counts"]["parameters"] == sum(p.numel() for p in model.parameters())
    tokenizer = AutoTokenizer.from_pretrained(base / "out")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")


def test_sft(sft):
    # 25 rows in batches of 8 are 4 steps an epoch.
    assert result(sft) == {"steps_completed": 40, "steps_planned": 40, "counts": {"sequences": 25, "too_long": 0}}
    assert steps(sft) == list(range(1, 41))
    records = metrics(sft)
    assert records[-1]["loss"] < records[0]["loss"] / 2
    assert records[0]["tokens_per_s"] > 0
    # Half a cosine from 0.01 to a tenth of it; at the middle, 0.55 of it.
    rates = {record["step"]: record["learning_rate"] for record in records}
    assert rates[20] == pytest.approx(0.0055, rel=0.1)
    assert rates[40] == pytest.approx(0.001, rel=0.05)


def test_a_killed_sft_job_ends_where_an_undisturbed_one_does(sft, sft_fields, tmp_path):
    job = write_job(tmp_path, "sft", **sft_fields)
    kill_at(job, 13)
    run(job)
    assert steps(tmp_path) == list(range(1, 41))
    assert [r["loss"] for r in metrics(tmp_path)] == [r["loss"] for r in metrics(sft)]
    assert same(weights(tmp_path), weights(sft))


@pytest.mark.parametrize("loss", ["pairs", "points"])
def test_reward_model(reward_models, loss):
    written = result(reward_models[loss])
    assert written["counts"] == {"train": 30, "held_out": 10, "too_long": 0}
    assert written["metrics"]["held_out_accuracy"] >= 0.9  # 1.0 with every seed tried
    assert steps(reward_models[loss]) == list(range(1, written["steps_planned"] + 1))


def test_grpo(grpo, sft):
    written = result(grpo)
    assert written["steps_completed"] == written["steps_planned"] == 40
    records = metrics(grpo)
    assert steps(grpo) == list(range(1, 41))
    assert any(0 < r["zero_variance_share"] < 1 for r in records)
    assert all(0 <= r["reward_accuracy"] <= 1 and r["reward_format"] > 0.5 for r in records)
    # Sampler and trainer agree; only a rollout's first minibatch can tell.
    assert [r["step"] for r in records if "logprob_mismatch" in r] == list(range(1, 41, 2))
    assert max(r.get("logprob_mismatch", 0) for r in records) < 1e-4
    assert records[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert max(r["kl"] for r in records) > 1e-4
    AutoModelForCausalLM.from_pretrained(grpo / "out")
    assert not same(weights(grpo), weights(sft))
    assert {s["step"] for s in written["samples"]} == {8, 18, 28, 38}
    assert written["samples"][0].keys() >= {"problem", "gold", "completion", "reward", "advantage", "accuracy"}


def test_a_killed_grpo_job_ends_where_an_undisturbed_one_does(grpo, grpo_fields, tmp_path):
    job = write_job(tmp_path, "grpo", **grpo_fields)
    kill_at(job, 15)
    run(job)
    assert steps(tmp_path) == list(range(1, 41))
    assert [r["reward"] for r in metrics(tmp_path)] == [r["reward"] for r in metrics(grpo)]
    assert same(weights(tmp_path), weights(grpo))
    assert result(tmp_path) == result(grpo)


def test_general_prompts_join_in_the_last_steps(sft, problems, reward_models, tmp_path):
    settings = {
        **GRPO,
        "steps": 4,
        "minibatches": 1,
        "kl_coef": 0,
        "general_last_steps": 2,
        "general_share": 0.5,
        "rewards": {"helpful": 0.1, "safe": 1, "language": 1},
    }
    fields = {"settings": settings, "model": sft / "out", "problems": [problems]}
    models = {"helpful_model": reward_models["pairs"] / "out", "safe_model": reward_models["points"] / "out"}
    run(write_job(tmp_path, "grpo", **fields, **models))
    records = metrics(tmp_path)
    for name in ("reward_helpful", "reward_safe"):
        assert [name in r for r in records] == [False, False, True, True]
    assert all("reward_accuracy" in r and "kl" not in r for r in records)


def test_sample(grpo, problems, tmp_path):
    task = {
        "name": "zero.test",
        "model": grpo / "out",
        "policy": "digest",
        "problems": [problems],
        "samples_per_problem": 2,
        "sampling": {"max_new_tokens": 10, "temperature": 0.6, "top_p": 0.95},
    }
    other = {**task, "name": "first", "first": {"general": 1}, "template": "r1_zero"}
    # 10 problems in shards of 4, and one problem.
    job = write_job(tmp_path, "sample", tasks=[task, other], shard_size=4, hardware=CPU)
    run(job)
    assert (result(tmp_path)["steps_completed"], result(tmp_path)["steps_planned"]) == (4, 4)
    assert steps(tmp_path) == [1, 2, 3, 4]
    folder = tmp_path / "out" / "zero.test"
    shards = sorted(folder.iterdir())
    assert [s.name for s in shards] == ["shard-00000.parquet", "shard-00001.parquet", "shard-00002.parquet"]
    samples = read_samples(folder)
    assert len(samples) == 20
    assert [s.problem_id for s in samples[:4]] == ["0+1", "0+1", "0+2", "0+2"]
    assert all(s.policy == "digest" and s.finish_reason in ("stop", "length") for s in samples)
    assert all(("accuracy" in s.rewards) == (s.domain == "reasoning") for s in samples)
    assert [s.problem_id for s in read_samples(tmp_path / "out" / "first")] == ["g0", "g0"]

    # A job killed in its second shard leaves half a file aside and no result.
    before = {shard: (shard.read_bytes(), shard.stat().st_mtime_ns) for shard in shards}
    shards[1].unlink()
    (folder / "writing").write_bytes(b"PAR1")
    (tmp_path / "result.json").unlink()
    run(job)
    assert result(tmp_path)["steps_completed"] == 4
    for shard, (content, changed) in before.items():
        assert shard.read_bytes() == content
        assert (shard.stat().st_mtime_ns == changed) == (shard is not shards[1])
    assert sorted(folder.iterdir()) == shards


def test_copy_model(sft, tmp_path):
    run(write_job(tmp_path, "copy_model", model=sft / "out", hardware=CPU))
    assert same(weights(tmp_path), weights(sft))
    assert result(tmp_path)["steps_completed"] == 1


def change(**fields):
    return lambda job: {**job, **fields}


BAD = {
    "unknown kind": (change(kind="ppo"), "kind is 'ppo'; it must be one of"),
    "no kind": (change(kind=None), "kind is None"),
    "kind is a list": (change(kind=["sft"]), "kind is ['sft']"),
    "unknown key": (lambda job: {**job, "settings": {**GRPO, "learning_rate": 1}}, "settings.learning_rate: "),
    "out of range": (lambda job: {**job, "settings": {**GRPO, "group_size": 1}}, "settings.group_size: "),
    "contradiction": (lambda job: {**job, "settings": {**GRPO, "general_last_steps": 99}}, "exceeds steps (40)"),
    "missing key": (lambda job: {k: v for k, v in job.items() if k != "seed"}, "seed: "),
    "not an object": (lambda job: [job], "kind is None"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_job_is_named_in_the_last_line(name, tmp_path):
    changed, says = BAD[name]
    path = write_job(tmp_path, "grpo", settings=GRPO, model="/no/model", problems=["/no/problems"])
    path.write_text(json.dumps(changed(json.loads(path.read_text()))))
    last = run(path, expected=2).stderr.splitlines()[-1]
    assert last.startswith(f"error: {path}: ")
    assert says in last


def test_a_job_that_is_not_json(tmp_path):
    (tmp_path / "job.json").write_text("{")
    assert run(tmp_path / "job.json", expected=2).stderr.startswith("error: ")
    assert run(tmp_path / "none.json", expected=2).stderr.startswith("error: ")


def unreadable(path: Path) -> dict[str, Callable[[], Any]]:
    job = {name: Path("unused") for name in ("out", "state", "metrics", "result")}
    return {
        "corpus": lambda: read_documents(path),
        "sft": lambda: read_pairs(SFTJob(settings=SFT, model="unused", data=path, seed=0, **job)),
        "pairs": lambda: read_preferences(path, "pairs"),
        "points": lambda: read_preferences(path, "points"),
        "problems": lambda: read_problems([path]),
    }


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe not parquet, nor text", b"PAR1"])
@pytest.mark.parametrize("kind", unreadable(Path()))
def test_unreadable_input_is_named(kind, content, tmp_path):
    path = tmp_path / "input"
    if content is not None:
        path.write_bytes(content)
    if (kind, content) == ("corpus", b"PAR1"):
        return  # it is text
    with pytest.raises(InputError) as caught:
        unreadable(path)[kind]()
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["sft", "pairs", "points", "problems"])
def test_a_missing_column_is_named(kind, tmp_path):
    path = tmp_path / "input.parquet"
    pq.write_table(pa.table({"other": [1]}), path)
    with pytest.raises(InputError, match=r"column '[a-z_]+' is missing"):
        unreadable(path)[kind]()


def test_missing_input_ends_a_job(model_folder, tmp_path):
    fields = {"settings": SFT, "model": model_folder, "data": "/no/such/input"}
    last = run(write_job(tmp_path, "sft", **fields), expected=2).stderr.splitlines()[-1]
    assert last.startswith("error: /no/such/input: ")


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_trainer_dies_with_its_parent(grpo_fields, tmp_path):
    job = write_job(tmp_path, "grpo", **{**grpo_fields, "settings": {**GRPO, "steps": 100_000}})
    script = (
        "import os, subprocess, sys\n"
        "os.environ['R1FLOW_PARENT_PID'] = str(os.getpid())\n"
        "child = subprocess.Popen(sys.argv[1:])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *COMMAND, job], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    trainer = int(parent.stdout.readline())
    try:
        wait_until(lambda: metrics(tmp_path))
        assert alive(trainer)
    finally:
        parent.kill()
        parent.communicate()
    try:
        wait_until(lambda: not alive(trainer), timeout=5)
    finally:
        if alive(trainer):
            os.kill(trainer, signal.SIGKILL)


def test_a_trainer_whose_parent_is_already_gone_does_not_start(tmp_path):
    environment = {**ENVIRONMENT, "R1FLOW_PARENT_PID": "1" if os.getpid() != 1 else "2"}
    done = subprocess.run([*COMMAND, tmp_path / "none.json"], cwd=ROOT, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (1, b"")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
