"""What a run would do, and why: which stages are reused, and which field or input makes another one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.cli.why import Ingredients, differences
from flows.home import store
from flows.pipelines import Step
from flows.recipe.schema import Recipe
from flows.run.executor import Choice
from flows.run.gates import check_gates
from flows.stages.contract import hashed_config, key_of
from flows.stages.references import external, resolve
from tasks.store.store import InputRef, Manifest


@dataclass(frozen=True)
class Planned:
    """One stage of a plan; `key` is None where it depends on what another stage will make."""

    name: str
    status: str  # "run" | "reuse" | "skip"
    why: str
    key: str | None = None
    took: float | None = None  # seconds, of the newest artifact of this stage


def plan(graph: Sequence[Step], recipe: Recipe, choice: Choice) -> list[Planned]:
    """The plan of a run with these arguments, computed by the same keys as the run itself.

    Raises:
        InputError: a stage, a gate or an input that was named is not there.
    """
    choice.check(graph)
    check_gates(recipe.gates, [step.name for step in graph], choice.approve)
    given = {stage: resolve(reference, stage).ref for stage, reference in choice.inputs.items()}
    known: dict[str, InputRef] = {}
    planned = []
    artifacts = store().list()
    for step in graph:
        config = step.config(recipe)
        files = {name: external(path).ref for name, path in step.stage.files(config).items()}
        newest = next((m for m in reversed(artifacts) if m.stage == step.name), None)
        took = newest.seconds if newest else None
        if not choice.runs(graph, step.name):
            planned.append(Planned(step.name, "skip", "not chosen", took=took))
        missing = [maker for maker in step.inputs.values() if maker not in given and maker not in known]
        if missing and choice.runs(graph, step.name):
            anew = [name for name in missing if choice.runs(graph, name)]
            why = f"input {anew[0]} is made anew" if anew else f"input {missing[0]}: the newest artifact of its stage"
            planned.append(Planned(step.name, "run", why, took=took))
        if missing:
            continue
        refs = {name: given.get(maker) or known[maker] for name, maker in step.inputs.items()} | files
        key = key_of(step.stage, config, recipe.seed, refs)
        found = store().find(key)
        if found is not None and step.name not in choice.force:
            known[step.name] = found.ref
        if not choice.runs(graph, step.name):
            continue
        if step.name in known:
            planned.append(Planned(step.name, "reuse", f"made {found.created[:16]}" if found else "", key, took))
        else:
            why = "forced" if step.name in choice.force else difference(newest, step, config, recipe.seed, refs)
            planned.append(Planned(step.name, "run", why, key, took))
    return planned


def difference(newest: Manifest | None, step: Step, config: Any, seed: int, refs: Mapping[str, InputRef]) -> str:
    """Why the newest artifact of a stage does not serve: the fields and inputs that differ."""
    if newest is None:
        return "never made"
    changes = differences(
        Ingredients.of(newest), Ingredients(step.stage.version, hashed_config(step.stage, config, seed), refs)
    )
    shown = ", ".join(map(str, changes[:3])) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")
    return shown or "its artifact is gone or damaged"
