"""SFT data: rejection sampling from Dev2, reasoning and general, filtered by rules and a judge, mixed (R1, stage 3a).

Problems are split into shards. A job samples them, shard by shard, into a folder that all runs share. Then each shard
is filtered in its own Prefect task. Finally, the samples that were kept are mixed into the data set.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flows.home import home
from flows.recipe.data_sections import SFTData
from flows.stage_contract.numbered_tasks import run_numbered
from flows.stage_contract.stage import Context, Outcome, Stage, clear_folder, hashed_values
from flows.stages.problems import BAD_RECORDS, TRAIN, evaluated_files
from grpo.config.judge import JudgeSettings
from grpo.data.records import Problem, Sample, read_problems, read_rows, write_rows
from grpo.data.template import form_of
from tasks.judges.base import JudgeCounts
from tasks.judges.calibration import Verified, calibrate, verified
from tasks.judges.prompt_digests import PROMPT_DIGESTS, verifying_digests
from tasks.judges.verifying import judge_of_samples, judged_answers
from tasks.problems.rows import ROWS_VERSION
from tasks.sft_data.card import CARD, write_card
from tasks.sft_data.given.shards import GivenShard, Taken, take
from tasks.sft_data.mix import TRAIN as EXAMPLES
from tasks.sft_data.mix import VALIDATION, counts_of, mix
from tasks.sft_data.plots import plot
from tasks.sft_data.rejection import judge_of, select_shard
from tasks.sft_data.shards import ProblemShard, cut
from tasks.sft_data.teacher.asking import asked
from tasks.trainer.outcome import StageFailed
from tasks.trainer.processes import Failure, Pool
from tasks.trainer.user_code import code_digests

__all__ = ["EXAMPLES", "STAGE", "VALIDATION"]

logger = logging.getLogger(__name__)

POLICY = "reasoning_rl"
_MODEL = "teacher_model"
_DAY_S = 86400.0
_LIMITS = {"time_limit_s", "memory_gb", "environment"}
_SAMPLED = {"samples_per_problem", "enough_right", "samples_max", "rewards", "sampling", "sampling_by_source", "engine"}
SHOWN = 100
SAMPLES = "samples"
"""Folder of the judged shards in the artifact, and of sampled shards in the home folder."""


def build(context: Context) -> Outcome:
    config: SFTData = context.config
    judge = judge_of_samples(config.judge, context.path("problems") / TRAIN)
    shards = _cut(context, judge)
    # Before anything is sampled, so that a mistake in the user's files shows at once.
    given = _take(context)
    # A forced run does not reuse the samples of other runs.
    sampled = context.attempt.state / SAMPLES if context.attempt.forced else home() / SAMPLES
    cost = _sample(context, shards, sampled, judge)
    clear_folder(context.out)
    agreement = _calibrate(context, shards, sampled)
    all_shards: list[ProblemShard | GivenShard] = [*shards, *(shard for taken in given for shard in taken.shards)]
    selected, judged = _select(context, all_shards, sampled)
    by_path = dict(zip(selected, all_shards, strict=True))
    statistics = mix(
        selected,
        lambda path: {problem.id: problem for problem in read_problems(by_path[path].problems)},
        config.mix,
        context.seed,
        context.out,
    )
    write_card(context.out, statistics, _about(context, agreement, judged))
    for path in (context.out / CARD, *plot(statistics, context.out)):
        context.tracking.log_file(context.run_id, path, "data")
    for path in selected:
        (context.out / SAMPLES).mkdir(exist_ok=True)
        path.replace(context.out / SAMPLES / path.name)
    prompts = {problem.id: problem.text for problem in read_problems(shards[0].problems)}
    shown = [
        {"prompt": prompts.get(s.problem_id, ""), "completion": s.completion, "verdict": s.verdict, "reason": s.reason}
        for s in itertools.islice(read_rows(context.out / SAMPLES, Sample), SHOWN)
    ]
    cost |= {f"judge_{name}": value for name, value in judged.cost().items()}
    return Outcome(
        counts=counts_of(statistics) | _given_counts(context, given),
        metrics={"kept_share": statistics["kept"] / statistics["sampled"], **agreement, **judged.shares(), **cost},
        tables={"samples": shown},
    )


def _cut(context: Context, judge: JudgeSettings | None) -> list[ProblemShard]:
    """Shards of the problems for the policy, and of those for the teacher, if there is one."""
    config: SFTData = context.config
    teacher, how = config.teacher, _how_sampled(config, judge)
    how |= {name: context.inputs[name].ref.digest for name in (judge.files() if judge else {})}
    by_policy = {"policy": context.inputs[POLICY].ref.digest, "seed": context.seed, **how}
    by_policy |= code_digests(_own_rewards(config), [config.engine])
    by_teacher: dict[str, Any] = {}
    if teacher is not None:
        model = context.inputs[_MODEL].ref.digest if teacher.model else teacher.identity
        settings = {**hashed_values(teacher, exclude={"model"}), "model": model}
        by_teacher = {"teacher": settings, "seed": context.seed, **how}
        by_teacher |= code_digests(_own_rewards(config), [teacher.engine])
    limits = {"reasoning": config.problems} | ({} if teacher else {"general": config.general})
    asked_of_all = [(limits, by_policy), *([({"general": config.general}, by_teacher)] if teacher else [])]
    folder, train = context.attempt.state / "problems", context.path("problems") / TRAIN
    return [
        shard
        for limits, made_by in asked_of_all
        if any(limits.values())
        for shard in cut(train, limits, config.shard_problems, made_by, context.seed, folder)
    ]


def _of_teacher(context: Context, shard: ProblemShard) -> dict[str, Any]:
    """Fields of the task that differ if the teacher answers a shard."""
    teacher = context.config.teacher
    if teacher is None or not shard.is_general():
        return {}
    problems = read_problems(shard.problems)
    path = context.attempt.state / f"asked-{shard.key}.parquet"
    write_rows(path, asked(problems, teacher.instruction), Problem)
    model = str(context.path(_MODEL)) if teacher.model else None
    return {**teacher.task(model), "problems": [path], "sampling_by_source": {}}


def _how_sampled(config: SFTData, judge: JudgeSettings | None) -> dict[str, Any]:
    """The part of the configuration that a problem's samples depend on, including the judge if it scores them, and the
    limits under which rewards fail. Default limits are left out, as earlier versions left out all."""
    limits = config.scoring.model_dump(mode="json", include=_LIMITS, exclude_defaults=True)
    scored = {"scoring": limits} if limits else {}
    judged = {"judge": hashed_values(judge)} | verifying_digests(judge) if judge else {}
    return hashed_values(config, include=_SAMPLED) | {"dtype": config.hardware.dtype} | scored | judged


def _sample(
    context: Context, shards: Sequence[ProblemShard], folder: Path, judge: JudgeSettings | None
) -> dict[str, float]:
    """Samples every missing shard. Returns the cost, and counts of what the judge did."""
    config: SFTData = context.config
    missing = [shard for shard in shards if not shard.is_sampled(folder)]
    logger.info("%d of %d shards are sampled already", len(shards) - len(missing), len(shards))
    if not missing:
        return {}
    task_of_all = {
        "model": context.path(POLICY),
        "policy": context.inputs[POLICY].ref.digest,
        **config.model_dump(mode="json", include=_SAMPLED),
    }
    tasks = [
        {"name": shard.key, "problems": [shard.problems], **task_of_all, **_of_teacher(context, shard)}
        for shard in missing
    ]
    result = context.run_job(
        "sample",
        out=folder,
        tasks=tasks,
        shard_size=config.shard_problems,
        scoring=config.scoring,
        judge=judge,
        hardware=config.hardware,
        ray=config.ray,
        again=True,  # if it had finished, somebody has deleted what it sampled
    )
    return {"sampling_device_hours": result["engine_s"] / 3600} | judged_answers(result)


def _calibrate(context: Context, shards: Sequence[ProblemShard], folder: Path) -> dict[str, float]:
    """The judge's agreement with the rules on verified answers."""
    settings = context.config.judge
    judge = judge_of(settings.model_dump_json(exclude_unset=True), str(context.attempt.state / "judge"))
    agreement = calibrate(
        judge,
        _verified(shards, folder),
        settings.agreement_min,
        size=settings.calibration,
        seed=context.seed,
        on_disagreement=settings.on_disagreement,
    )
    return {f"judge_{name}": value for name, value in agreement.items()}


def _verified(shards: Sequence[ProblemShard], folder: Path) -> Iterator[Verified]:
    for shard in shards:
        problems = {problem.id: problem for problem in read_problems(shard.problems)}
        yield from verified(read_rows(shard.samples(folder), Sample), problems)


def _select(
    context: Context, shards: Sequence[ProblemShard | GivenShard], sampled: Path
) -> tuple[list[Path], JudgeCounts]:
    """Filters every shard in its own Prefect task. Rules run in several processes, a judge model in this one."""
    config: SFTData = context.config
    folder = context.attempt.state / "selected"
    folder.mkdir(exist_ok=True)
    settings = {
        **config.model_dump(mode="json", include={"filters", "judged", "keep_per_problem", "scoring"}),
        "judge": config.judge.model_dump_json(exclude_unset=True),
        "replies": str(context.attempt.state / "judge"),
        "held_out": [str(path) for path in evaluated_files(context.path("problems"))],
        "seed": context.seed,
    }
    paths = [folder / f"{number:05d}.parquet" for number in range(len(shards))]
    counts = JudgeCounts()
    workers = (os.cpu_count() or 1) if not config.judge.is_model else 0
    with Pool(workers, _DAY_S, None) if workers else nullcontext() as pool:

        def of_shard(number: int) -> dict[str, float]:
            arguments = _filter_arguments(context, shards[number], sampled, paths[number], settings)
            if pool is None:
                return select_shard(*arguments)
            counts_of_shard = pool.submit(select_shard, *arguments).result()
            if isinstance(counts_of_shard, Failure):
                raise StageFailed(f"sft_data: filters failed on {arguments[0]}: {counts_of_shard.message}")
            return counts_of_shard

        names = [shard.source.name if isinstance(shard, GivenShard) else shard.source for shard in shards]
        titles = [context.name_task(f"filter {number} {name}") for number, name in enumerate(names)]
        show = context.progress.of("filters")
        for counts_of_shard in run_numbered(of_shard, "filter shard", titles, 8 * workers or 1, show):
            counts.merge(counts_of_shard)
    return paths, counts


def _filter_arguments(
    context: Context, shard: ProblemShard | GivenShard, sampled: Path, out: Path, settings: Mapping[str, Any]
) -> tuple[Path, Path, Path, Mapping[str, Any]]:
    """Arguments of `select_shard`. Given rows are not limited per problem: the mix draws from them."""
    policy = str(context.path(POLICY))
    if isinstance(shard, ProblemShard):
        taught = {"lengths_by": policy} if context.config.teacher and shard.is_general() else {}
        return shard.samples(sampled), shard.problems, out, {**settings, **taught}
    of_given = {"tokenizer": policy, "keep_per_problem": sys.maxsize}
    of_given |= {} if shard.source.judged else {"judged": []}
    return shard.samples, shard.problems, out, {**settings, **of_given}


def _take(context: Context) -> list[Taken]:
    """The mix's sources as shards, in the answer style of the training problems."""
    config: SFTData = context.config
    first: Problem | None = next(read_rows(context.path("problems") / TRAIN, Problem), None)
    style = form_of(first).style if first else "tags"
    folder = context.attempt.state / "given"
    return [take(source, folder / source.name, config.shard_problems, style) for source in config.mix.sources]


def _given_counts(context: Context, given: Sequence[Taken]) -> dict[str, int]:
    """Counts of the mix sources. Writes bad records to a file next to the data set."""
    sources = context.config.mix.sources
    bad = [{"source": s.name, "fault": f} for s, taken in zip(sources, given, strict=True) for f in taken.bad_records]
    if bad:
        logger.warning("%d bad records skipped, the first: %s", len(bad), bad[0]["fault"])
        (context.out / BAD_RECORDS).write_text("".join(json.dumps(b, ensure_ascii=False) + "\n" for b in bad))
    counted = zip(sources, given, strict=True)
    return {f"given_{s.name}_{name}": count for s, taken in counted for name, count in taken.counts.items()}


def _about(context: Context, agreement: Mapping[str, float], judged: JudgeCounts) -> dict[str, Any]:
    """Contents of the data card in addition to the statistics of the mix."""
    config: SFTData = context.config
    return {
        "title": "Rejection-sampled data",
        "description": "Completions of a policy, kept where rules and a judge found them right, readable and safe.",
        "settings": config.model_dump(mode="json"),
        "seed": context.seed,
        "inputs": {name: item.ref.digest for name, item in context.inputs.items()},
        "judge": {"kind": config.judge.kind, **agreement, **judged.verdicts()},
        "judge_prompts": PROMPT_DIGESTS | verifying_digests(config.judge),
    }


def _own_rewards(config: SFTData) -> list[str]:
    return [name for name in config.rewards if ":" in name]


def code(config: SFTData) -> dict[str, Any]:
    """What decides the result besides settings: judge's prompts, the user's functions, the row reader's version."""
    engines = [config.engine, config.teacher.engine if config.teacher else None]
    rows = {"rows": ROWS_VERSION} if config.mix.sources else {}
    own = code_digests(_own_rewards(config), engines)
    lengths = {"teacher_lengths": POLICY} if config.teacher else {}  # once, they were those of the teacher's requests
    return {"judge_prompts": PROMPT_DIGESTS | verifying_digests(config.judge)} | own | rows | lengths


def files(config: SFTData) -> dict[str, str | Path]:
    """The mix's sources, the teacher's model and the judge's folder: local ones count by their contents, others by
    name."""
    teacher = {_MODEL: config.teacher.model} if config.teacher and config.teacher.model else {}
    return {f"mix_{source.name}": source.place for source in config.mix.sources} | teacher | config.judge.files()


STAGE = Stage("sft_data", 7, ("problems", POLICY), build, files=files, extra=code)
