"""A process reward model: scores the steps of Dev1's reasoning, with labels from rollouts that continue each step
(Math-Shepherd, arXiv 2312.08935).

Stages of RL whose `step_reward` is the name of this stage read it as an input (DSM 4.1.3).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flows.recipe.process_rewards import ProcessRewards
from flows.stage_contract.stage import Context, Outcome, Stage
from flows.stages.problems import TRAIN
from grpo.config.rl import RL, STEP_MODEL
from grpo.data.held_out import read_held_out

LABELS, MODEL = "labels", "model"
SHOWN = 50
"""Number of scored chains in the table."""


def build(context: Context) -> Outcome:
    """Samples chains, labels their steps, and trains the model on the labels."""
    config: ProcessRewards = context.config
    policy, train = context.inputs["cold_start_sft"], context.path("problems") / TRAIN
    hardware = config.training.hardware
    raw = context.attempt.state / "raw"
    chains = {
        "name": "chains",
        "model": policy.path,
        "policy": policy.ref.digest,
        "problems": [train],
        "first": {"reasoning": config.problems},
        "samples_per_problem": config.samples_per_problem,
        "sampling": config.sampling,
        "rewards": ["accuracy"],
    }
    context.run_job("sample", name="chains", out=raw, tasks=[chains], scoring=config.scoring, hardware=hardware)
    labelled = context.run_job(
        "step_labels",
        name="labels",
        out=context.out / LABELS,
        model=str(policy.path),
        problems=[train],
        samples=raw / "chains",
        rollouts=config.rollouts,
        sampling=config.sampling,
        held_out_share=config.held_out_share,
        shard_chains=config.shard_chains,
        scoring=config.scoring,
        hardware=hardware,
    )
    trained = context.run_job(
        "process_reward_model",
        out=context.out / MODEL,
        settings=config.training,
        model=str(policy.path),
        data=context.out / LABELS,
    )
    return Outcome(
        counts=labelled["counts"] | trained["counts"],
        metrics={f"label_{name}": share for name, share in labelled["metrics"].items()} | trained["metrics"],
        steps_completed=trained["steps_completed"],
        tables={"steps": [row for chain in read_held_out(context.out / MODEL)[:SHOWN] for row in _shown(chain)]},
    )


def _shown(chain: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per step of a held-out chain."""
    starts = [0, *chain["ends"]]
    return [
        {
            "problem": chain["messages"][-1]["content"],
            "step": chain["completion"][start:end].strip(),
            "right": right,
            "rollouts": chain["rollouts"],
            "score": round(score, 3),
        }
        for start, end, right, score in zip(starts, chain["ends"], chain["right"], chain["scores"], strict=False)
    ]


def read_by(stage: Stage, config: object) -> Stage:
    """The stage with this stage's artifact added to its inputs, if its configuration asks for it."""
    if isinstance(config, RL) and config.reads_step_model:
        return dataclasses.replace(stage, needs=(*stage.needs, STAGE.name))
    return stage


STAGE = Stage(STEP_MODEL, 2, ("problems", "cold_start_sft"), build)
