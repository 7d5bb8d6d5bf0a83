"""Estimates from earlier builds: what a stage took on this machine, scaled to other settings.

If an earlier build had the same stage configuration, the same model architecture and the same amount of data, the next
one will take what it took, whatever the seed. Otherwise, the computed estimates give the ratio: if a build took 40 s
and its configuration computes to 100 s, then a configuration that computes to 200 s is estimated at 80 s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from pydantic import BaseModel, ValidationError

from flows.recipe.schema import Recipe
from flows.run.stage_work import computed
from flows.stage_contract.stage import NOT_HASHED, Step, hashed_config
from grpo.errors import InputError
from tasks.estimate.architecture import Architecture
from tasks.estimate.devices import Device
from tasks.estimate.measured import processor_name
from tasks.estimate.stages import Assumed, Estimate, Estimator
from tasks.store.manifest import Manifest

SAME = 0.02
"""Computed estimates that differ by less than this share count as the same work, because vocabularies differ by a few
tokens."""
FARTHEST = 100.0
"""Builds whose work differs by more than this factor are ignored."""
MEMORY_MARGIN = 1.1
"""Factor on the measured peak memory, so that the estimate is an upper bound."""
NEWEST = 5
"""Maximum number of builds of the same work that count. Time is their median, memory their maximum."""


@dataclass(frozen=True)
class Build:
    """An earlier build of a stage, with the estimate computed for its own configuration."""

    manifest: Manifest
    work: Estimate
    same_configuration: bool

    def ratio(self, now: Estimate) -> float:
        """Factor from this build's work to that of `now`."""
        return now.seconds / self.work.seconds if self.work.seconds else 1.0

    def is_same(self, now: Estimate) -> bool:
        return self.same_configuration and abs(self.ratio(now) - 1) < SAME


class EarlierBuilds:
    """Builds in a store on one device.

    Args:
        manifests: Manifests of all artifacts, oldest first.
    """

    def __init__(self, manifests: Sequence[Manifest], device: Device, assumed: Assumed):
        self._by_key = {manifest.key: manifest for manifest in manifests}
        self._builds: dict[str, list[Manifest]] = {}
        for manifest in manifests:
            if is_on(manifest, device):
                self._builds.setdefault(manifest.stage, []).append(manifest)
        self._device, self._assumed = device, assumed

    def correct(self, step: Step, recipe: Recipe, now: Estimate) -> Estimate:
        """The computed estimate `now`, with time and memory taken from the nearest earlier builds, if there are any."""
        builds = [build for m in self._builds.get(step.name, []) if (build := self._build(m, step, recipe, now))]
        if not builds:
            return now
        same = [build for build in builds if build.is_same(now)][-NEWEST:]
        nearest = same or [min(reversed(builds), key=lambda build: abs(math.log(build.ratio(now))))]
        seconds = median(build.manifest.seconds * (1.0 if same else build.ratio(now)) for build in nearest)
        return replace(
            now,
            seconds=seconds,
            device_seconds=seconds * now.devices,
            measured_peak=max(_peak(build, now, scaled=not same) for build in nearest),
            source="measured" if same else "scaled",
            source_key=nearest[-1].manifest.key,
        )

    def _build(self, manifest: Manifest, step: Step, recipe: Recipe, now: Estimate) -> Build | None:
        """None if its configuration is no longer valid, its model is gone, or its work is of a different size."""
        lineage = self._lineage(manifest)
        then = _recipe_of(lineage, recipe)
        section = step.config(recipe)
        config = _section_of(manifest, section, step)
        shape = _shape(lineage)
        if config is None or (shape is None and now.memory is not None):
            return None
        estimator = Estimator(shape or _NO_MODEL, self._device, self._assumed)
        try:
            work = computed(step, config, then, estimator)
        except InputError:
            return None
        today = {**hashed_config(step.stage, section, 0), "seed": None}
        build = Build(manifest, work, {**manifest.config_today, "seed": None} == today)
        near = 1 / FARTHEST < build.ratio(now) < FARTHEST
        return build if near and work.devices == now.devices else None

    def _lineage(self, manifest: Manifest) -> list[Manifest]:
        """The artifact and everything it was made from, nearest first."""
        found, waiting = {manifest.key: manifest}, [manifest]
        while waiting:
            for ref in waiting.pop(0).inputs.values():
                source = self._by_key.get(ref.key or "")
                if source is not None and source.key not in found:
                    found[source.key] = source
                    waiting.append(source)
        return [*found.values()]


_NO_MODEL = Architecture(1, 1, 1, 1, 1, 1, 1, True)


def is_on(manifest: Manifest, device: Device) -> bool:
    """Whether it was made on this kind of device: this machine's CPU, or a GPU with this name."""
    if manifest.machine is None:  # made by an earlier version, or continued
        return False
    return manifest.machine == processor_name() if device.kind == "cpu" else device.name in manifest.machine


def _peak(build: Build, now: Estimate, scaled: bool) -> float:
    measured = MEMORY_MARGIN * (build.manifest.peak_memory or 0)
    if not scaled or now.memory is None or build.work.memory is None:
        return measured
    return measured * max(1.0, now.memory.peak / build.work.memory.peak)


def _recipe_of(lineage: Iterable[Manifest], recipe: Recipe) -> Recipe:
    """The recipe, with the sections that the artifacts were made with."""
    sections: dict[str, BaseModel] = {}
    for manifest in lineage:
        section = getattr(recipe, manifest.stage, None)
        if isinstance(section, BaseModel) and manifest.stage not in sections:
            made_by = _validated(manifest.config, section, frozenset())
            sections |= {manifest.stage: made_by} if made_by else {}
    return recipe.model_copy(update=sections)


def _section_of(manifest: Manifest, section: BaseModel, step: Step) -> BaseModel | None:
    """The stage's section as it was. Settings that are not hashed are as in `section`."""
    return _validated(manifest.config, section, frozenset(step.stage.extra(section)))


def _validated(hashed: Mapping[str, Any], section: BaseModel, beside: frozenset[str]) -> BaseModel | None:
    values = {name: value for name, value in hashed.items() if name not in beside and name != "seed"}
    known = {name: value for name, value in values.items() if name in type(section).model_fields}
    try:
        return type(section).model_validate(_with_places(known, section, section.model_dump(mode="json")))
    except ValidationError:
        return None


def _with_places(then: Any, settings: Any, now: Any) -> Any:
    """The values `then`, with those fields of `settings` that are not hashed, such as the number of processes. `now` is
    the dump of `settings`."""
    if not isinstance(then, dict) or not isinstance(now, dict):
        return then
    if isinstance(settings, Mapping):  # its keys are a user's, and all hashed
        return {name: _with_places(value, settings.get(name), now.get(name)) for name, value in then.items()}
    places = {name: value for name, value in now.items() if name in NOT_HASHED}
    return places | {
        name: _with_places(value, getattr(settings, name, None), now.get(name)) for name, value in then.items()
    }


def _shape(lineage: Iterable[Manifest]) -> Architecture | None:
    """Architecture of the nearest checkpoint."""
    for manifest in lineage:
        if "config.json" in manifest.files:
            try:
                return Architecture.from_config(json.loads(manifest.local("config.json").read_text()))
            except (OSError, ValueError, KeyError):
                continue
    return None
