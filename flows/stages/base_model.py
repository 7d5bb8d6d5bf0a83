"""Base: a pretrained model from a folder or hub name, or a small one pretrained on the miniature world's text."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.states import State

from flows.recipe.forms import Inputs, Seed
from flows.recipe.sections import Base
from flows.stages.contract import Context, Outcome, RunContext, Stage
from flows.stages.runner import run_stage
from grpo.config.common import Hardware
from tasks.problems.miniature.corpus import corpus

ZERO_TEMPLATE_FILE = "zero_template.txt"
"""Saved with the model, so that every stage prompts it in the same words."""


def zero_template(model: Path) -> str | None:
    """The plain-text template of a base model in the store; None for a model from elsewhere."""
    path = model / ZERO_TEMPLATE_FILE
    return path.read_text() if path.is_file() else None


def build(context: Context) -> Outcome:
    """The base model: pretrained from scratch, or a copy of the recipe's model."""
    config: Base = context.config
    (context.out / ZERO_TEMPLATE_FILE).write_text(config.zero_template)
    if config.pretrain is None:
        # One copy in the store: later stages then depend on nothing outside it.
        hardware = Hardware(remote_code=config.remote_code)
        result = context.run_job("copy_model", model=str(context.path("model")), hardware=hardware)
        return Outcome(counts=result["counts"], model="base")
    text = context.attempt.work / "corpus.txt"
    text.write_text(corpus(config.documents, context.seed, config.tagged_share))
    result = context.run_job("pretrain", settings=config.pretrain, corpus=text)
    return Outcome(
        counts=result["counts"], metrics=result["metrics"], steps_completed=result["steps_completed"], model="base"
    )


def files(config: Base) -> dict[str, str | Path]:
    """The paths whose contents are inputs of the stage, by name."""
    return {"model": config.model} if config.model else {}


STAGE = Stage("base", 5, (), build, files=files)


@flow(name=STAGE.name)
def base(config: Base, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """Take a pretrained base model into the store, or pretrain a small one."""
    return run_stage(STAGE, config, inputs or {}, seed, where or RunContext())
