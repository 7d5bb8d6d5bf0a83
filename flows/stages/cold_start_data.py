"""Cold-start data: demonstrations of the format, written or sampled, filtered (R1, stage 1)."""

from __future__ import annotations

from prefect import flow
from prefect.states import State

from flows.recipe.forms import Inputs, Seed
from flows.recipe.sections import ColdStartData
from flows.stages.base_model import zero_template
from flows.stages.contract import Context, Outcome, RunContext, Stage
from flows.stages.problems import TRAIN
from flows.stages.runner import run_stage
from grpo.data.records import Sample, read_problems, read_samples
from grpo.errors import InputError
from tasks.sft_data.cold_start import miniature_writer, sampled, solution, written
from tasks.sft_data.examples import write_examples

EXAMPLES = "examples"


def build(context: Context) -> Outcome:
    """Writes the cold-start demonstrations: written by the miniature's writer, or sampled and filtered."""
    config: ColdStartData = context.config
    known = read_problems(context.path("problems") / TRAIN)
    problems = [p for p in known if p.domain == "reasoning"][: config.problems]
    problems += [p for p in known if p.domain == "general"][: config.general]
    if config.source == "sampled":
        examples, counts = sampled(problems, _sample(context, len(problems)), config.filters)
    else:
        writer = solution if config.habits is None else miniature_writer(config.habits, context.seed)
        examples, counts = written(problems, writer, config.filters)
    if not examples:
        raise InputError(f"cold_start_data: the filters left none of {sum(counts.values())} demonstrations ({counts})")
    write_examples(context.out / EXAMPLES, examples)
    shown = [{"prompt": e["messages"][-1]["content"], "completion": e["completion"]} for e in examples[:20]]
    return Outcome(counts=counts, tables={"demonstrations": shown})


def _sample(context: Context, count: int) -> list[Sample]:
    """Completions of the base model, by the plain-text template, for the first `count` training problems."""
    config: ColdStartData = context.config
    raw = context.attempt.state / "raw"
    task = {
        "name": "base",
        "model": context.path("base"),
        "policy": context.inputs["base"].ref.digest,
        "problems": [context.path("problems") / TRAIN],
        "first": {"reasoning": count},
        "samples_per_problem": config.samples_per_problem,
        "sampling": config.sampling,
        "template": "r1_zero",
        "zero_template": zero_template(context.path("base")),
    }
    context.run_job("sample", out=raw, tasks=[task], hardware=config.hardware)
    return read_samples(raw / "base")


STAGE = Stage("cold_start_data", 7, ("problems", "base"), build)


@flow(name=STAGE.name)
def cold_start_data(
    config: ColdStartData, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None
) -> State:
    """Write or sample a few correct, readable demonstrations of the format."""
    return run_stage(STAGE, config, inputs or {}, seed, where or RunContext())
