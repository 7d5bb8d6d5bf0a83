"""Every kind of job as it is really run: ``python -m grpo.train job.json`` in its own process, some of them killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config.common import Hardware
from grpo.data.conversations import demonstrations
from grpo.data.held_out import is_correct, read_held_out
from grpo.data.records import read_problems, read_samples
from grpo.errors import InputError
from grpo.scoring.reward_model import RewardModelScorer
from grpo.training.preferences import read_preferences
from grpo.training.pretrain import read_documents
from tests.support.job_runner import (
    COMMAND,
    CPU,
    ENVIRONMENT,
    RL,
    ROOT,
    SFT,
    kill_at,
    metrics,
    result,
    run,
    same,
    steps,
    weights,
    write_job,
)

pytestmark = pytest.mark.system


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
    written, records = result(sft), metrics(sft)
    assert written["steps_completed"] == written["steps_planned"] == 40
    assert written["counts"] == {"sequences": 25, "too_long": 0}
    assert written["metrics"] == {"loss": pytest.approx(sum(r["loss"] for r in records[-10:]) / 10)}
    assert steps(sft) == list(range(1, 41))
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
    of_pairs = {"train_pairs": 30, "held_out_pairs": 10} if loss == "pairs" else {}  # one for each prompt
    assert written["counts"] == {"train": 30, "held_out": 10, "too_long": 0, **of_pairs}
    assert written["metrics"]["held_out_accuracy"] >= 0.9  # 1.0 with every seed tried
    assert steps(reward_models[loss]) == list(range(1, written["steps_planned"] + 1))


@pytest.mark.parametrize(
    ("loss", "columns"),
    [("pairs", {"chosen": "chosen_score", "rejected": "rejected_score"}), ("points", {"response": "score"})],
)
def test_held_out_rows_are_written_with_the_saved_models_scores(reward_models, loss, columns):
    rows = read_held_out(reward_models[loss] / "out")
    assert len(rows) == 10
    assert sum(map(is_correct, rows)) / 10 == result(reward_models[loss])["metrics"]["held_out_accuracy"]
    scorer = RewardModelScorer(str(reward_models[loss] / "out"), Hardware(device="cpu"))
    for text, score in columns.items():
        again = scorer([row["messages"] for row in rows], [row[text] for row in rows])
        assert again == pytest.approx([row[score] for row in rows], abs=1e-4)


def test_sample(rl, problems, tmp_path):
    task = {
        "name": "zero.test",
        "model": rl / "out",
        "policy": "digest",
        "problems": [problems],
        "samples_per_problem": 2,
        "sampling": {"max_new_tokens": 10, "temperature": 0.6, "top_p": 0.95},
    }
    other = {**task, "name": "first", "first": {"general": 1}, "template": "r1_zero"}
    # 10 problems in shards of 4, and one problem.
    job = write_job(tmp_path, "sample", tasks=[task, other], shard_size=4, hardware=CPU)
    run(job)
    assert (result(tmp_path)["steps_completed"], result(tmp_path)["steps_planned"]) == (11, 11)  # problems
    assert metrics(tmp_path)[-1]["of"] == 11
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
    (folder / "writing-shard-00001").write_bytes(b"PAR1")
    (tmp_path / "result.json").unlink()
    run(job)
    assert result(tmp_path)["steps_completed"] == 11
    for shard, (content, changed) in before.items():
        assert shard.read_bytes() == content
        assert (shard.stat().st_mtime_ns == changed) == (shard is not shards[1])
    assert sorted(folder.iterdir()) == shards


def test_copy_model(sft, tmp_path):
    run(write_job(tmp_path, "copy_model", model=sft / "out", hardware=CPU))
    assert same(weights(tmp_path), weights(sft))
    assert result(tmp_path)["steps_completed"] == 1


@pytest.mark.parametrize(("stored", "copied"), [("bfloat16", "bfloat16"), ("float16", "float32"), ("one", "float32")])
def test_a_copy_keeps_the_type_of_the_weights_and_rounds_none(sft, tmp_path, stored, copied):
    folder = tmp_path / "model"
    shutil.copytree(sft / "out", folder)
    kept = load_file(folder / "model.safetensors")
    one_only = stored == "one"  # weights of two types
    rounded = {
        name: weight.to(torch.bfloat16 if one_only else getattr(torch, stored))
        for name, weight in kept.items()
        if not one_only or name == "model.norm.weight"
    }
    save_file(kept | rounded, folder / "model.safetensors", {"format": "pt"})
    run(write_job(tmp_path, "copy_model", model=folder, hardware=CPU))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(weight.dtype) for weight in found.values()} == {f"torch.{copied}"}
    assert all(torch.equal(found[name].float(), weight.float()) for name, weight in (kept | rounded).items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == copied


def change(**fields):
    return lambda job: {**job, **fields}


BAD = {
    "unknown kind": (change(kind="ppo"), "kind is 'ppo'; it must be one of"),
    "no kind": (change(kind=None), "kind is None"),
    "kind is a list": (change(kind=["sft"]), "kind is ['sft']"),
    "unknown key": (lambda job: {**job, "settings": {**RL, "learning_rate": 1}}, "settings.learning_rate: "),
    "out of range": (lambda job: {**job, "settings": {**RL, "group_size": 1}}, "settings.group_size: "),
    "contradiction": (lambda job: {**job, "settings": {**RL, "general_last_steps": 99}}, "exceeds steps (40)"),
    "pairs' options for points": (
        lambda job: {
            **{name: value for name, value in job.items() if name != "problems"},
            **{"kind": "reward_model", "settings": {**SFT, "margin": 0.5}, "data": "/no/data", "loss": "points"},
        },
        "margin and centring are for pairs",
    ),
    "missing key": (lambda job: {k: v for k, v in job.items() if k != "seed"}, "seed: "),
    "not an object": (lambda job: [job], "kind is None"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_job_is_named_in_the_last_line(name, tmp_path):
    changed, says = BAD[name]
    path = write_job(tmp_path, "rl", settings=RL, model="/no/model", problems=["/no/problems"])
    path.write_text(json.dumps(changed(json.loads(path.read_text()))))
    last = run(path, expected=2).stderr.splitlines()[-1]
    assert last.startswith(f"error: {path}: ")
    assert says in last


def test_a_job_that_is_not_json(tmp_path):
    (tmp_path / "job.json").write_text("{")
    assert run(tmp_path / "job.json", expected=2).stderr.startswith("error: ")
    assert run(tmp_path / "none.json", expected=2).stderr.startswith("error: ")


def unreadable(path: Path) -> dict[str, Callable[[], Any]]:
    return {
        "corpus": lambda: read_documents(path),
        "sft": lambda: list(demonstrations(path)),
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


def test_a_trainer_whose_parent_is_already_gone_does_not_start(tmp_path):
    environment = {**ENVIRONMENT, "R1FLOW_PARENT_PID": "1" if os.getpid() != 1 else "2"}
    done = subprocess.run([*COMMAND, tmp_path / "none.json"], cwd=ROOT, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (1, b"")
