"""The estimate of a recipe, stage by stage: time, memory, disk and network.

It is stored as estimate.json in the MLflow run of every recipe.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flows.home import home, store
from flows.recipe.schema import Recipe
from flows.run.earlier_builds import EarlierBuilds
from flows.run.plan import existing
from flows.run.prompt_lengths import prompt_tokens
from flows.run.stage_work import architecture_of, base_of, computed
from flows.stage_contract.stage import Step
from flows.stages import problems
from grpo.errors import InputError
from tasks.estimate.devices import Device
from tasks.estimate.local_device import local_device
from tasks.estimate.stages import Assumed, Estimate, Estimator
from tasks.store.manifest import Manifest

logger = logging.getLogger(__name__)

FILE = "estimate.json"


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of an estimate: the device, values that no setting determines, and the path of the base model's
    config.json if it is neither in a local folder nor in the cache."""

    device: Device
    assumed: Assumed = field(default_factory=Assumed)
    config: Path | None = None
    builds: Sequence[Manifest] = ()  # all artifacts of the store, oldest first; preferred to formulas


def with_prompts(assumptions: Assumptions, graph: Sequence[Step], recipe: Recipe) -> Assumptions:
    """The assumptions with the mean prompt length of the recipe's own problems, if they can be read here."""
    try:
        made = existing(problems.STAGE.name, graph, recipe)
    except InputError:  # a source's file is missing; reporting that is not the estimate's task
        made = None
    found = prompt_tokens(recipe, made)
    return replace(assumptions, assumed=replace(assumptions.assumed, prompt_tokens=found)) if found else assumptions


def estimate(graph: Sequence[Step], recipe: Recipe, assumptions: Assumptions) -> dict[str, Estimate]:
    """Stage -> its estimate.

    Raises:
        InputError: the architecture of the base model is unknown.
    """
    assumed = assumptions.assumed
    earlier = EarlierBuilds(assumptions.builds, assumptions.device, assumed)
    estimates: dict[str, Estimate] = {}
    for step in graph:
        architecture = architecture_of(base_of(step.name, recipe), assumptions.config)
        estimator = Estimator(architecture, assumptions.device, assumed)
        estimates[step.name] = earlier.correct(step, recipe, computed(step, step.config(recipe), recipe, estimator))
    return estimates


def to_json(estimates: Mapping[str, Estimate], assumptions: Assumptions) -> dict[str, Any]:
    """Plain values: assumptions, stages, and the total."""
    total = sum(estimates.values(), Estimate())
    totals = {"seconds": total.seconds, "device_hours": total.device_seconds / 3600, "disk_gb": total.disk / 1e9}
    return {
        "device": asdict(assumptions.device),
        "assumed": asdict(assumptions.assumed),
        "stages": {name: estimate.plain() for name, estimate in estimates.items()},
        "total": totals,
    }


def for_record(graph: Sequence[Step], recipe: Recipe) -> str | None:
    """The estimate for this machine as JSON text, logged next to the measured values. None if the base model's
    architecture or the GPU is unknown, or if anything else goes wrong: a run does not need its estimate."""
    try:
        assumptions = with_prompts(Assumptions(local_device(home()), builds=store().list()), graph, recipe)
        return json.dumps(to_json(estimate(graph, recipe, assumptions), assumptions), indent=2)
    except InputError:
        return None
    except Exception:
        logger.warning("this run has no estimate", exc_info=True)
        return None
