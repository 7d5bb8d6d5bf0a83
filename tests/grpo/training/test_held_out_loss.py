"""The loss on held-out prompts while SFT runs, the checkpoint that it chooses, and an interruption."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from grpo.config.common import Hardware
from grpo.config.supervised import SFT, ProcessRewardModel, RewardModel
from grpo.data.conversations import demonstrations
from grpo.data.examples import Example
from grpo.errors import InputError, TrainingStopped
from grpo.model.loading import load_policy, load_tokenizer
from grpo.processes.metrics_log import Metrics
from grpo.train import read_job
from grpo.training.held_out_loss import HeldOutLoss, hold_out
from grpo.training.sft import cross_entropy, tokenize, train_sft
from tests.support.job_runner import SFT as SETTINGS
from tests.support.job_runner import metrics, result, run, same, weights, write_job

VALIDATED = {
    **SETTINGS,
    "epochs": 16,
    "save_every": 6,
    "validate_every": 2,
    "keep": "best",
    "validation": {"share": 0.3},
    "optimizer": {"learning_rate": 0.02},  # answers are drawn at random: to learn them by heart makes others likely
}


def settings(**fields: Any) -> SFT:
    return SFT.model_validate({**SETTINGS, **fields})


def test_no_prompt_is_on_both_sides() -> None:
    examples = [Example([[prompt]], [[answer]], weight=1) for prompt in range(200) for answer in range(3)]
    learnt, held_out = hold_out(examples, 0.25)
    sides = [{example.prompts[0][0] for example in side} for side in (learnt, held_out)]
    assert not sides[0] & sides[1] and len(learnt) + len(held_out) == 600
    assert len(held_out) == 3 * len(sides[1]) and 30 < len(sides[1]) < 70
    assert [example.prompts for example in learnt[:2]] == [learnt[0].prompts, learnt[1].prompts]


def test_records_without_validation_are_as_before() -> None:
    written = settings().model_dump(mode="json")
    assert not written.keys() & {"validate_every", "validation", "keep"}


def test_a_share_without_sequences_is_refused() -> None:
    with pytest.raises(InputError, match=r"validation.share 0.3 of 1 sequences: . are held out and . are left"):
        hold_out([Example([[1]], [[2]], weight=1)], 0.3)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (SFT, {"keep": "best"}, "need validate_every"),
        (SFT, {"validation": {"share": 0.1}}, "need validate_every"),
        (SFT, {"validate_every": 1, "validation": {"share": 1}}, "less than 1"),
        (RewardModel, {"validate_every": 1}, "validate_every\n +Extra inputs"),
        (ProcessRewardModel, {"validate_every": 1}, "validate_every\n +Extra inputs"),
    ],
)
def test_what_does_not_go_together_is_refused(kind: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kind.model_validate({**SETTINGS, **fields})


def train(folder: Path, fields: dict[str, Any]) -> None:
    job = read_job(write_job(folder, "sft", **fields))
    for place in (job.out, job.state):
        place.mkdir(parents=True, exist_ok=True)
    train_sft(job)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def validated(sft_fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validated")
    train(folder, {**sft_fields, "settings": VALIDATED})
    return folder


def curve(folder: Path) -> dict[int, float]:
    return {r["step"]: r["validation/loss"] for r in metrics(folder) if "validation/loss" in r}


@pytest.mark.system
def test_the_smallest_loss_is_kept(validated: Path, sft_fields: dict[str, Any]) -> None:
    losses, found = curve(validated), result(validated)
    best = min(losses, key=lambda step: (losses[step], step))
    assert found["kept"] == {"step": best, "metric": "loss", "value": losses[best]}
    assert found["metrics"]["validation/loss"] == losses[best] and found["metrics"]["loss"] > 0
    assert [*losses][:2] == [2, 4] and [*losses][-1] == found["steps_completed"]
    assert best < found["steps_completed"], "the test needs a best validation before the last"
    # The saved model has that loss on the sequences that were held out.
    tokenizer = load_tokenizer(str(sft_fields["model"]))
    examples, _ = tokenize(tokenizer, [*demonstrations(sft_fields["data"])], VALIDATED["max_tokens"])
    learnt, held_out = hold_out(examples, 0.3)
    assert found["counts"] == {"sequences": len(learnt), "too_long": 0, "held_out": len(held_out)}
    model = load_policy(str(validated / "out"), Hardware(device="cpu"))
    loss = cross_entropy(model, [*held_out]).item() / sum(example.weight for example in held_out)
    assert loss == pytest.approx(losses[best], rel=1e-4)


@pytest.mark.system
def test_an_interrupted_job_keeps_the_same_checkpoint(
    validated: Path, sft_fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, log = {**sft_fields, "settings": VALIDATED}, Metrics.log

    def interrupted(self: Metrics, step: int, of: int, **values: Any) -> None:
        if step == 8:  # validated, with the last checkpoint at 6
            raise KeyboardInterrupt
        log(self, step, of, **values)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Metrics, "log", interrupted)
        train(tmp_path, fields)
    train(tmp_path, fields)
    assert curve(tmp_path) == curve(validated) and result(tmp_path)["kept"] == result(validated)["kept"]
    assert same(weights(tmp_path), weights(validated))


@pytest.mark.system
def test_a_split_of_the_data_is_measured_instead(sft_fields: dict[str, Any], tmp_path: Path) -> None:
    """The rows that are trained on measure too: the last validation is the loss of the model that is saved on them."""
    rules = {**VALIDATED, "epochs": 2, "keep": "last", "validation": {}}
    train(tmp_path, {**sft_fields, "validation_data": sft_fields["data"], "settings": rules})
    examples, _ = tokenize(load_tokenizer(str(sft_fields["model"])), [*demonstrations(sft_fields["data"])], 4096)
    found = result(tmp_path)
    assert found["counts"] == {"sequences": len(examples), "too_long": 0, "held_out": len(examples)}
    model = load_policy(str(tmp_path / "out"), Hardware(device="cpu"))
    loss = cross_entropy(model, examples).item() / sum(example.weight for example in examples)
    assert loss == pytest.approx(found["kept"]["value"], rel=1e-4)


@pytest.mark.system
def test_patience_ends_training_early(validated: Path, sft_fields: dict[str, Any], tmp_path: Path) -> None:
    train(tmp_path, {**sft_fields, "settings": {**VALIDATED, "validation": {"share": 0.3, "patience": 1}}})
    losses = [*curve(validated).values()]
    first_worse = next(n for n in range(1, len(losses)) if losses[n] >= min(losses[:n]))
    found = result(tmp_path)
    assert found["steps_completed"] == found["steps_planned"] == 2 * (first_worse + 1)
    assert found["kept"]["step"] == 2 * first_worse


@pytest.mark.system
def test_losses_that_are_never_finite_stop_the_job_in_one_line(
    sft_fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last weights can still be asked for."""
    monkeypatch.setattr(HeldOutLoss, "_total", lambda *_: math.nan)
    diverged = {**VALIDATED, "epochs": 2}
    said = "validation/loss was never finite, so no weights are the best; lower optimizer.learning_rate, or see in the "
    said += "curves when training diverged"
    for _ in ("at first", "and when it is started again"):
        with pytest.raises(TrainingStopped, match=f"^{said}$"):
            train(tmp_path, {**sft_fields, "settings": diverged})
        assert not (tmp_path / "result.json").exists()
    assert len(curve(tmp_path)) > 1 and all(math.isnan(loss) for loss in curve(tmp_path).values())
    train(tmp_path / "last", {**sft_fields, "settings": {**diverged, "keep": "last"}})
    kept = result(tmp_path / "last")["kept"]
    assert kept["step"] == result(tmp_path / "last")["steps_completed"] and math.isnan(kept["value"])


@pytest.mark.slow
def test_two_processes_measure_the_same_loss(validated: Path, sft_fields: dict[str, Any], tmp_path: Path) -> None:
    hardware = {"hardware": {"device": "cpu", "processes": 2}}
    run(write_job(tmp_path, "sft", **{**sft_fields, "settings": {**VALIDATED, **hardware}}), timeout=300)
    assert curve(tmp_path) == pytest.approx(curve(validated), rel=1e-3)
