"""The plan of a run: which stages are reused, and which field or input causes a stage to run.

`resolve_inputs` decides which artifacts a step reads, for both the plan and the run itself (flows/run/executor.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flows.home import store
from flows.recipe.schema import Recipe
from flows.run.gates.checks import check_gates
from flows.stage_contract.references import named_files, resolve
from flows.stage_contract.stage import Step, hashed_config, key_of
from grpo.errors import InputError
from tasks.gates.conditions import Gate
from tasks.store.diff import Ingredients, differences
from tasks.store.manifest import InputRef, Manifest


@dataclass
class StageSelection:
    """Which stages of a pipeline run, which are given as artifacts instead (`inputs`), and which gates are approved in
    advance."""

    start: str | None = None
    only: str | None = None
    force: Sequence[str] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    approve: Sequence[str] = ()

    def check(self, graph: Sequence[Step], gates: Sequence[Gate]) -> None:
        """`gates`: those that apply to the graph.

        Raises:
            InputError: a stage is not in the graph, no stage is left to run, or an argument would have no effect.
        """
        names = [step.name for step in graph]
        for name in [*self.force, *filter(None, (self.start, self.only)), *self.inputs]:
            if name not in names:
                raise InputError(f"unknown stage {name!r}; the stages are {', '.join(names)}")
        if self.start and self.only:
            raise InputError("give --from or --only, not both")
        chosen = {step.name: step for step in graph if self.runs(graph, step.name)}
        if not chosen:
            raise InputError(f"--input {[*self.inputs][-1]}: no stage is left to run; leave it out")
        for name in self.force:
            if name not in chosen:
                why = "--input gives it" if name in self.inputs else f"this run does only {', '.join(chosen)}"
                raise InputError(f"--force {name}: {why}; leave one of the two out")
        read = {maker for step in chosen.values() for maker in step.inputs.values()}
        for gate in gates:
            if gate.after in chosen:  # its own evaluation reads the problems, and the base model for its template
                read |= gate.stages() | ({"problems", "base"} if gate.evaluate else set())
        for name in self.inputs:
            if name not in read:
                raise InputError(f"--input {name}: nothing in this run reads it; it does only {', '.join(chosen)}")

    def runs(self, graph: Sequence[Step], name: str) -> bool:
        """Whether the stage is made or reused under its own key. One that --input gives is taken as it is."""
        names = [step.name for step in graph]
        if name in self.inputs:
            return False
        if self.only:
            return name == self.only
        return self.start is None or names.index(name) >= names.index(self.start)


def resolve_inputs(
    step: Step, graph: Sequence[Step], recipe: Recipe, selection: StageSelection, produced: Mapping[str, str]
) -> dict[str, str]:
    """Input of the step -> reference of the artifact that it reads. `produced`: stage -> key or digest, for this run so
    far."""
    return {name: reference_to(maker, graph, recipe, selection, produced) for name, maker in step.inputs.items()}


def reference_to(
    stage: str, graph: Sequence[Step], recipe: Recipe, selection: StageSelection, produced: Mapping[str, str]
) -> str:
    """Reference to the artifact of an earlier stage: the one given by --input, else this run's, else the one that
    exactly this recipe made before, else the newest of the stage."""
    reference = selection.inputs.get(stage)
    if reference == "latest":  # uses the stage's name, whatever the step calls the input
        return f"latest:{stage}"
    if reference:
        return reference
    if stage in produced:
        return produced[stage]
    manifest = existing(stage, graph, recipe)
    return manifest.key if manifest else f"latest:{stage}"


def existing(stage: str, graph: Sequence[Step], recipe: Recipe) -> Manifest | None:
    """The artifact of a stage that this exact recipe made before, from inputs that it also made."""
    steps = {step.name: step for step in graph}
    manifests: dict[str, Manifest | None] = {}

    def find(name: str) -> Manifest | None:
        if name not in manifests:
            step = steps[name]
            inputs = {input_name: find(maker) for input_name, maker in step.inputs.items()}
            refs = {input_name: manifest.ref for input_name, manifest in inputs.items() if manifest}
            complete = len(refs) == len(inputs)
            manifests[name] = store().find(_key(step, recipe, refs), stage=name) if complete else None
        return manifests[name]

    return find(stage)


def _key(step: Step, recipe: Recipe, refs: Mapping[str, InputRef]) -> str:
    config = step.config(recipe)
    files = {name: file.ref for name, file in named_files(step.stage.files(config), recipe).items()}
    return key_of(step.stage, config, recipe.seed, {**refs, **files})


@dataclass(frozen=True)
class Planned:
    """One stage of a plan. `key` is None if it is skipped, or depends on an artifact that the run makes anew."""

    name: str
    status: Literal["run", "reuse", "skip"]
    why: str
    key: str | None = None
    took: float | None = None  # duration of the newest artifact of this stage, seconds


def plan(graph: Sequence[Step], recipe: Recipe, selection: StageSelection) -> list[Planned]:
    """The plan of a run with these arguments, computed from the same inputs and keys as the run itself.

    Raises:
        InputError: a given stage, gate, file or input does not exist.
    """
    selection.check(graph, check_gates(recipe.gates, graph, selection.approve))
    for stage, reference in selection.inputs.items():
        resolve(reference, stage)
    newest_by_stage = store().newest_by_stage()
    reused: dict[str, str] = {}  # stage -> key
    running: set[str] = set()
    planned = []
    for step in graph:
        config = step.config(recipe)
        files = {name: file.ref for name, file in named_files(step.stage.files(config), recipe).items()}
        newest = newest_by_stage.get(step.name)
        took = newest.seconds if newest else None
        if not selection.runs(graph, step.name):
            given = selection.inputs.get(step.name)
            planned.append(Planned(step.name, "skip", f"given: {given}" if given else "not chosen", took=took))
            continue
        made_anew = [maker for maker in step.inputs.values() if maker in running]
        if made_anew:  # the key depends on what it will be
            running.add(step.name)
            planned.append(Planned(step.name, "run", f"input {made_anew[0]} is made anew", took=took))
            continue
        references = resolve_inputs(step, graph, recipe, selection, reused)
        note = _newest_inputs(step, selection, references)
        refs = {name: resolve(reference).ref for name, reference in references.items()} | files
        key = key_of(step.stage, config, recipe.seed, refs)
        forced = step.name in selection.force
        manifest = None if forced else store().find(key, stage=step.name)
        if manifest is not None:
            reused[step.name] = manifest.key
            planned.append(Planned(step.name, "reuse", f"made {manifest.created[:16]}{note}", manifest.key, took))
        else:
            why = "forced" if forced else difference(newest, step, config, recipe.seed, refs)
            running.add(step.name)
            planned.append(Planned(step.name, "run", f"{why}{note}", key, took))
    return planned


def _newest_inputs(step: Step, selection: StageSelection, references: Mapping[str, str]) -> str:
    """Names the inputs for which this recipe has made nothing, so that the newest of their stage are read."""
    newest = [
        maker
        for name, maker in step.inputs.items()
        if maker not in selection.inputs and references[name].startswith("latest:")
    ]
    return "".join(f"; input {maker}: the newest artifact of its stage" for maker in newest)


def difference(newest: Manifest | None, step: Step, config: Any, seed: int, refs: Mapping[str, InputRef]) -> str:
    """Why the newest artifact of a stage cannot be reused: the fields and inputs that differ."""
    if newest is None:
        return "never made"
    changes = differences(
        Ingredients.of(newest), Ingredients(step.stage.version, hashed_config(step.stage, config, seed), refs)
    )
    shown = ", ".join(map(str, changes[:3])) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")
    return shown or "its artifact is gone or damaged"
