"""Base: a pretrained model from a folder or hub name, or a small one pretrained on the miniature world's text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.recipe.sections import Base
from flows.stage_contract.stage import Context, Outcome, Stage
from grpo.config.common import Hardware
from tasks.problems.miniature.corpus import CORPUS_VERSION, corpus, held_out_sums
from tasks.problems.miniature.everyday import held_out_seen

ZERO_TEMPLATE_FILE = "zero_template.txt"
"""Saved with the model, so that every stage prompts it with the same text."""


def zero_template(model: Path) -> str | None:
    """The plain-text template of a base model in the store; None for a model from elsewhere."""
    path = model / ZERO_TEMPLATE_FILE
    return path.read_text() if path.is_file() else None


def build(context: Context) -> Outcome:
    """Makes the base model: pretrains it from scratch, or copies the recipe's model."""
    config: Base = context.config
    (context.out / ZERO_TEMPLATE_FILE).write_text(config.zero_template)
    if config.pretrain is None:
        # A copy in the store, so that later stages depend on nothing outside it.
        hardware = Hardware(remote_code=config.remote_code)
        result = context.run_job("copy_model", model=str(context.path("model")), hardware=hardware)
        return Outcome(counts=result["counts"], model="base")
    file = context.attempt.work / "corpus.txt"
    written = corpus(config.documents, context.seed, config.tagged_share)
    file.write_text(written)
    result = context.run_job("pretrain", settings=config.pretrain, corpus=file)
    seen = {"held_out_sums": held_out_sums(written), "everyday_held_out_seen": held_out_seen(written.split("\n\n"))}
    return Outcome(
        counts=result["counts"] | seen,
        metrics=result["metrics"],
        steps_completed=result["steps_completed"],
        model="base",
    )


def files(config: Base) -> dict[str, str | Path]:
    """The paths whose contents are inputs of the stage, by name."""
    return {"model": config.model} if config.model else {}


def text(config: Base) -> dict[str, Any]:
    """The version of the miniature's text, which decides the result in addition to the settings."""
    return {"corpus": CORPUS_VERSION} if config.pretrain else {}


STAGE = Stage("base", 5, (), build, files=files, extra=text)


def base_stage(student: str | None = None) -> Stage:
    """The stage for the base model of the recipe, or of one of its students."""
    return replace(STAGE, name=f"{STAGE.name}_{student}") if student else STAGE
