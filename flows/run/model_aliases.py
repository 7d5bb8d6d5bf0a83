"""Updates aliases in MLflow's model registry when a run ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flows.home import store
from flows.stages.distill import PREFIX
from flows.stages.evaluate import checkpoints
from tasks.tracking.client import Tracking
from tasks.tracking.models.registry import CHAMPION


def move_aliases(
    record: Tracking,
    recipe: str,
    produced: Mapping[str, str],
    stages: Sequence[str],
    gates: Sequence[Mapping[str, Any]],
) -> None:
    """Gives each checkpoint that a run made or reused its name as an alias, such as dev1 or r1. The last policy becomes
    the champion if the run had gates and all of them passed without approval.

    `produced`: stage -> digest, for this run. `stages`: all stages of its graph, in order. `gates`: as in the run's
    result.
    """
    for stage, name in checkpoints(produced).items():
        record.models.set_alias(recipe, name, store().resolve(produced[stage]))
    made = [*checkpoints(stages)]  # in the order in which policies are trained; students are the last
    policies = [stage for stage in made if not stage.startswith(PREFIX)]
    has_students = len(made) > len(policies)  # a teacher does not become the champion
    passed = bool(gates) and all(gate["status"] == "passed" for gate in gates)
    if passed and not has_students and policies[-1] in produced:
        record.models.set_alias(recipe, CHAMPION, store().resolve(produced[policies[-1]]))
