"""Reward models: helpful from pairs, safe from labels (R1 v2, stage 4).

As in the paper, a judge compares and labels Dev3's own responses. Preferences from files can be added, or used instead.
In later rounds (flows/stages/alignment_rounds.py), it judges responses of the previous policy, and training continues
from the last models.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.recipe.sections import RewardModels
from flows.stage_contract.stage import Context, Outcome, Stage
from flows.stages.alignment_rounds import MODELS, models_name, policy_name
from flows.stages.problems import BAD_RECORDS, SHOWN, TRAIN, unevaluated
from grpo.config.jobs import MEMBER
from grpo.config.supervised import RewardModel
from grpo.data.held_out import read_held_out, write_held_out
from grpo.data.records import read_problems, read_samples
from grpo.errors import InputError
from tasks.evaluation.reward_model import combine, quality, tables
from tasks.evaluation.reward_model_plots import plot
from tasks.judges.create_judge import make_judge
from tasks.judges.prompt_digests import PROMPT_DIGESTS
from tasks.preferences.files import load_preferences
from tasks.preferences.judged import labels, pairs
from tasks.preferences.replay import replay
from tasks.preferences.rows import drop_duplicates, write_preferences
from tasks.trainer.user_code import code_digests

logger = logging.getLogger(__name__)

HELPFUL, SAFE = "helpful", "safe"
DATA = "data"
"""Folder with a round's own preferences, without replay: the history for later rounds."""
PLOTS = "plots"
_LOSSES = {HELPFUL: "pairs", SAFE: "points"}


@dataclass
class Gathered:
    """Preferences from a judge and from files, with their counts."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {HELPFUL: [], SAFE: []})
    counts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    bad_records: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    """Inputs of a round: the policy whose responses are judged, and the reward models of earlier rounds, in order.

    If there are earlier models, training continues from the last of them, and a share `replay_share` of the data is
    theirs.
    """

    policy: str = "sft"
    earlier: tuple[str, ...] = ()
    replay_share: float = 0.0


FIRST = Round()


def build(context: Context, turn: Round = FIRST) -> Outcome:
    """Gathers preference pairs and safety labels, and trains the reward models on them."""
    config: RewardModels = context.config
    gathered = Gathered()
    _read_files(config, gathered)  # first, so that a mistake in them shows before anything is sampled
    if config.prompts:
        _judge(context, turn.policy, gathered)
    _clean(context, gathered)
    outcome = Outcome(counts=gathered.counts, metrics=gathered.metrics)
    if bad := gathered.bad_records:
        logger.warning("%d bad records skipped, the first: %s", len(bad), bad[0]["fault"])
        (context.out / BAD_RECORDS).write_text("".join(json.dumps(b, ensure_ascii=False) + "\n" for b in bad))
        outcome.tables["bad_records"] = bad[:SHOWN]
    for name, settings in ((HELPFUL, config.helpful), (SAFE, config.safe)):
        rows = gathered.rows[name]
        write_preferences(context.out / DATA / f"{name}.parquet", rows)
        if turn.earlier:
            history = [context.path(models) / DATA / f"{name}.parquet" for models in turn.earlier]
            again = replay(rows, history, turn.replay_share, context.seed)
            outcome.counts[f"{name}_replayed"] = len(again)
            rows = rows + again
        _train(context, turn, name, settings, rows)
        _measure(context, name, outcome)
    return outcome


def _read_files(config: RewardModels, gathered: Gathered) -> None:
    for number, file in enumerate(config.files):
        loaded = load_preferences(file, config.held_out_share)
        gathered.rows[HELPFUL] += loaded.pairs
        gathered.rows[SAFE] += loaded.labels
        gathered.counts |= {f"file{number}_{name}": count for name, count in loaded.counts.items()}
        gathered.bad_records += [{"file": number, "fault": fault} for fault in loaded.bad_records]


def _judge(context: Context, policy: str, gathered: Gathered) -> None:
    """Samples the input `policy` and asks the judge. Its verdicts come before equal ones from files."""
    config: RewardModels = context.config
    train = context.path("problems") / TRAIN
    sampled = context.inputs[policy]
    raw = context.attempt.state / "raw"
    task = {
        "name": "responses",
        "model": sampled.path,
        "policy": sampled.ref.digest,
        "problems": [train],
        "first": {"general": config.prompts},
        "samples_per_problem": config.responses_per_prompt,
        "sampling": config.sampling,
        "engine": config.engine,
    }
    context.run_job("sample", name="responses", out=raw, tasks=[task], hardware=config.helpful.hardware)
    problems = {problem.id: problem for problem in read_problems(train)}
    samples = read_samples(raw / "responses")
    judge = make_judge(config.judge, context.attempt.state / "judge", context.progress.of("judge"))
    judged = pairs(
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
    gathered.rows = {HELPFUL: judged.rows + gathered.rows[HELPFUL], SAFE: labelled + gathered.rows[SAFE]}
    gathered.counts |= {f"pairs_{name}": count for name, count in judged.counts.items()}
    gathered.counts |= {f"labels_{name}": count for name, count in label_counts.items()}
    gathered.metrics |= {f"judge_{name}": value for name, value in (judge.counts.shares() | judged.bias).items()}


def _clean(context: Context, gathered: Gathered) -> None:
    """Drops duplicates, and preferences on prompts of the evaluation."""
    for name, rows in gathered.rows.items():
        apart = unevaluated(rows, context.path("problems"))
        kept = gathered.rows[name] = drop_duplicates(apart)
        gathered.counts |= {f"{name}_leaked": len(rows) - len(apart), f"{name}_duplicates": len(apart) - len(kept)}
        if all(row["held_out"] for row in kept):
            raise InputError(
                f"reward_models: nothing to train the {name} model on: {gathered.counts}; raise prompts or responses, "
                f"or add a file with {'labels' if name == SAFE else 'pairs'}"
            )


def _train(context: Context, turn: Round, name: str, settings: RewardModel, rows: list[dict[str, Any]]) -> None:
    """Trains one model into the folder `name`, or the members of an ensemble into its subfolders."""
    data = context.attempt.state / f"{name}.parquet"
    write_preferences(data, rows)
    start = context.path(turn.earlier[-1]) / name if turn.earlier else None
    members = [""] if settings.ensemble == 1 else [f"{MEMBER}{number:02d}" for number in range(settings.ensemble)]
    for number, member in enumerate(members):
        context.run_job(
            "reward_model",
            name=f"{name}-{member}" if member else name,
            out=context.out / name / member,
            seed=context.seed * settings.ensemble + number,
            settings=settings,
            model=str(start / member if start else context.path(turn.policy)),
            data=data,
            loss=_LOSSES[name],
            bootstrap=bool(member),
        )
    if settings.ensemble > 1:
        write_held_out(context.out / name, combine([read_held_out(context.out / name / m) for m in members]))


def _measure(context: Context, name: str, outcome: Outcome) -> None:
    """Records metrics, tables and plots of the model on held-out preferences. Does nothing if there are none."""
    if not (held_out := read_held_out(context.out / name)):
        return
    measured = quality(held_out)
    outcome.metrics |= {f"{name}_{metric}": value for metric, value in measured.metrics.items()}
    outcome.tables |= tables(name, measured)
    for path in plot(measured, context.out / PLOTS, name):
        context.tracking.log_file(context.run_id, path, PLOTS)


def files(config: RewardModels) -> dict[str, str | Path]:
    """Preference files and the judge's folder, whose contents enter the stage's key."""
    return {**{f"preferences{n}": file.path for n, file in enumerate(config.files)}, **config.judge.files()}


def code(config: RewardModels) -> dict[str, Any]:
    """Digests of the judge's prompts, and of the user's own engine."""
    return {"judge_prompts": PROMPT_DIGESTS} | code_digests(engines=[config.engine])


STAGE = Stage(MODELS, 7, ("problems", "sft"), build, files=files, extra=code)


def models_stage(number: int, replay_share: float) -> Stage:
    """The stage for the reward models of round `number`."""
    if number == 1:
        return STAGE
    policy, earlier = policy_name(number - 1), tuple(models_name(n) for n in range(1, number))
    turn = Round(policy, earlier, replay_share)
    return Stage(
        models_name(number),
        STAGE.version,
        ("problems", policy, *earlier),
        lambda context: build(context, turn),
        files=files,
        extra=lambda config: {**code(config), "replay_share": replay_share},
    )
