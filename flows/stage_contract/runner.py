"""Runs one stage by the contract: reuses the artifact of its key, or else builds, publishes and records it in
MLflow."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from flows.home import store, tracking
from flows.progress import Progress
from flows.stage_contract.references import Input
from flows.stage_contract.run_page import RunPage, table
from flows.stage_contract.stage import ALONE, Context, Outcome, RunContext, Stage, find_key, hashed_config
from flows.stage_contract.stage_progress import StageProgress
from grpo.errors import InputError
from grpo.secret_values import secret_in
from tasks.estimate.measured import usage
from tasks.estimate.origin import origin
from tasks.store.attempt import Attempt
from tasks.store.manifest import Manifest
from tasks.store.stale import make_current, recipes_using
from tasks.tracking.audit import update_stale_tags
from tasks.tracking.client import Tracking
from tasks.tracking.results import log_results, log_scores
from tasks.tracking.reuse import record_reuse
from tasks.tracking.system_metrics import system_metrics
from tasks.tracking.tags import DIGEST_TAG, INPUTS_TAG, KEY_TAG, SEED_TAG, STAGE_TAG, STATUS_TAG
from tasks.trainer.launch import preload


def run_stage(
    stage: Stage, config: BaseModel, inputs: Mapping[str, str] | None, seed: int, where: RunContext | None
) -> dict[str, Any]:
    """Runs one stage. Returns the `summary` of its artifact, with status "ran" or "reused"."""
    if secret := secret_in(config.model_dump(mode="json")):  # a Prefect form can lead here without a recipe
        raise InputError(f"stage {stage.name!r}: {secret}")
    where = where or RunContext()
    resolved, key = find_key(stage, config, inputs or {}, seed)
    if where.key not in (None, key):
        raise InputError(
            f"stage {stage.name!r} has another key here, {key[:16]}, than at its caller, {where.key[:16]}: both need "
            "the same version of r1flow and the same files"
        )
    existing = None if where.force else store().find(key, stage=stage.name)
    record = tracking()
    progress = Progress.current()
    if existing is None:
        uses = [item.ref.digest for item in resolved.values()]
        with store().attempt(stage.name, key, force=where.force, uses=uses) as attempt:
            # Another process may have published it while this one waited for the lock.
            existing = None if where.force else store().find(key, stage=stage.name)
            if existing is None:
                manifest = _build(stage, config, seed, resolved, attempt, where, record, progress)
                _make_current(record, manifest, resolved, seed, where)
                progress.finished(stage.name, "ran", manifest.seconds, manifest.metrics, manifest.counts)
                RunPage(stage.name).result(manifest, "ran", stage.shown)
                return summary(manifest, "ran")
    if where.parent_run_id is not None:
        record_reuse(record, where.parent_run_id, existing)
    _make_current(record, existing, resolved, seed, where)
    progress.finished(stage.name, "reused", existing.seconds, existing.metrics, existing.counts)
    if where.parent_run_id is None:  # somebody started this stage alone and looks at its page
        RunPage(stage.name).reused(record, existing, stage.shown)
    return summary(existing, "reused")


def _make_current(
    record: Tracking, manifest: Manifest, inputs: Mapping[str, Input], seed: int, where: RunContext
) -> None:
    """Marks the artifact and its inputs as current for their recipes. Artifacts made from other inputs become stale."""
    read = [item.manifest for item in inputs.values() if item.manifest is not None]
    recipes = recipes_using(store(), seed, read) if where.recipe == ALONE else [where.recipe]
    # A list, not a generator, so that every recipe is updated.
    if any([make_current(store(), recipe, seed, [*read, manifest]) for recipe in recipes]):
        update_stale_tags(store(), record)


def summary(manifest: Manifest, status: str) -> dict[str, Any]:
    """Plain values about an artifact, which are the result of a stage."""
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
    where: RunContext,
    record: Tracking,
    progress: Progress,
) -> Manifest:
    began = time.monotonic()
    preload()
    hashed = hashed_config(stage, config, seed)
    progress.started(stage.name)
    digests = {name: item.ref.digest for name, item in inputs.items()}
    tags = {
        STAGE_TAG: stage.name,
        SEED_TAG: str(seed),
        INPUTS_TAG: json.dumps(digests),
        KEY_TAG: attempt.key,
        STATUS_TAG: "running",
    }
    run_id = record.stage_run(where.parent_run_id, where.recipe, where.name_run(stage.name, seed), hashed, tags)
    try:
        page = RunPage(stage.name)
        page.link(record, run_id)
        for name, item in inputs.items():
            if item.manifest is not None:
                _record_input(record, run_id, name, item.manifest)
        shown = StageProgress(stage.name, progress, page)
        context = Context(stage, config, seed, inputs, attempt, where, record, run_id, shown)
        with system_metrics(record, run_id):
            outcome = stage.build(context)
        record.settle(run_id)  # publishing removes the file with the metrics
        used = usage(attempt.work)
        manifest = attempt.publish(
            stage_version=stage.version,
            config=hashed,
            inputs={name: item.ref for name, item in inputs.items()},
            counts=outcome.counts,
            metrics=outcome.metrics,
            steps_completed=outcome.steps_completed,
            mlflow_run_id=run_id,
            seconds=time.monotonic() - began,
            machine=None if attempt.continues else used.machine,
            peak_memory=None if attempt.continues else used.peak_memory,
            origin=origin(),
        )
    except BaseException as error:
        record.fail(run_id, error, {STATUS_TAG: "failed"})
        raise
    _record_output(record, run_id, stage, inputs, manifest, outcome, where)
    return manifest


def _record_input(record: Tracking, run_id: str, name: str, manifest: Manifest) -> None:
    if (model_id := record.models.find(manifest.digest)) is not None:
        record.models.log_input(run_id, model_id)
    else:
        record.log_dataset(run_id, manifest, name, "input")


def _record_output(
    record: Tracking,
    run_id: str,
    stage: Stage,
    inputs: Mapping[str, Input],
    manifest: Manifest,
    outcome: Outcome,
    where: RunContext,
) -> None:
    step, parent = manifest.steps_completed or 0, where.parent_run_id
    description = stage.shown(manifest) or table({**manifest.counts, **manifest.metrics})
    log_results(record, run_id, manifest, outcome.evaluated, description)
    read = {name: item.manifest for name, item in inputs.items() if item.manifest is not None}
    log_scores(record, run_id, manifest, outcome.evaluated, read, data="problems")
    if outcome.model:
        model_id = record.models.log(run_id, manifest, outcome.model, step)
        if parent and model_id:
            record.models.log_output(parent, model_id, step)
    else:
        for run in (run_id, parent):
            if run is not None:
                record.log_dataset(run, manifest, manifest.stage, "output")
    for name, rows in outcome.tables.items():
        record.log_table(run_id, name, rows)
    record.log_text(run_id, json.dumps(manifest.to_dict(), indent=2), "manifest.json")
    record.set_tags(run_id, {STATUS_TAG: "ran", DIGEST_TAG: manifest.digest})
    record.finish(run_id, "FINISHED")
