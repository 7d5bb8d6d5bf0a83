"""Which metrics of a stage share a picture, and what is a curve."""

from __future__ import annotations

from pathlib import Path

from tasks.report import curves
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.recipe_run import load_run

PARTS = {"reward_accuracy": 1.0, "reward_helpful": 7.5, "reward_rule_mean": 0.1, "reward_failures": 0.0}


def test_each_reward_has_axes_of_its_own() -> None:
    found = {picture.title: picture.parts for picture in curves.pictures(["reward", "final/reward", "kl", *PARTS])}
    assert found == {
        "Reward": (("reward", "reward"),),
        "Reward, accuracy": (("reward_accuracy", "reward_accuracy"),),
        "Reward, helpful": (("reward_helpful", "reward_helpful"),),
        "KL to the reference, nats": (("kl", "kl"),),
    }


def test_losses_share_axes_and_the_number_of_the_end_is_none() -> None:
    (picture,) = curves.pictures(["loss", "final/loss"])
    assert picture.parts == (("loss", "loss"),)
    (picture,) = curves.pictures(["helpful/loss", "safe/loss", "final/helpful/loss"])
    assert picture.parts == (("helpful", "helpful/loss"), ("safe", "safe/loss"))


def test_a_single_point_is_no_curve(tmp_path: Path) -> None:
    record = Tracking(default_uri(tmp_path))
    run_id = record.recipe_run("r", "r", {}, {})
    stage = record.stage_run(run_id, "r", "rl", {}, {"r1flow.stage": "rl", "r1flow.status": "ran"})
    record.log_metrics(stage, [{"step": step, "reward": float(step)} for step in (1, 2)])
    record.log_metrics(stage, [{"step": 2, "kl": 0.5}])
    run = record.reader.run(run_id)
    assert run is not None
    rl = load_run(record.reader, Store(tmp_path), run).stage("rl")
    assert rl is not None
    assert [(p.title, of) for p, of in curves.read(record.reader, rl)] == [
        ("Reward", {"reward": [(1.0, 1.0), (2.0, 2.0)]})
    ]
