"""The stage contract: resolve the inputs, make the key, reuse what exists, else build and publish.

    key = sha256(stage, stage version, canonical config with the seed, digests of the inputs)

A stage is a `Stage` and a Prefect flow of the same name in its own module. What changes where a stage runs but not
what it makes (devices, where it is logged) is no part of the key.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, State
from pydantic import BaseModel, ConfigDict, Field

from flows.home import home, store, tracking
from flows.progress import Progress
from flows.stages.references import Input, external, resolve
from flows.stages.run_page import RunPage
from grpo.errors import InputError
from grpo.processes.peak_memory import FILE as MEMORY_USED
from tasks.store.stale import lines_of, make_current, mark
from tasks.store.store import Attempt, InputRef, Manifest, artifact_key
from tasks.tracking.client import CONFIG_FILE, Tracking
from tasks.tracking.reader import MADE_BY_TAG, STAGE_TAG
from tasks.tracking.run_names import name_run
from tasks.trainer.launch import launch, load_ahead
from tasks.trainer.rendezvous import Meeting

logger = logging.getLogger(__name__)

NOT_HASHED = {
    *("device", "workers", "processes", "nodes", "gpu_memory_utilization", "kv_cache_gb"),
    *("url", "api_key_env", "transfer", "timeout_s", "retries", "concurrency", "requests_per_minute"),
    *("backoff_s", "away_max_s", "ray"),
}
"""Settings of where and how fast, by name."""


ALONE = "single-stages"
"""The experiment of a stage that was run by itself, for no recipe."""


class Where(BaseModel):
    """Where a stage runs and is recorded: nothing of what it makes, so no part of its key."""

    model_config = ConfigDict(extra="forbid")

    recipe: str = Field(ALONE, description="MLflow experiment.")
    parent_run_id: str | None = Field(None, description="MLflow run of the recipe run that this stage belongs to.")
    force: bool = Field(False, description="Make it again although it exists.")
    key: str | None = Field(None, description="The key that the caller found; another one here is an error.")
    time_limit_hours: float | None = Field(
        None, gt=0, description="A trainer that runs longer is stopped. None: never."
    )


@dataclass
class Outcome:
    """What a stage reports about what it built in its `out` folder."""

    counts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    steps_completed: int | None = None
    model: str | None = None  # the name of the checkpoint, if `out` is one
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """A stage of the recipe. `needs` are the stages whose artifacts it reads; `version` changes with its code's output;
    `files` names local files and folders that the configuration points to; `extra` is hashed beside the config;
    `mixed` allows models with different tokenizers or chat templates among the inputs; `shown` is Markdown about an
    artifact for Prefect's pages, empty: its numbers."""

    name: str
    version: int
    needs: tuple[str, ...]
    build: Callable[[Context], Outcome]
    files: Callable[[Any], dict[str, str | Path]] = lambda config: {}
    extra: Callable[[Any], dict[str, Any]] = lambda config: {}
    mixed: bool = False
    shown: Callable[[Manifest], str] = lambda manifest: ""


@dataclass
class Context:
    """What a stage's `build` works with."""

    stage: Stage
    config: Any
    seed: int
    inputs: dict[str, Input]
    attempt: Attempt
    where: Where
    tracking: Tracking
    run_id: str
    progress: Progress
    page: RunPage

    @property
    def out(self) -> Path:
        return self.attempt.out

    def path(self, name: str) -> Path:
        """Where the input `name` lies."""
        return self.inputs[name].path

    def run_job(self, kind: str, name: str = "trainer", out: Path | None = None, **values: Any) -> dict[str, Any]:
        """Run a job of grpo/ in a subprocess and return its result. Its metrics go to MLflow and to the progress line.

        A second call with the same `name`, after a kill, continues from the job's last checkpoint; a job that had
        already finished returns its result at once.
        """
        work = self.attempt.work / name
        work.mkdir(parents=True, exist_ok=True)
        done = work / "done.json"
        if done.is_file():
            return json.loads(done.read_text())
        metrics = work / "metrics.jsonl"
        prefix = "" if name == "trainer" else f"{name}/"
        if metrics.is_file():  # of the attempt that this one continues: its curve belongs to this run too
            self._on_metrics(
                prefix, [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
            )
        job = {
            "kind": kind,
            "out": out or self.out,
            "state": self.attempt.state / name,
            "metrics": metrics,
            "result": work / "result.json",
            "seed": self.seed,
            **values,
        }
        limit = self.where.time_limit_hours
        run = task(name=f"run {kind}", task_run_name=f"{self.stage.name}: {name}", cache_policy=NO_CACHE)(launch)
        result = run(
            json.loads(json.dumps(job, default=_jsonable)),
            work,
            on_metrics=lambda records: self._on_metrics(prefix, records),
            meeting=Meeting.of_environment(home()),
            time_limit_s=limit * 3600 if limit else None,
            lock_fd=self.attempt.lock_fd,
        )
        if (used := work / MEMORY_USED).is_file():  # beside the estimate, for whoever compares
            gigabytes = json.loads(used.read_text())["peak_bytes"] / 1e9
            step = result.get("steps_completed", 0)
            self.tracking.log_metrics(self.run_id, [{"step": step, f"{prefix}peak_memory_gb": gigabytes}])
        partial = done.with_suffix(".partial")
        partial.write_text(json.dumps(result))
        partial.replace(done)
        return result

    def _on_metrics(self, prefix: str, records: list[dict[str, Any]]) -> None:
        lines = [self.progress.update(self.stage.name, prefix.rstrip("/"), record) for record in records]
        if records:
            last = records[-1]
            self.page.progress(prefix.rstrip("/"), int(last["step"]), int(last.get("of", 0)), lines[-1])
        named = [{(k if k == "step" else prefix + k): v for k, v in r.items() if k != "of"} for r in records]
        self.tracking.log_metrics(self.run_id, named)


def _jsonable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} cannot stand in a job file")


def hashed_config(stage: Stage, config: BaseModel, seed: int) -> dict[str, Any]:
    """What of a configuration decides the stage's output."""
    files = stage.files(config)
    values = _without_places(config.model_dump(mode="json"), {str(path): name for name, path in files.items()})
    return {**values, **stage.extra(config), "seed": seed}


def hashed_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of a configuration without those that change no result."""
    found: dict[str, Any] = _without_places(values, {})
    return found


def _without_places(value: Any, files: Mapping[str, str]) -> Any:
    """A path says where a file lies; what is in it enters the key as an input's digest."""
    if isinstance(value, Mapping):
        return {k: _without_places(v, files) for k, v in value.items() if k not in NOT_HASHED}
    if isinstance(value, list):
        return [_without_places(v, files) for v in value]
    return f"input:{files[value]}" if isinstance(value, str) and value in files else value


def key_of(stage: Stage, config: BaseModel, seed: int, inputs: Mapping[str, InputRef]) -> str:
    digests = {name: ref.digest for name, ref in inputs.items()}
    return artifact_key(stage.name, stage.version, hashed_config(stage, config, seed), digests)


def find_inputs(stage: Stage, config: BaseModel, inputs: Mapping[str, str]) -> dict[str, Input]:
    """The inputs given, the newest artifact of every needed stage that is not given, and the configuration's files."""
    if unknown := set(inputs) - set(stage.needs):
        known = ", ".join(stage.needs) or "none"
        raise InputError(f"stage {stage.name!r} has no input {sorted(unknown)[0]!r}; its inputs: {known}")
    found = {name: resolve(inputs.get(name, "latest"), name) for name in stage.needs}
    tokenizers = {
        n: i.manifest.tokenizer_sha256 for n, i in found.items() if i.manifest and i.manifest.tokenizer_sha256
    }
    if len(set(tokenizers.values())) > 1 and not stage.mixed:
        first, *others = tokenizers
        other = next(name for name in others if tokenizers[name] != tokenizers[first])
        raise InputError(
            f"stage {stage.name!r}: inputs {first} and {other} have different tokenizers or chat templates; take both "
            "from one recipe"
        )
    return found | {name: external(path) for name, path in stage.files(config).items()}


def find_key(stage: Stage, config: BaseModel, inputs: Mapping[str, str], seed: int) -> tuple[dict[str, Input], str]:
    """A stage's inputs, and its key with them."""
    found = find_inputs(stage, config, inputs)
    return found, key_of(stage, config, seed, {name: item.ref for name, item in found.items()})


def run_stage(stage: Stage, config: BaseModel, inputs: Mapping[str, str], seed: int, where: Where) -> State:
    """Run one stage by the contract. The state's data is `summary` of the artifact, with status "ran" or "reused"."""
    found, key = find_key(stage, config, inputs, seed)
    if where.key not in (None, key):
        raise InputError(
            f"stage {stage.name!r} has another key here, {key[:16]}, than at its caller, {where.key[:16]}: both need "
            "the same version of r1flow and the same files"
        )
    existing = None if where.force else store().find(key)
    record = tracking()
    progress = Progress.current()
    if existing is None:
        with store().attempt(stage.name, key, force=where.force) as attempt:
            # Another process may have published it while this one waited for the lock.
            existing = None if where.force else store().find(key)
            if existing is None:
                manifest = _build(stage, config, seed, found, attempt, where, record, progress)
                _make_current(record, manifest, found, seed, where)
                progress.finished(stage.name, "ran", manifest.seconds, manifest.metrics)
                RunPage(stage.name).result(manifest, "ran", stage.shown)
                return Completed(name="Completed", data=summary(manifest, "ran"))
    _record_reuse(record, stage, existing, where)
    _make_current(record, existing, found, seed, where)
    progress.finished(stage.name, "reused", existing.seconds, existing.metrics)
    if where.parent_run_id is None:  # a person asked for this stage, and looks at its page
        RunPage(stage.name).reused(record, existing, stage.shown)
    return Completed(name="Reused", data=summary(existing, "reused"))


def _make_current(record: Tracking, made: Manifest, inputs: Mapping[str, Input], seed: int, where: Where) -> None:
    """What was made and read is what its recipe has now; what was made from something else is stale."""
    read = [item.manifest for item in inputs.values() if item.manifest is not None]
    recipes = lines_of(store(), seed, read) if where.recipe == ALONE else [where.recipe]
    # A list, not a generator: every recipe is told.
    if any([make_current(store(), recipe, seed, [*read, made]) for recipe in recipes]):
        mark(store(), record)


def summary(manifest: Manifest, status: str) -> dict[str, Any]:
    """Plain values about an artifact: what a stage's flow returns."""
    return {
        "name": manifest.stage,
        "status": status,
        "key": manifest.key,
        "digest": manifest.digest,
        "seconds": manifest.seconds,
        "metrics": manifest.metrics,
        "counts": manifest.counts,
    }


def _build(
    stage: Stage,
    config: BaseModel,
    seed: int,
    inputs: dict[str, Input],
    attempt: Attempt,
    where: Where,
    record: Tracking,
    progress: Progress,
) -> Manifest:
    began = time.monotonic()
    load_ahead()
    hashed = hashed_config(stage, config, seed)
    progress.started(stage.name)
    digests = {name: item.ref.digest for name, item in inputs.items()}
    identity = {STAGE_TAG: stage.name}
    called = name_run(record.tracked, where.recipe, stage.name, identity, hashed, CONFIG_FILE, seed, digests)
    tags = {**identity, **called.tags, "r1flow.key": attempt.key, "r1flow.status": "running"}
    run_id = record.stage_run(where.parent_run_id, where.recipe, called.name, hashed, tags)
    page = RunPage(stage.name)
    page.link(record, run_id)
    try:
        for name, item in inputs.items():
            if item.manifest is not None:
                _record_input(record, run_id, name, item.manifest)
        context = Context(stage, config, seed, inputs, attempt, where, record, run_id, progress, page)
        outcome = stage.build(context)
        record.settle(run_id)  # what the metrics were read from is removed when the artifact is published
        manifest = attempt.publish(
            stage_version=stage.version,
            config=hashed,
            inputs={name: item.ref for name, item in inputs.items()},
            counts=outcome.counts,
            metrics=outcome.metrics,
            steps_completed=outcome.steps_completed,
            mlflow_run_id=run_id,
            seconds=time.monotonic() - began,
        )
    except BaseException as error:
        record.set_tags(run_id, {"r1flow.status": "failed", "r1flow.error": str(error)[:500]})
        record.finish(run_id, "FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    _record_output(record, run_id, manifest, outcome)
    return manifest


def _record_input(record: Tracking, run_id: str, name: str, manifest: Manifest) -> None:
    if (model_id := record.find_model(manifest.digest)) is not None:
        record.log_model_input(run_id, model_id)
    else:
        record.log_dataset(run_id, manifest, name, "input")


def _record_output(record: Tracking, run_id: str, manifest: Manifest, outcome: Outcome) -> None:
    step = manifest.steps_completed or 0
    final = {name: value for name, value in manifest.metrics.items() if value is not None}
    record.log_metrics(run_id, [{"step": step, **{f"final/{name}": value for name, value in final.items()}}])
    if outcome.model:
        record.log_model(run_id, manifest, outcome.model, step)
    else:
        record.log_dataset(run_id, manifest, manifest.stage, "output")
    for name, rows in outcome.tables.items():
        record.log_table(run_id, name, rows)
    record.log_text(run_id, json.dumps(manifest.to_dict(), indent=2), "manifest.json")
    record.set_tags(run_id, {"r1flow.status": "ran", "r1flow.digest": manifest.digest})
    record.finish(run_id, "FINISHED")


def _record_reuse(record: Tracking, stage: Stage, manifest: Manifest, where: Where) -> None:
    """A child run of its own, so that the recipe run shows all stages; it points to the run that did the work. A recipe
    that is taken up again has one already."""
    if where.parent_run_id is None or record.has_stage_run(where.parent_run_id, stage.name, manifest.digest):
        return
    digests = {name: ref.digest for name, ref in manifest.inputs.items()}
    identity, seed = {STAGE_TAG: stage.name}, manifest.config["seed"]
    called = name_run(record.tracked, where.recipe, stage.name, identity, manifest.config, CONFIG_FILE, seed, digests)
    tags = {
        **identity,
        **called.tags,
        "r1flow.key": manifest.key,
        "r1flow.digest": manifest.digest,
        "r1flow.status": "reused",
        MADE_BY_TAG: manifest.mlflow_run_id or "",
    }
    run_id = record.stage_run(where.parent_run_id, where.recipe, called.name, manifest.config, tags)
    values = {f"final/{k}": v for k, v in manifest.metrics.items() if v is not None}
    record.log_metrics(run_id, [{"step": manifest.steps_completed or 0, **values}])
    record.finish(run_id, "FINISHED")


def clear_folder(path: Path) -> Path:
    """An empty folder at `path`, whatever an earlier attempt left there."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
