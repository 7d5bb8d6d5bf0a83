"""Validation while a policy learns: what it measures, which weights it keeps, when it ends, and what a kill changes."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo.config.rl import RL as Settings
from grpo.data.completions import Completion
from grpo.data.records import Problem, write_rows
from grpo.data.template import form_of
from grpo.errors import InputError, TrainingStopped
from grpo.rl.trainer import Trainer
from grpo.rl.validation import Validator, _check_metric, validation_problems
from grpo.scoring.scorer import Failures
from grpo.train import read_job
from grpo.training.selection import PREFIX, Best
from tests.support.job_runner import RL, kill_at, metrics, result, run, run_here, same, steps, user, weights, write_job

TIMES = {"tokens_per_s", "sampling_s", "update_s", "validation_s"}
ALWAYS = "tests.support.user_rewards:brief"
"""A reward that is 1 for every completion, where they are all shorter than its limit."""


def sums(first: int, domain: str = "reasoning") -> list[Problem]:
    return [
        Problem(f"v{a}+{b}", user(f"What is {a} + {b}?"), str(a + b), "number", domain, "en", "test")
        for a in range(first, first + 3)
        for b in (0, 4)
    ]


def test_the_best_is_the_first_of_equal_ones_and_a_number() -> None:
    best = Best()
    seen = [best.observe(step, value, {}) for step, value in enumerate((math.nan, 0.5, 0.5, 0.25, 0.75, 0.5), 1)]
    assert seen == [False, True, False, False, True, False]
    assert (best.step, best.value, best.since) == (5, 0.75, 1)


def test_a_job_that_does_not_validate_is_recorded_as_before() -> None:
    written = Settings.model_validate(RL).model_dump(mode="json")
    assert not written.keys() & {"validate_every", "validation", "keep"}
    chosen = {"validate_every": 5, "keep": "best", "validation": {"patience": 2}}
    written = Settings.model_validate({**RL, **chosen}).model_dump(mode="json")
    assert (written["validate_every"], written["keep"], written["validation"]["patience"]) == (5, "best", 2)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"keep": "best"}, "need validate_every"),
        ({"validation": {"patience": 1}}, "need validate_every"),
        ({"validate_every": 0}, "greater than or equal to 1"),
        ({"validate_every": 1, "validation": {"patience": 0}}, "greater than or equal to 1"),
        ({"validate_every": 1, "keep": "first"}, "'best' or 'last'"),
        ({"validate_every": 1, "validation": {"metric": "acuracy"}}, "no 'acuracy' here; choose from reward, accuracy"),
        ({"validate_every": 1, "method": "dpo"}, "method is 'dpo'"),
        ({"validate_every": 1, "rewards": {"format": 1}}, "no 'accuracy' here; choose from reward, format"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings.model_validate({**RL, **fields})


def job_of(folder: Path, train: list[Problem], asked: list[Problem], template: str = "chat", **settings: Any) -> Any:
    write_rows(folder / "train.parquet", train, Problem)
    write_rows(folder / "validation.parquet", asked, Problem)
    fields = {"problems": [folder / "train.parquet"], "validation_problems": [folder / "validation.parquet"]}
    fields |= {"template": template, "settings": {**RL, "validate_every": 1, **settings}}
    return read_job(write_job(folder, "rl", model="x", **fields))


def test_validation_asks_the_first_problems_of_each_domain(tmp_path: Path) -> None:
    validation = sums(0) + sums(3, "general")
    job = job_of(tmp_path, sums(6), validation, validation={"problems": 2})
    assert [p.id for p in validation_problems(job, ["reasoning", "general"])] == ["v0+0", "v0+4", "v3+0", "v3+4"]


@pytest.mark.parametrize(("template", "style"), [("r1_zero", "tags"), ("chat", "boxed")])
def test_answers_are_read_in_the_style_that_the_prompt_asks_for(template: str, style: str, tmp_path: Path) -> None:
    """As in training. An answer between tags is none in style boxed."""
    boxed = [replace(problem, metadata={"answer_style": "boxed"}) for problem in sums(0)]
    asked = validation_problems(job_of(tmp_path, sums(6), boxed, template), ["reasoning"])
    assert {form_of(problem).style for problem in asked} == {style}


JUDGE = {"judge": {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "x"}}
RUBRIC = {"rubric": [{"criterion": "It is polite."}]}


@pytest.mark.parametrize(
    ("verifier", "metadata", "fields", "measured"),
    [
        ("number", {}, {"rewards": {"accuracy": 1, "rubric": 1}, **JUDGE}, {"reward", "accuracy"}),
        ("number", {}, {"rewards": {"accuracy": 1, "judge": 1}, **JUDGE}, {"reward", "accuracy", "judge"}),
        ("judge", {}, {"rewards": {"accuracy": 1, "stated": 1}, **JUDGE}, {"reward", "accuracy"}),
        ("judge", {}, {"rewards": {"accuracy": 1, "format": 1}}, {"reward", "format"}),
        ("number", RUBRIC, {"rewards": {"accuracy": 1, "rubric": 1}, **JUDGE}, {"reward", "accuracy", "rubric"}),
        # Its rubric is the accuracy.
        ("rubric", RUBRIC, {"rewards": {"accuracy": 1, "rubric": 1}, **JUDGE}, {"reward", "accuracy"}),
        ("code", {}, {"rewards": {"accuracy": 1, "stated": 1}}, {"reward", "accuracy"}),
    ],
)
def test_a_metric_is_one_that_the_problems_have(
    verifier: str, metadata: dict[str, Any], fields: dict[str, Any], measured: set[str], tmp_path: Path
) -> None:
    asked = [replace(problem, verifier=verifier, metadata=metadata) for problem in sums(0)]
    for metric in {"reward", *fields["rewards"]}:
        job = job_of(tmp_path, sums(6), asked, **fields, validation={"metric": metric})
        with nullcontext() if metric in measured else pytest.raises(InputError, match=f"metric '{metric}' is measured"):
            _check_metric(job, asked)


def test_problems_that_are_trained_on_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"validation.parquet: problem 'v2\+0' is among those that the job trains on"):
        validation_problems(job_of(tmp_path, sums(2), sums(0)), ["reasoning"])
    with pytest.raises(InputError, match="validation.parquet: no general problems here, but this job trains on them"):
        validation_problems(job_of(tmp_path, sums(6), sums(0)), ["reasoning", "general"])


def test_a_job_names_its_validation_problems(tmp_path: Path) -> None:
    job = write_job(tmp_path, "rl", settings={**RL, "validate_every": 1}, model="x", problems=["x.parquet"])
    with pytest.raises(InputError, match="settings.validate_every needs validation_problems"):
        read_job(job)


@pytest.fixture(scope="module")
def fields(rl_fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("validation")
    write_rows(folder / "validation.parquet", sums(0), Problem)
    return {**rl_fields, "validation_problems": [folder / "validation.parquet"]}


SETTINGS = {
    **RL,
    "steps": 12,
    "save_every": 5,
    "validate_every": 2,
    "optimizer": {"learning_rate": 0.01},
    "keep": "best",
    "validation": {
        "metric": "format",
        "samples_per_problem": 3,
        "sampling": {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 12, "batch_size": 16},
    },
}


@pytest.fixture(scope="module")
def validated(fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validated")
    run_here(write_job(folder, "rl", **{**fields, "settings": SETTINGS}))
    return folder


def untimed(folder: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in TIMES} for record in metrics(folder)]


def curve(folder: Path, name: str) -> dict[int, float]:
    return {record["step"]: record[name] for record in metrics(folder) if name in record}


@pytest.mark.system
def test_metrics_are_means_over_all_samples_in_the_same_records(validated: Path) -> None:
    measured = curve(validated, "validation/format")
    assert [*measured] == [2, 4, 6, 8, 10, 12]
    # Of 6 problems with 3 samples each.
    assert [value * 18 for value in measured.values()] == pytest.approx([round(v * 18) for v in measured.values()])
    lengths = curve(validated, "validation/completion_tokens").values()
    assert all(1 <= length <= 12 for length in lengths)
    assert {"validation/accuracy", "validation/reward", "validation/completion_truncated"} <= metrics(validated)[
        1
    ].keys()


@pytest.mark.system
def test_the_best_checkpoint_is_kept_and_named(validated: Path, fields: dict[str, Any], tmp_path: Path) -> None:
    measured = curve(validated, "validation/format")
    best = max(measured, key=lambda step: (measured[step], -step))
    assert best < 12, "the test needs a best validation before the last"
    found = result(validated)
    assert found["kept"] == {"step": best, "metric": "format", "value": measured[best]}
    assert found["metrics"]["validation/format"] == measured[best]
    assert found["steps_completed"] == found["steps_planned"] == 12
    run_here(write_job(tmp_path, "rl", **{**fields, "settings": {**SETTINGS, "steps": best, "keep": "last"}}))
    assert same(weights(validated), weights(tmp_path))
    assert result(tmp_path)["kept"]["step"] == best
    assert len([*(validated / "state").glob("best-*")]) <= 2 and not [*(tmp_path / "state").glob("best-*")]


@pytest.mark.system
@pytest.mark.parametrize("ahead", [0, 1])  # 1: validations come while the next rollout is sampled
def test_validation_changes_nothing_that_is_learnt(
    ahead: int, validated: Path, fields: dict[str, Any], tmp_path: Path
) -> None:
    if ahead:
        validated = tmp_path / "validated"
        run_here(write_job(validated, "rl", **{**fields, "settings": {**SETTINGS, "rollouts_ahead": 1}}))
    settings = {name: value for name, value in SETTINGS.items() if name not in ("validate_every", "validation", "keep")}
    run_here(write_job(tmp_path, "rl", **{**fields, "settings": {**settings, "rollouts_ahead": ahead}}))
    with_it = [{k: v for k, v in r.items() if not k.startswith("validation")} for r in untimed(validated)]
    assert untimed(tmp_path) == with_it
    assert "kept" not in result(tmp_path)


@pytest.mark.system
def test_validation_may_cut_the_nucleus_where_rollouts_must_not(fields: dict[str, Any], tmp_path: Path) -> None:
    """Its completions are not trained on, so they need no log-probabilities. SETTINGS validate at top-p 0.95."""
    hardware = {**RL["hardware"], "sampler": "continuous"}
    settings = {**SETTINGS, "steps": 2, "keep": "last", "hardware": hardware}
    run_here(write_job(tmp_path / "a", "rl", **{**fields, "settings": settings}))
    first, last = metrics(tmp_path / "a")
    assert first["sampler_continuous"] == 1 and 0 <= last["validation/format"] <= 1
    rollouts = {**settings, "sampling": {**RL["sampling"], "top_p": 0.95}}
    with pytest.raises(InputError, match=r"sampling\.top_p is 0\.95, but continuous batching"):
        run_here(write_job(tmp_path / "b", "rl", **{**fields, "settings": rollouts}))


@pytest.mark.system
def test_patience_ends_training(fields: dict[str, Any], tmp_path: Path) -> None:
    rewards = {"accuracy": 1, ALWAYS: {"weight": 0, "below": 1000}}
    validation = {"metric": ALWAYS, "patience": 2}
    settings = {**SETTINGS, "steps": 40, "rewards": rewards, "validation": validation}
    run_here(write_job(tmp_path, "rl", **{**fields, "settings": settings}))
    found = result(tmp_path)
    # The first validation is the best there can be; two more are none.
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6] and found["steps_completed"] == found["steps_planned"] == 6
    assert found["kept"] == {"step": 2, "metric": ALWAYS, "value": 1.0}


@pytest.mark.system
def test_a_metric_that_no_validation_problem_has_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    settings = {**SETTINGS, "validation": {"metric": "helpful"}}
    said = "validation.metric 'helpful' is measured on none of the validation problems; choose from reward, accuracy"
    with pytest.raises(InputError, match=said):
        run_here(write_job(tmp_path, "rl", **{**fields, "settings": settings}))


@pytest.mark.slow
def test_a_job_killed_after_a_validation_ends_as_if_undisturbed(
    validated: Path, fields: dict[str, Any], tmp_path: Path
) -> None:
    job = write_job(tmp_path, "rl", **{**fields, "settings": SETTINGS})
    kill_at(job, 8)  # checkpoints are at 5 and 10, validations at 6 and 8
    run(job)
    assert untimed(tmp_path) == untimed(validated)
    assert result(tmp_path) == result(validated)
    assert same(weights(tmp_path), weights(validated))


@pytest.mark.system
@pytest.mark.parametrize(
    ("step", "damaged"),
    [(4, None), (8, None), (11, None), (11, "step-00000010/plain.pt"), (11, "best-*/tensors/__0_0.distcp")],
)
def test_wherever_it_is_interrupted_the_same_checkpoint_is_kept(
    step: int,
    damaged: str | None,
    validated: Path,
    fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = write_job(tmp_path, "rl", **{**fields, "settings": SETTINGS})
    log = Trainer._log

    def interrupted(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.step == step:  # after this step's validation, before its metrics and its checkpoint
            raise KeyboardInterrupt
        return log(trainer, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_log", interrupted)
        run_here(job)
    harmed = sorted((tmp_path / "state").glob(damaged)) if damaged else []
    assert harmed or not damaged
    for file in harmed:
        file.write_bytes(file.read_bytes().replace(b"\0", b"\1", 1))
    run_here(job)
    assert untimed(tmp_path) == untimed(validated) and result(tmp_path) == result(validated)
    assert same(weights(tmp_path), weights(validated))


@pytest.mark.slow
def test_the_best_adapters_are_kept_too(fields: dict[str, Any], tmp_path: Path) -> None:
    lora = {"lora": {"rank": 4}, "reference_refresh_steps": None, "optimizer": {"learning_rate": 0.05}}
    run_here(write_job(tmp_path / "all", "rl", **{**fields, "settings": {**SETTINGS, **lora}}))
    kept = result(tmp_path / "all")["kept"]
    settings = {**SETTINGS, **lora, "steps": kept["step"], "keep": "last"}
    run_here(write_job(tmp_path / "best", "rl", **{**fields, "settings": settings}))
    assert same(weights(tmp_path / "all"), weights(tmp_path / "best"))


@pytest.mark.slow
def test_two_processes_choose_the_same_checkpoint(validated: Path, fields: dict[str, Any], tmp_path: Path) -> None:
    settings = {**SETTINGS, "hardware": {"device": "cpu", "processes": 2}}
    run(write_job(tmp_path, "rl", **{**fields, "settings": settings}), timeout=300)
    assert curve(tmp_path, "validation/format") == curve(validated, "validation/format")
    assert result(tmp_path)["kept"] == result(validated)["kept"]
    assert len([*(tmp_path / "state").glob("best-*")]) <= 2


@dataclass
class SecondOfTwo:
    """A process that gets the others' values, and a copy of its own, as torch.distributed's."""

    first: Any

    def all_gather(self, value: Any) -> list[Any]:
        return [self.first, pickle.loads(pickle.dumps(value))]


@dataclass
class Sampled:
    """An engine and a scorer with whom 5 of 8 completions of this process fail."""

    weights: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0})

    def __post_init__(self) -> None:
        self.prefetcher = self.scorer = self.results = self

    def wait(self) -> None: ...

    def sample(self, *_: Any, **__: Any) -> Sampled:
        return self

    def result(self) -> dict[int, Any]:
        return {0: ([Completion([1], [], True)] * 8, None)}

    def finish(self, _: Any) -> list[Any]:
        return [SimpleNamespace(failures=Failures(8, Counter(error=5), 5), breakdowns=[{"accuracy": 1.0}] * 8)]


@pytest.mark.parametrize(("limit", "stops"), [(0.08, False), (0.07, True)])
def test_every_process_counts_the_same_failures(limit: float, stops: bool) -> None:
    """5 of 8 here and none of 56 there: 0.078 of 64."""
    validator: Any = object.__new__(Validator)
    settings = {**RL, "validate_every": 1, "scoring": {"max_failure_share": limit}}
    validator.settings = Settings.model_validate(settings)
    validator.choice, validator.problems, validator.collect = validator.settings.validation, [], Sampled()
    validator.parallel = SecondOfTwo(({}, Failures(56)))
    with pytest.raises(TrainingStopped, match="5 of 64") if stops else nullcontext():
        assert validator._measure(1)[PREFIX + "reward"] == 1
