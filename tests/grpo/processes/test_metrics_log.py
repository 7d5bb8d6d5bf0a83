"""metrics.jsonl and result.json, as a resumed job finds and leaves them."""

from __future__ import annotations

import json

import pytest

from grpo.processes.metrics_log import Metrics, closing_means, replace_text, write_result


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_is_there_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.log(1, 2, loss=0.5)
    assert records(path) == [{"step": 1, "of": 2, "loss": 0.5}]
    metrics.log(2, 2, loss=0.25)
    assert [r["step"] for r in records(path)] == [1, 2]


def test_resuming_drops_what_comes_after_the_checkpoint_and_half_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "of": 4}\n{"step": 2, "of": 4}\n{"step": 3, "of": 4}\n{"step": 4, "o')
    metrics = Metrics(path, resume_step=2)
    assert [r["step"] for r in records(path)] == [1, 2]
    metrics.log(3, 4)
    assert [r["step"] for r in records(path)] == [1, 2, 3]


def test_the_end_of_a_run_is_the_mean_of_its_last_steps(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for step, loss in enumerate([9.0, 4.0, 2.0, 1.0]):
        metrics.log(step + 1, 4, loss=loss, grad_norm=1.0)
    metrics.log(5, 5, loss=3.0, grad_norm=1.0, seldom=7.0)
    assert closing_means(metrics.path, lambda name: name in ("loss", "seldom"), last=3) == {"loss": 2.0, "seldom": 7.0}


def test_what_the_last_step_did_not_measure_is_in_the_end_of_a_run_too(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for step, measured in enumerate([{"reward_accuracy": 0.0}, {"reward_accuracy": 0.5}, {}], 1):
        metrics.log(step, 3, reward=1.0, **measured)
    # The last two steps: a rollout of reasoning problems, then one of general prompts alone.
    assert closing_means(metrics.path, lambda name: name.startswith("reward"), last=2) == {
        "reward": 1.0,
        "reward_accuracy": 0.5,
    }


@pytest.mark.parametrize("half", ["", "{", '{"st', '{"step"', '{"step": 2', '{"of": 4}'])
def test_half_a_line_is_dropped(tmp_path, half):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + half)
    Metrics(path, resume_step=2)
    assert path.read_text() == '{"step": 1}\n'


def test_a_job_without_checkpoint_starts_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "of": 4}\n')
    Metrics(path)
    assert path.read_text() == ""


def test_result(tmp_path):
    write_result(tmp_path / "result.json", 3, 4, counts={"sequences": 5})
    result = json.loads((tmp_path / "result.json").read_text())
    assert result == {"steps_completed": 3, "steps_planned": 4, "counts": {"sequences": 5}}


def test_replaced_text_is_the_old_or_the_new(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace_text(path, "old")

    def killed(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("grpo.processes.metrics_log.os.fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            replace_text(path, "new")
    assert path.read_text() == "old"
    replace_text(path, "new")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_closing_means_of_what_is_not_in_every_step(tmp_path):
    """A count is 0 in a step that lacks it; an accuracy was not measured."""
    lines = [{"reward_failures": 0.0}] * 9 + [
        {"reward_failures": 40.0, "reward_failures_timeout": 40.0, "accuracy": 0.5}
    ]
    (tmp_path / "m").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = closing_means(tmp_path / "m", lambda name: True, counts=lambda name: name.endswith("_timeout"))
    assert found == {"reward_failures": 4.0, "reward_failures_timeout": 4.0, "accuracy": 0.5}
