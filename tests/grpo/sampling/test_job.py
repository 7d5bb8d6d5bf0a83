"""Sampling jobs: shards, journals, rounds for hard problems, engines that write text."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from pathlib import Path

import pytest

from grpo.data.records import Problem, Sample, read_samples, write_rows
from grpo.sampling.journal import Journal
from tests.support.job_runner import COMMAND, CPU, ENVIRONMENT, ROOT, metrics, result, run, user, wait_until, write_job

pytestmark = pytest.mark.system

ADDER = {"kind": "function", "function": "tests.support.user_engines:adder"}


def problems(path: Path, count: int, sources: tuple[str, ...] = ("sums",)) -> Path:
    rows = [
        Problem(f"{s}{i}", user(f"What is {i} + 1?"), str(i + 1), "number", "reasoning", "en", s)
        for s in sources
        for i in range(count)
    ]
    write_rows(path, rows, Problem)
    return path


def job(folder: Path, count: int = 40, **fields) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    sources = fields.pop("sources", ("sums",))
    task = {
        "name": "sums",
        "model": "",
        "policy": "digest",
        "problems": [problems(folder / "problems.parquet", count, sources)],
        "samples_per_problem": 4,
        "sampling": {"max_new_tokens": 10, "temperature": 0.5},
        "engine": ADDER,
        **fields,
    }
    return write_job(folder, "sample", tasks=[task], shard_size=16, hardware=CPU, scoring={"workers": 1})


def samples(folder: Path) -> list[Sample]:
    return read_samples(folder / "out" / "sums")


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("once")
    run(job(folder))
    return folder


def test_each_sample_says_what_wrote_it_for_which_problem(once):
    found = samples(once)
    assert [(s.problem_id, s.number) for s in found] == [(f"sums{i}", n) for i in range(40) for n in range(4)]
    assert {(s.engine, s.policy, s.source, s.prompt_tokens) for s in found} == {("adder 1", "digest", "sums", 7)}
    assert 60 < sum(s.rewards["accuracy"] for s in found) < 100  # half of 160
    assert result(once)["steps_completed"] == 40
    assert metrics(once)[-1]["of"] == 40
    assert sorted(path.name for path in (once / "out" / "sums").iterdir()) == [
        f"shard-0000{i}.parquet" for i in range(3)
    ]


def test_problems_without_enough_right_samples_are_asked_again(tmp_path):
    """In rounds of 2 until 2 are right, at most 6: whoever got 2 at once is not asked again."""
    run(job(tmp_path, samples_per_problem=2, enough_right=2, samples_max=6))
    found = samples(tmp_path)
    by_problem = [[s for s in found if s.problem_id == f"sums{i}"] for i in range(40)]
    assert [s.number for s in by_problem[0]] == [*range(len(by_problem[0]))]
    for of_problem in by_problem:
        right = [s.rewards["accuracy"] for s in of_problem]
        assert len(right) in (2, 4, 6)
        assert sum(right[: len(right) - 2]) < 2  # else there would have been no last round
        assert sum(right) >= 2 or len(right) == 6
    assert {len(of_problem) for of_problem in by_problem} == {2, 4, 6}


def test_the_last_round_goes_up_to_the_most_and_no_further(tmp_path):
    run(job(tmp_path, samples_per_problem=4, enough_right=9, samples_max=6))
    found = samples(tmp_path)
    assert [s.number for s in found[:6]] == [0, 1, 2, 3, 4, 5]
    assert len(found) == 40 * 6


def test_general_prompts_can_be_sampled_less_often(tmp_path):
    path = job(tmp_path, count=4, general_samples=1)
    rows = [
        Problem(f"{domain}{i}", user(f"What is {i} + 1?"), str(i + 1), "number", domain, "en", "sums")
        for i in range(4)
        for domain in ("reasoning", "general")
    ]
    write_rows(tmp_path / "problems.parquet", rows, Problem)
    run(path)
    expected = [("general0", 0), ("general1", 0), ("general2", 0), ("general3", 0)]
    expected += [(f"reasoning{i}", number) for i in range(4) for number in range(4)]
    assert sorted((s.problem_id, s.number) for s in samples(tmp_path)) == expected


def test_a_source_has_sampling_of_its_own(tmp_path):
    sampling = {"surely": {"max_new_tokens": 10, "temperature": 1.0}}
    run(job(tmp_path, count=20, sources=("sums", "surely"), sampling_by_source=sampling))
    right = {
        name: [s.rewards["accuracy"] for s in samples(tmp_path) if s.source == name] for name in ("sums", "surely")
    }
    assert set(right["surely"]) == {1.0}
    assert set(right["sums"]) == {0.0, 1.0}
    assert [s.problem_id for s in samples(tmp_path)] == [f"{s}{i}" for s in right for i in range(20) for _ in range(4)]


def test_more_problems_change_no_sample_of_those_before(once, tmp_path):
    run(job(tmp_path, count=60))
    assert samples(tmp_path)[:160] == samples(once)


@pytest.mark.slow
def test_killed_at_random_moments_the_shards_are_the_same_to_the_byte(once, tmp_path):
    """Requests that a killed worker had finished are not sent again, and two workers share the shards."""
    path, asked = job(tmp_path), tmp_path / "asked"
    environment = {**ENVIRONMENT, "R1FLOW_TEST_ASKED": str(asked), "R1FLOW_TEST_PAUSE_S": "0.02"}
    lines = lambda: asked.read_text().splitlines() if asked.exists() else []  # noqa: E731
    for point in sorted(random.Random(1).sample(range(2, 36), 4)):
        worker = subprocess.Popen([*COMMAND, path], cwd=ROOT, env=environment)
        wait_until(lambda point=point: len(lines()) >= point)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    both = [subprocess.Popen([*COMMAND, path], cwd=ROOT, env=environment) for _ in range(2)]
    assert [worker.wait(120) for worker in both] == [0, 0]
    for shard in (once / "out" / "sums").iterdir():
        assert (tmp_path / "out" / "sums" / shard.name).read_bytes() == shard.read_bytes()
    assert sorted(p.suffix for p in (tmp_path / "out" / "sums").iterdir()) == [".parquet"] * 3
    repeated = len(lines()) - 40
    assert 0 <= repeated <= 4  # a kill costs what was asked and not yet answered


def test_a_journal_is_held_by_one_and_half_a_line_is_cut_off(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.append({"a": 1})
    with pytest.raises(BlockingIOError):
        Journal(tmp_path / "j")
    journal.close()
    with (tmp_path / "j").open("ab") as file:
        file.write(b'{"b": ')
    again = Journal(tmp_path / "j")
    assert again.lines() == [{"a": 1}]
    again.append({"c": "\n"})
    assert again.lines() == [{"a": 1}, {"c": "\n"}]


def test_a_line_with_a_flipped_bit_is_not_read(tmp_path):
    journal = Journal(tmp_path / "j")
    for number in range(3):
        journal.append({"sample": f"answer {number}"})
    data = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(data.replace(b"answer 1", b"answer 3"))  # valid JSON still
    assert journal.lines() == [{"sample": "answer 0"}]
    journal.append({"sample": "answer 1"})
    assert journal.lines() == [{"sample": "answer 0"}, {"sample": "answer 1"}]
    journal.close()


def test_an_engine_that_does_not_exist_is_one_clear_line(tmp_path):
    path = job(tmp_path, engine={"kind": "function", "function": "tests.support.user_engines:nobody"})
    last = run(path, expected=2).stderr.splitlines()[-1]
    assert (
        last
        == "error: 'tests.support.user_engines:nobody': module 'tests.support.user_engines' has no function 'nobody'"
    )
    fields = json.loads(path.read_text())
    fields["tasks"][0]["engine"] = {"kind": "endpoint", "base_url": "http://127.0.0.1:9/v1", "retries": 0}
    path.write_text(json.dumps(fields))
    assert "tasks.0.engine.endpoint.model: " in run(path, expected=2).stderr.splitlines()[-1]
    assert not list((tmp_path / "out").rglob("*.parquet"))
