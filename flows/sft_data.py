"""SFT data: rejection sampling from Dev2, reasoning and general, filtered by rules and a judge (R1, stage 3a)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import flow
from prefect.states import State

from flows.problems import TRAIN
from flows.recipe import SFTData
from flows.stage import Context, Outcome, Stage, Where, clear_folder, run_stage
from grpo.data import Sample, read_problems, read_samples, write_rows
from grpo.errors import InputError
from tasks.examples import example, write_examples
from tasks.judge import PROMPT_DIGESTS, make_judge
from tasks.rejection import KEPT, funnel, select

EXAMPLES = "examples"


def build(context: Context) -> Outcome:
    config: SFTData = context.config
    train = context.path("problems") / TRAIN
    raw = context.attempt.state / "raw"
    task = {
        "name": "dev2",
        "model": context.path("reasoning_rl"),
        "policy": context.inputs["reasoning_rl"].ref.digest,
        "problems": [train],
        "first": {"reasoning": config.problems, "general": config.general},
        "samples_per_problem": config.samples_per_problem,
        "sampling": config.sampling,
    }
    context.run_job("sample", out=raw, tasks=[task], hardware=config.hardware)
    problems = {problem.id: problem for problem in read_problems(train)}
    samples = select(
        read_samples(raw / "dev2"),
        problems,
        config.filters,
        make_judge(config.judge),
        config.judged,
        config.keep_per_problem,
    )
    kept = [s for s in samples if s.verdict == KEPT]
    if not kept:
        raise InputError(f"sft_data: none of {len(samples)} samples was kept: {funnel(samples)}")
    clear_folder(context.out)
    write_rows(context.out / "samples.parquet", samples, Sample)
    write_examples(context.out / EXAMPLES, [example(problems[s.problem_id], s.completion) for s in kept])
    counts = {
        f"{domain}_{name}": count
        for domain in ("reasoning", "general")
        for name, count in funnel([s for s in samples if s.domain == domain]).items()
    }
    return Outcome(
        counts=counts,
        metrics={"kept_share": len(kept) / len(samples)},
        tables={"samples": [_shown(s, problems[s.problem_id].text) for s in samples[:100]]},
    )


def _shown(sample: Sample, prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "completion": sample.completion, "verdict": sample.verdict, "reason": sample.reason}


STAGE = Stage("sft_data", 2, ("problems", "reasoning_rl"), build, extra=lambda _: {"judge_prompts": PROMPT_DIGESTS})


@flow(name=STAGE.name)
def sft_data(
    config: SFTData, inputs: Mapping[str, str] | None = None, seed: int = 0, where: Where | None = None
) -> State:
    """Sample Dev2, keep what is correct, readable and safe."""
    return run_stage(STAGE, config, inputs or {}, seed, where or Where())
