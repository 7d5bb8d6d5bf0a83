"""Labels of steps from given rollouts, scores where steps end, and a process reward model that is really trained."""

from __future__ import annotations

import importlib
import math
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from grpo.algorithms.advantages import process_advantages
from grpo.config.common import Hardware
from grpo.config.rl import RL
from grpo.config.scoring import Scoring
from grpo.data.held_out import read_held_out
from grpo.data.records import Problem, Sample, write_rows
from grpo.data.template import parse
from grpo.errors import InputError
from grpo.model.loading import REWARD_MODEL, load_model
from grpo.rewards.functions import Response
from grpo.rewards.steps import split_steps
from grpo.scoring.reward_model import score_rows
from grpo.scoring.scorer import Scorer
from grpo.scoring.step_model import StepScorer, step_logits, steps_of
from grpo.train import RUNNERS, read_job
from grpo.training.process_reward_model import agreement, hard, soft, step_loss
from grpo.training.step_labels import chains_of, label_row, prefix_to
from tests.support.job_runner import CPU, PRETRAIN, SFT, metrics, result, run, same, user, weights, write_job
from tests.support.job_runner import RL as RL_SETTINGS

TEXT = "<think>\nadd 1  \n\nadd 2</think>\n<answer>3</answer>"
ENDS = [13, 22]  # "<think>\n" has 8 characters, "add 1" 5; two spaces and two line breaks later "add 2" begins at 17


def asked(name: str = "p", domain: str = "reasoning") -> Problem:
    return Problem(name, user(f"What is 1 + 2, {name}?"), "3", "number", domain, "en", "test")


def written(text: str, problem: Problem) -> Sample:
    rest = {"policy": "x", "reasoning": "", "summary": "", "answer": "", "rewards": {}, "tokens": 1}
    return Sample(
        problem_id=problem.id, completion=text, finish_reason="stop", domain=problem.domain, language="en", **rest
    )


def test_labels_by_hand():
    # Of 8 rollouts 0, 1 and 6 are right.
    assert [hard(n, 8) for n in (0, 1, 6)] == [0, 1, 1]
    assert [soft(n, 8) for n in (0, 1, 6)] == [0, 0.125, 0.75]


def test_a_prefix_ends_where_the_next_line_begins():
    assert [prefix_to(TEXT, end) for end in ENDS] == ["<think>\nadd 1  \n", "<think>\nadd 1  \n\nadd 2"]


def test_chains_are_distinct_completions_of_reasoning_problems_that_have_steps():
    one, other, general = asked("a"), asked("b"), asked("c", "general")
    texts = [(TEXT, one), (TEXT, one), (TEXT, other), ("<answer>3</answer>", other), (TEXT, general)]
    chains = chains_of([one, other, general], [written(text, problem) for text, problem in texts])
    assert [(chain.problem.id, chain.ends) for chain in chains] == [("a", ENDS), ("b", ENDS)]
    row = label_row(chains[0], [2, 0], 4, 0.15)
    assert (row["right"], row["rollouts"], row["ends"]) == ([2, 0], 4, ENDS)
    with pytest.raises(InputError, match="problem 'b' is not among the problems"):
        chains_of([one], [written(TEXT, other)])


def test_chains_of_one_problem_are_on_one_side():
    sides = {
        share: [label_row(chains_of([p], [written(TEXT, p)])[0], [0, 0], 1, share)["held_out"] for p in many]
        for many in [[asked(str(i)) for i in range(100)]]
        for share in (0.01, 0.5, 0.99)
    }
    assert sum(sides[0.01]) < 10 < 30 < sum(sides[0.5]) < 70 < 90 < sum(sides[0.99])
    assert all(half for low, half in zip(sides[0.01], sides[0.5], strict=True) if low)


def test_a_score_is_read_at_the_token_that_ends_the_step(tokenizer, model_folder):
    read = steps_of(tokenizer, user("?"), TEXT, ENDS, (1.0, 0.0))
    up_to = [tokenizer.decode(read.rests[0][: place + 1]) for place in read.places]
    assert [text.rstrip() for text in up_to] == [TEXT[:end] for end in ENDS]
    assert (len(read.rests[0]), read.weight, read.labels) == (read.places[-1] + 1, 2, (1.0, 0.0))
    model = load_model(REWARD_MODEL, model_folder, Hardware(device="cpu"))
    with torch.no_grad():
        # The head at a step's end is what the model says of the sequence that ends there.
        expected = [score_rows(model, [read.prompts[0] + read.rests[0][: place + 1]]).item() for place in read.places]
        assert step_logits(model, [read]).tolist() == pytest.approx(expected, abs=1e-4)
        together = step_logits(model, [steps_of(tokenizer, user("!"), TEXT, ENDS[:1]), read]).tolist()
    assert together[1:] == pytest.approx(expected, abs=1e-4)


def test_the_loss_is_a_sum_over_steps(tokenizer, monkeypatch):
    # Logits ln 3 and 0: -ln 3/4 for a right step, -(0.25 ln 1/2 + 0.75 ln 1/2) = ln 2 for a soft label of a quarter.
    read = steps_of(tokenizer, user("?"), TEXT, ENDS, (1.0, 0.25))
    monkeypatch.setattr(
        "grpo.training.process_reward_model.step_logits", lambda model, examples: torch.tensor([math.log(3), 0.0])
    )
    assert step_loss(None, [read]).item() == pytest.approx(math.log(4 / 3) + math.log(2))


def test_agreement_by_hand():
    # Steps 1, 1, 0 and a soft 0.25 against 0.9, 0.4, 0.2 and 0.6: two of four are right; guessing gets half.
    found = agreement([(1, 1, 0), (0.25,)], [[0.9, 0.4, 0.2], [0.6]])
    assert found == {"held_out_accuracy": 0.5, "held_out_majority": 0.5}


def test_advantages_from_given_scores():
    # Scores 1 and 0 of one completion's steps, 0 and 1 of another's: mean 1/2, deviation 1/2, so +1, -1 and -1, +1.
    # A token's advantage is the sum over the steps that end at it or later.
    table = process_advantages([[1.0, 0.0], [0.0, 1.0]], [[1, 3], [0, 2]], [4, 3], "population")
    assert table.tolist() == [[0, 0, -1, -1], [0, 1, 1, 0]]


def test_a_folder_that_is_no_process_reward_model_is_refused(model_folder):
    with pytest.raises(InputError, match="no process reward model; jobs of kind process_reward_model train one"):
        StepScorer(model_folder, Hardware(device="cpu"))
    assert RL.model_validate({**RL_SETTINGS, "supervision": "process", "step_reward": "./prm"}).step_reward == "./prm"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ends": [], "right": []}, "ends is []; needed are ascending offsets in the response, from 1 to "),
        ({"ends": [22, 13]}, "ends is [22, 13]; needed are ascending"),
        ({"ends": [0, 22]}, "ends is [0, 22]; needed are ascending"),
        ({"ends": [13, 99]}, "ends is [13, 99]; needed are ascending"),
        ({"right": [4]}, "right has 1 numbers, and ends 2; one for each step is needed"),
        ({"rollouts": 0, "right": [0, 0]}, "right is [0, 0] of 0 rollouts; each must be in 0 to rollouts, 1 or more"),
        ({"right": [4, 5]}, "right is [4, 5] of 4 rollouts; each must be in 0 to rollouts, 1 or more"),
    ],
)
def test_labels_that_cannot_be_are_named_by_file_and_row(model_folder, tmp_path, fields, words):
    (made,) = chains_of([asked()], [written(TEXT, asked())])
    good = label_row(made, [4, 0], 4, 0.15)
    file = tmp_path / "labels.parquet"
    pq.write_table(pa.Table.from_pylist([good, {**good, **fields}]), file)
    with pytest.raises(InputError, match="^" + re.escape(f"{file}, row 2: {words}")):
        run_job(tmp_path, "process_reward_model", settings={**SFT, "label": "soft"}, model=model_folder, data=file)


# A chain has three steps. One of them may be a guess, which is never made good: the answer is then "no", else "yes".
LENGTH, SOUND, GUESS = 3, ("add", "carry", "check"), "guess"


def chain(guess: int | None, rng: random.Random) -> str:
    """Sound steps, but for a guess at the place `guess`, if it is one."""
    steps = [GUESS if place == guess else rng.choice(SOUND) for place in range(LENGTH)]
    answer = "yes" if guess is None else "no"
    return "<think>\n" + "\n".join(steps) + f"\n</think>\n<answer>{answer}</answer>"


def any_chain(rng: random.Random) -> str:
    return chain(rng.choice([None, 0, 1, 2]), rng)


def run_job(folder: Path, kind: str, **fields) -> Path:
    """In this process; returns the folder of what was made."""
    job = read_job(write_job(folder, kind, **fields))
    for place in (job.out, job.state):
        place.mkdir(parents=True, exist_ok=True)
    module, function = RUNNERS[kind].split(":")
    getattr(importlib.import_module(module), function)(job)
    return folder / "out"


def note(i: int) -> Problem:
    return Problem(f"p{i}", user(f"Solve note {i}."), "yes", "exact", "reasoning", "en", "test")


@pytest.fixture(scope="module")
def guessing(tmp_path_factory) -> dict:
    """A policy that writes such chains more or less, and chains labelled by what it makes of them."""
    folder, rng = tmp_path_factory.mktemp("guessing"), random.Random(0)
    problems = [note(i) for i in range(200)]
    shown = [{"messages": p.messages, "completion": any_chain(rng)} for p in problems]
    lines = [f"{row['messages'][0]['content']} {row['completion']}" for row in shown]
    (folder / "corpus.txt").write_text("\n\n".join(lines))
    base = run_job(folder / "base", "pretrain", settings=PRETRAIN, corpus=folder / "corpus.txt")
    pq.write_table(pa.Table.from_pylist(shown), folder / "sft.parquet")
    settings = {**SFT, "epochs": 2, "micro_batch_tokens": 1024}
    policy = run_job(folder / "sft", "sft", settings=settings, model=base, data=folder / "sft.parquet")
    write_rows(folder / "problems.parquet", problems, Problem)
    write_rows(folder / "samples.parquet", [written(any_chain(rng), p) for p in problems for _ in (0, 1)], Sample)
    job = {
        "model": policy,
        "problems": [folder / "problems.parquet"],
        "samples": folder / "samples.parquet",
        "rollouts": 4,
        "sampling": {"max_new_tokens": 24, "batch_size": 128},
        "shard_chains": 200,
        "scoring": {"workers": 1},
        "hardware": CPU,
    }
    labels = run_job(folder / "labels", "step_labels", **job)
    return {"folder": folder, "policy": policy, "labels": labels, "job": job, "problems": folder / "problems.parquet"}


@pytest.fixture(scope="module")
def trained(guessing) -> Path:
    """A process reward model of given rollouts: all right before a guess, none from it on."""
    rng, rows = random.Random(2), []
    for i in range(400):
        problem, text = note(i), any_chain(rng)
        (made,) = chains_of([problem], [written(text, problem)])
        rows.append(label_row(made, [4 * (GUESS not in text[:end]) for end in made.ends], 4, 0.25))
    pq.write_table(pa.Table.from_pylist(rows), guessing["folder"] / "given.parquet")
    optimizer = {"learning_rate": 0.005, "final_learning_rate_share": 0.1, "warmup_steps": 5}
    settings = {**SFT, "micro_batch_tokens": 1024, "optimizer": optimizer}
    job = {"settings": settings, "model": guessing["policy"], "data": guessing["folder"] / "given.parquet"}
    return run_job(guessing["folder"] / "prm", "process_reward_model", **job)


@pytest.mark.slow
def test_every_step_of_every_chain_is_labelled_and_a_lost_shard_is_made_again_the_same(guessing):
    shards = sorted(guessing["labels"].glob("labels-*.parquet"))
    rows = [row for shard in shards for row in pq.read_table(shard).to_pylist()]
    assert len(shards) == 2 and 200 < len(rows) <= 400  # chains that are written twice are labelled once
    assert all(len(row["right"]) == len(row["ends"]) == LENGTH and row["rollouts"] == 4 for row in rows)
    rights = [right for row in rows for right in row["right"]]
    assert 0 < sum(rights) / len(rights) < 4 and max(rights) <= 4
    found = result(guessing["labels"].parent)
    assert found["counts"] == {"chains": len(rows), "steps": LENGTH * len(rows)}
    assert found["metrics"]["soft"] == pytest.approx(sum(rights) / len(rights) / 4)
    again = shards[1].read_bytes()
    shards[1].unlink()
    run_job(guessing["labels"].parent, "step_labels", **guessing["job"])
    assert shards[1].read_bytes() == again


@pytest.mark.slow
def test_two_processes_make_the_shards_of_one(guessing):
    folder = guessing["folder"] / "two"
    run(write_job(folder, "step_labels", **{**guessing["job"], "hardware": {**CPU, "processes": 2}}))
    files = [sorted(labels.iterdir()) for labels in (guessing["labels"], folder / "out")]
    one, two = [{path.name: path.read_bytes() for path in of} for of in files]
    assert len(one) == 2 and one == two
    assert result(folder) == result(guessing["labels"].parent)


@pytest.mark.slow
def test_a_trained_model_tells_good_steps_on_problems_that_it_has_not_seen(trained):
    found = result(trained.parent)
    assert found["metrics"]["held_out_accuracy"] > found["metrics"]["held_out_majority"] + 0.15
    assert found["counts"]["train"] > found["counts"]["held_out"] > 50 and found["counts"]["too_long"] == 0
    rows = read_held_out(trained)
    assert len(rows) == found["counts"]["held_out"] and all(len(row["scores"]) == LENGTH for row in rows)


@pytest.mark.slow
def test_its_scores_are_the_rewards_of_steps(trained):
    problem, rng = note(1000), random.Random(1)
    texts = [chain(None, rng), chain(1, rng), "<answer>yes</answer>"]
    scorer = Scorer({"accuracy": {}}, Scoring(workers=1), step_reward=str(trained))
    try:
        scorer.load_models(None, None, Hardware(device="cpu"))
        responses = [Response(text, parse(text), tokens=9, finished=True, max_tokens=20) for text in texts]
        scored = scorer.start(problem, responses).finish()
    finally:
        scorer.close()
    sound, lost, without = scored.steps
    assert [breakdown["accuracy"] for breakdown in scored.breakdowns] == [1, 0, 1] and without == []
    assert [end for end, _ in sound] == [end for _, end in split_steps(texts[0])]
    assert min(score for _, score in sound) > 0.5 > max(score for _, score in lost[1:])
    alone = StepScorer(str(trained), Hardware(device="cpu"))([(problem.messages, texts[1:2])])
    assert [score for _, score in alone[0][0]] == pytest.approx([score for _, score in lost], abs=1e-5)


@pytest.mark.slow
def test_grpo_learns_from_its_scores(guessing, trained):
    settings = {**RL_SETTINGS, "steps": 4, "supervision": "process", "step_reward": str(trained)}
    settings["sampling"] = {"max_new_tokens": 24, "batch_size": 16}
    job = {"settings": settings, "model": guessing["policy"], "problems": [guessing["problems"]]}
    out = run_job(guessing["folder"] / "rl", "rl", **job)
    records = metrics(out.parent)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert max(record["grad_norm"] for record in records) > 0
    assert not same(weights(out.parent), weights(guessing["policy"].parent))
