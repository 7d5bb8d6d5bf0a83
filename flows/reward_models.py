"""Reward models: helpful from judged pairs, safe from judged labels, on Dev3's own responses (R1 v2, stage 4)."""

from __future__ import annotations

from collections.abc import Mapping

from prefect import flow
from prefect.states import State

from flows.problems import TRAIN
from flows.recipe import RewardModels
from flows.stage import Context, Outcome, Stage, Where, run_stage
from grpo.data import read_problems, read_samples
from grpo.errors import InputError
from tasks.judge import PROMPT_DIGESTS, make_judge
from tasks.preferences import labels, pairs, write_preferences

HELPFUL, SAFE = "helpful", "safe"


def build(context: Context) -> Outcome:
    config: RewardModels = context.config
    train = context.path("problems") / TRAIN
    policy = context.inputs["sft"]
    raw = context.attempt.state / "raw"
    task = {
        "name": "dev3",
        "model": policy.path,
        "policy": policy.ref.digest,
        "problems": [train],
        "first": {"general": config.prompts},
        "samples_per_problem": config.responses_per_prompt,
        "sampling": config.sampling,
    }
    context.run_job("sample", name="responses", out=raw, tasks=[task], hardware=config.helpful.hardware)
    problems = {problem.id: problem for problem in read_problems(train)}
    samples = read_samples(raw / "dev3")
    judge = make_judge(config.judge)
    chosen, pair_counts = pairs(
        samples,
        problems,
        judge,
        judgments=config.judgments_per_pair,
        margin=config.margin,
        length_ratio_max=config.length_ratio_max,
        held_out_share=config.held_out_share,
        seed=context.seed,
    )
    labelled, label_counts = labels(samples, problems, judge, config.held_out_share)
    counts = {f"pairs_{k}": v for k, v in pair_counts.items()} | {f"labels_{k}": v for k, v in label_counts.items()}
    metrics: dict[str, float] = {}
    for name, rows, settings, loss in (
        (HELPFUL, chosen, config.helpful, "pairs"),
        (SAFE, labelled, config.safe, "points"),
    ):
        if not any(not row["held_out"] for row in rows):
            raise InputError(
                f"reward_models: nothing to train the {name} model on: {counts}; raise prompts or responses"
            )
        data = context.attempt.state / f"{name}.parquet"
        write_preferences(data, rows)
        write_preferences(context.out / "data" / f"{name}.parquet", rows)
        result = context.run_job(
            "reward_model",
            name=name,
            out=context.out / name,
            settings=settings,
            model=str(policy.path),
            data=data,
            loss=loss,
        )
        metrics |= {f"{name}_{k}": v for k, v in result["metrics"].items()}
    return Outcome(counts=counts, metrics=metrics)


STAGE = Stage("reward_models", 3, ("problems", "sft"), build, extra=lambda _: {"judge_prompts": PROMPT_DIGESTS})


@flow(name=STAGE.name)
def reward_models(
    config: RewardModels, inputs: Mapping[str, str] | None = None, seed: int = 0, where: Where | None = None
) -> State:
    """Judge Dev3's responses and train the helpful and the safety reward model."""
    return run_stage(STAGE, config, inputs or {}, seed, where or Where())
