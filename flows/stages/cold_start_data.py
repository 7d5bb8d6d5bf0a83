"""Cold-start data: demonstrations of the format, which are written, sampled, or rewritten from R1-Zero (R1, stage
1)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from flows.recipe.data_sections import ColdStartData
from flows.stage_contract.stage import Context, Outcome, Stage
from flows.stages.base_model import zero_template
from flows.stages.problems import TRAIN, evaluated_files
from grpo.data.records import Problem, Sample, read_problems, read_samples, write_rows
from grpo.data.template import form_of
from grpo.errors import InputError
from tasks.problems.decontaminate import HeldOut
from tasks.sft_data.cold_start import as_sample, miniature_writer, sampled, solution, without, written
from tasks.sft_data.examples import tokenizer_of, write_examples
from tasks.sft_data.teacher.rewriting import Rewrite, requests, rewritten, trajectories
from tasks.trainer.user_code import code_digests

EXAMPLES = "examples"
ZERO = "r1_zero"
_MODEL = "rewriter_model"


def build(context: Context) -> Outcome:
    """Writes the cold-start demonstrations."""
    config: ColdStartData = context.config
    known = read_problems(context.path("problems") / TRAIN)
    problems = [p for p in known if p.domain == "reasoning"][: config.problems]
    problems += [p for p in known if p.domain == "general"][: config.general]
    if config.source == "sampled":
        examples, counts = sampled(problems, _sample(context, len(problems), "base"), config.filters)
    elif config.source == ZERO:
        examples, counts = _from_zero(context, problems)
    else:
        writer = solution if config.habits is None else miniature_writer(config.habits, context.seed)
        examples, counts = written(problems, writer, config.filters, _tokenizer(context))
    held_out = HeldOut(*map(read_problems, evaluated_files(context.path("problems"))))
    examples, counts["contaminated"] = without(held_out, examples)
    counts["kept"] = len(examples)
    if not examples:
        raise InputError(f"cold_start_data: the filters left none of {sum(counts.values())} demonstrations ({counts})")
    write_examples(context.out / EXAMPLES, examples)
    shown = [
        {"prompt": e["messages"][-1]["content"], **({"original": e["original"]} if "original" in e else {})}
        | {"completion": e["completion"]}
        for e in examples[:20]
    ]
    return Outcome(counts=counts, tables={"demonstrations": shown})


def _sample(context: Context, count: int, policy: str) -> list[Sample]:
    """Completions of the input `policy` for the first `count` training problems, with the plain-text template."""
    config: ColdStartData = context.config
    raw = context.attempt.state / "raw"
    task = {
        "name": policy,
        "model": context.path(policy),
        "policy": context.inputs[policy].ref.digest,
        "problems": [context.path("problems") / TRAIN],
        "first": {"reasoning": count},
        "samples_per_problem": config.samples_per_problem,
        "sampling": config.sampling,
        "engine": config.engine,
        "template": "r1_zero",
        "zero_template": zero_template(context.path("base")),
    }
    context.run_job("sample", out=raw, tasks=[task], hardware=config.hardware)
    return read_samples(raw / policy)


def _from_zero(context: Context, problems: list[Problem]) -> tuple[list[Any], dict[str, int]]:
    """R1-Zero's right and readable trajectories, one per problem, rewritten and filtered again."""
    config: ColdStartData = context.config
    chosen, counts = trajectories(_sample(context, len(problems), ZERO), config.filters)
    if not chosen:
        raise InputError(f"cold_start_data: no trajectory of R1-Zero passes the filters ({counts}); train it longer")
    if config.habits is not None:
        writer, tokenizer = miniature_writer(config.habits, context.seed), _tokenizer(context)

        def rewrite(problem: Problem) -> Sample:
            return as_sample(problem, form_of(problem).render(*writer(problem)), tokenizer)

        examples, more = rewritten(problems, chosen, rewrite, config.filters)
    else:
        examples, more = rewritten(problems, chosen, _by_teacher(context, problems, chosen), config.filters)
    return examples, counts | more


def _tokenizer(context: Context) -> Any:
    """The tokenizer that counts what was written, None if no filter limits it."""
    return tokenizer_of(context.path("base")) if context.config.filters.context else None


def _by_teacher(context: Context, problems: list[Problem], chosen: dict[str, Sample]) -> Rewrite:
    """The teacher's rewrites. The job scores them, as it can end a verifier or a program that runs for too long."""
    config: ColdStartData = context.config
    assert config.rewriter is not None
    folder = context.attempt.state / "rewriting"
    folder.mkdir(exist_ok=True)
    write_rows(folder / "requests.parquet", requests(problems, chosen, config.rewriter.instruction), Problem)
    task = {
        "name": "rewritten",
        **config.rewriter.task(str(context.path(_MODEL)) if config.rewriter.model else None),
        "problems": [folder / "requests.parquet"],
        "samples_per_problem": 1,
    }
    # Not "samples": an earlier version left samples without accuracy there.
    context.run_job("sample", name="rewrites", out=folder / "scored", tasks=[task], hardware=config.hardware)
    samples = {sample.problem_id: sample for sample in read_samples(folder / "scored" / "rewritten")}
    return lambda problem: samples.get(problem.id)


def files(config: ColdStartData) -> dict[str, str | Path]:
    """The rewriter's model, if it has one."""
    return {_MODEL: config.rewriter.model} if config.rewriter and config.rewriter.model else {}


def code(config: ColdStartData) -> dict[str, Any]:
    """Digests of the user's own engines that sample or rewrite."""
    return code_digests(engines=[config.engine, config.rewriter.engine if config.rewriter else None])


STAGE = Stage("cold_start_data", 9, ("problems", "base"), build, files=files, extra=code)


def stage_of(config: ColdStartData) -> Stage:
    """The stage with the inputs that these settings need: with R1-Zero's checkpoint, or without."""
    return dataclasses.replace(STAGE, needs=(*STAGE.needs, ZERO)) if config.source == ZERO else STAGE
