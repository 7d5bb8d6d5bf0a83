"""Evaluation: every checkpoint on the held-out problems, with intervals (R1, evaluation)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.recipe.evaluation import Evaluate
from flows.stage_contract.stage import Context, Outcome, Stage
from flows.stages.base_model import zero_template
from flows.stages.distill import PREFIX
from flows.stages.problems import HELD_OUT, set_files, test_set_file
from flows.stages.reward_models import HELPFUL, SAFE
from grpo.data.records import Problem, Sample, read_problems, read_samples, write_rows
from grpo.errors import InputError
from tasks.evaluation.metrics import Scores, alignment_metrics, answer_metrics, problem_scores, reasoning_metrics
from tasks.evaluation.records import SAMPLES, SETS, TABLE, in_set, numbers, samples_of_set, write_scores
from tasks.evaluation.refusals import instruction_metrics, refusal_metrics
from tasks.evaluation.sets.load import asked
from tasks.evaluation.sets.metrics import set_metrics, set_scores
from tasks.evaluation.steps import step_metrics
from tasks.evaluation.win_rate import compare, length_controlled, win_rate
from tasks.judges.base import Judge
from tasks.judges.calibration import judge_agreement, rubric_metrics
from tasks.judges.create_judge import make_judge
from tasks.judges.prompt_digests import EVALUATION_DIGESTS, verifying_digests
from tasks.judges.verifying import check_comparable, judge_of_samples, judged_answers
from tasks.report.tables import markdown
from tasks.store.manifest import Manifest

CHECKPOINTS = {
    "base": "base",
    "r1_zero": "zero",
    "cold_start_sft": "dev1",
    "rlhf_ppo": "ppo",
    "reasoning_rl": "dev2",
    "sft": "dev3",
    "alignment_rl": "r1",
}
"""Stage -> name of its checkpoint, in the order of the closing table. Later rounds and students follow."""
RULES = ["accuracy", "stated", "format", "language"]
"""Scores of the samples. Accuracy reads the answer where the format requires it, `stated` wherever it appears."""
OPPONENTS = ("dev3", "dev1")
"""Opponents in win rates. The first one that exists is used: the SFT model from which alignment or PPO starts."""


def build(context: Context) -> Outcome:
    """Samples each checkpoint on the held-out problems and writes the closing table."""
    config: Evaluate = context.config
    held_out = context.path("problems") / HELD_OUT
    stages = checkpoints(context.inputs)
    scored = config.alignment_scores and "reward_models" in context.inputs
    rewards = context.path("reward_models") if scored else None
    template = zero_template(context.path("base")) if "base" in context.inputs else None
    problems = {problem.id: problem for problem in read_problems(held_out)}
    sets = _ask_sets(context)
    sampling_judge = judge_of_samples(config.judge, held_out, *sets.values())
    judge = make_judge(config.judge, context.attempt.state / "judge", context.progress.of("judge"))
    if set(OPPONENTS) & set(stages.values()):
        general = [problem for problem in problems.values() if problem.domain == "general"]
        check_comparable(judge, general[: config.general])
    raw = context.out / SAMPLES
    tasks = []
    for stage, name in stages.items():
        common = {
            "model": context.path(stage),
            "policy": context.inputs[stage].ref.digest,
            # A base model has no chat template, and R1-Zero was trained with the plain-text one.
            "template": "r1_zero" if name in ("base", "zero") else "chat",
            "zero_template": template,
            "engine": config.engine,
            "helpful_model": str(rewards / HELPFUL) if rewards else None,
            "safe_model": str(rewards / SAFE) if rewards else None,
            "rewards": RULES,
        }
        tasks.append(
            {
                "name": name,
                "problems": [held_out],
                "first": {"reasoning": config.problems, "general": config.general},
                "samples_per_problem": config.samples_per_problem,
                "general_samples": config.general_samples,
                "sampling": config.sampling,
                **common,
            }
        )
        tasks += [
            {
                "name": samples_of_set(name, of.name),
                "problems": [sets[of.name]],
                "samples_per_problem": of.samples(config.samples_per_problem),
                "sampling": of.sampling or config.sampling,
                **common,
            }
            for of in config.sets
        ]
    result = context.run_job("sample", out=raw, tasks=tasks, hardware=config.hardware, judge=sampling_judge)
    samples = {name: read_samples(raw / name) for name in stages.values()}
    scores = {name: problem_scores(_reasoning(rows), problems, config.k) for name, rows in samples.items()}
    table = closing_table(samples, problems, scores, config, judge)
    for of in config.sets:
        set_problems = {problem.id: problem for problem in read_problems(sets[of.name])}
        for name in stages.values():
            rows = read_samples(raw / samples_of_set(name, of.name))
            of_set = set_scores(rows, set_problems, of.k)
            scores[name] |= in_set(of.name, of_set)
            table[name] |= in_set(of.name, set_metrics(rows, set_problems, of_set, config.confidence, of.k))
    write_scores(context.out, scores)
    (context.out / TABLE).write_text(json.dumps(table, indent=2))
    metrics = {f"{name}/{metric}": value for name, row in table.items() for metric, value in numbers(row).items()}
    metrics |= judged_answers(result)
    shown = [_shown(name, s, problems[s.problem_id]) for name, rows in samples.items() for s in rows[:20]]
    return Outcome(
        counts={name: len(rows) for name, rows in samples.items()},
        metrics=metrics,
        tables={"samples": shown},
        evaluated=stages,
    )


def _ask_sets(context: Context) -> dict[str, Path]:
    """Writes the problems of every test set, in the form in which it asks them, to one file each."""
    files = {}
    for of in context.config.sets:
        source = test_set_file(context.path("problems"), of.name)
        if not source.is_file():
            raise InputError(
                f"evaluate.sets: {of.name!r} is not among the test sets of the problems; run that stage again, or use "
                f"`r1 eval MODEL --sets {of.name}`"
            )
        files[of.name] = context.out / SETS / source.name
        files[of.name].parent.mkdir(exist_ok=True)
        write_rows(files[of.name], asked(of, read_problems(source)), Problem)
    return files


def files(config: Evaluate) -> dict[str, str | Path]:
    """The judge's folder, and local files and folders that test sets read. The stage reads their problems from
    `problems`; listing the paths here keeps them out of its key."""
    return {**set_files(config.sets), **config.judge.files()}


def checkpoints(stages: Iterable[str]) -> dict[str, str]:
    """Stage -> name of its checkpoint, for the stages that make one."""
    names = list(stages)
    later = {stage: stage.replace("alignment_rl", "r1") for stage in names if stage.startswith("alignment_rl_")}
    taught = {stage: stage.removeprefix(PREFIX) for stage in names if stage.startswith(PREFIX)}
    return {stage: name for stage, name in CHECKPOINTS.items() if stage in names} | later | taught


def stage_of(checkpoint: str) -> str:
    """The stage that makes the checkpoint with this name, or the name itself if there is none."""
    if re.fullmatch(r"r1_\d+", checkpoint):
        return checkpoint.replace("r1", "alignment_rl")
    return next((stage for stage, name in CHECKPOINTS.items() if name == checkpoint), checkpoint)


def shown(evaluation: Manifest) -> str:
    """The closing table as Markdown."""
    return markdown(read_table(evaluation))


def read_table(evaluation: Manifest) -> dict[str, dict[str, Any]]:
    """The closing table of an evaluation in the store."""
    return json.loads(evaluation.local(TABLE).read_text())


def closing_table(
    samples: Mapping[str, list[Sample]],
    problems: Mapping[str, Problem],
    scores: Mapping[str, Scores],
    config: Evaluate,
    judge: Judge,
) -> dict[str, dict[str, Any]]:
    """Checkpoint -> its metrics. Reasoning metrics come from `scores`, which has those of each checkpoint. For general
    prompts: scores of the reward models, if any, and verdicts of rules and of the judge, which is not part of the
    reward."""
    reasoning = {name: _reasoning(rows) for name, rows in samples.items()}
    general = {name: [s for s in rows if s.domain == "general"] for name, rows in samples.items()}
    opponent = next((name for name in OPPONENTS if name in general), None)
    table = {}
    for name in samples:
        if not reasoning[name]:
            raise InputError("evaluate: no held-out reasoning problems; raise problems.held_out_share")
        table[name] = reasoning_metrics(reasoning[name], scores[name], config.confidence, config.k)
        table[name] |= step_metrics(reasoning[name], problems)
        if general[name] and "helpful" in general[name][0].rewards:
            table[name] |= alignment_metrics(general[name], problems, config.confidence)
        table[name] |= judge_agreement(samples[name], problems) | rubric_metrics(samples[name])
        table[name] |= answer_metrics(general[name])
        table[name] |= refusal_metrics(general[name], problems, judge)
        table[name] |= instruction_metrics(general[name], problems)
        if opponent and (compared := compare(general[name], general[opponent], problems, judge)):
            rates = {f"win_rate_{opponent}": win_rate(compared), f"win_rate_{opponent}_lc": length_controlled(compared)}
            table[name] |= rates
    return table


def code(config: Evaluate) -> dict[str, Any]:
    """Digests of the judge's prompts, which decide the result in addition to the settings."""
    return {"judge_prompts": EVALUATION_DIGESTS | verifying_digests(config.judge)}


def _reasoning(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.domain == "reasoning"]


def _shown(name: str, sample: Sample, problem: Problem) -> dict[str, Any]:
    return {
        "checkpoint": name,
        "prompt": problem.text,
        "gold": problem.answer,
        "completion": sample.completion,
        **{f"reward_{k}": round(v, 3) for k, v in sample.rewards.items()},
    }


VERSION = 10
R1 = ("base", "cold_start_sft", "reasoning_rl", "sft", "reward_models", "alignment_rl")


def stage_for(stages: Sequence[str]) -> Stage:
    """The evaluation of the checkpoints of these stages, with the scores of `reward_models` if they are among them.

    Raises:
        InputError: a stage makes no checkpoint.
    """
    if wrong := set(stages) - {"reward_models"} - checkpoints(stages).keys():
        known = ", ".join([*CHECKPOINTS, f"{PREFIX}NAME"])
        raise InputError(f"evaluate: stage {sorted(wrong)[0]!r} makes no checkpoint; these do: {known}")
    mixed = any(name.startswith(PREFIX) for name in stages)  # students may have another tokenizer than their teacher
    return Stage("evaluate", VERSION, ("problems", *stages), build, files=files, extra=code, mixed=mixed, shown=shown)


def gate_stage(stages: Sequence[str]) -> Stage:
    """Like `stage_for`, for a gate that reads it before the run continues."""
    return replace(stage_for(stages), name="gate")


STUDENTS_AND_ROUNDS = rf"^({PREFIX}|alignment_rl_)[A-Za-z0-9][\w.-]*$"
"""Stages whose names depend on the recipe: a form cannot list them all."""
