"""Every MLflow tag that this project writes or reads. No other module spells them out."""

from __future__ import annotations

import time
from collections.abc import Mapping

RECIPE_TAG = "r1flow.recipe"
FLOW_TAG = "r1flow.flow"
STAGE_TAG = "r1flow.stage"
SEED_TAG = "r1flow.seed"
OVERRIDES_TAG = "r1flow.overrides"

FLOW_RUN_TAG = "r1flow.flow_run"
"""The id of the Prefect flow run that a recipe run belongs to."""
STATUS_TAG = "r1flow.status"
"""Status of a stage's run: ran | reused | failed | running."""
ERROR_TAG = "r1flow.error"
FAILED_TAG = "r1flow.failed"
"""The stage whose failure ended a recipe run."""
WAITING_TAG = "r1flow.waiting_until"
"""How long a gate of a run that was suspended waits for an answer, seconds since 1970."""

KEY_TAG, DIGEST_TAG = "r1flow.key", "r1flow.digest"
INPUTS_TAG = "r1flow.inputs"
"""JSON: name of the input -> digest."""
REUSED_TAG = "r1flow.reused."
"""Prefix of the tags of a recipe run that name its reused stages."""
MADE_BY_TAG = "r1flow.made_by_run"
"""The run that did the work of a reused stage. Set on the separate run that earlier versions created for a reuse."""
STALE_TAG = "r1flow.stale"
"""Why the artifact of a run is stale; absent if it is not."""

HOST_TAG, PROCESS_TAG, PIDS_TAG = "r1flow.host", "r1flow.process", "r1flow.pids"
"""The process that records a run, and the namespace of its number."""
START_TAG = "r1flow.start"
"""Unique to one start of a run. Runs with the same value are duplicates that a repeated request created."""

SOURCE_TAG, SOURCE_TYPE_TAG, USER_TAG = "mlflow.source.name", "mlflow.source.type", "mlflow.user"
COMMIT_TAG = "mlflow.source.git.commit"
TABLES_TAG = "mlflow.loggedArtifacts"
"""JSON list of a run's files that MLflow shows as tables: {path, type}."""

PARENT_TAG = "mlflow.parentRunId"
NOTE_TAG = "mlflow.note.content"
"""The description of a run in MLflow."""

SHA256_TAG, URI_TAG, MODEL_STAGE_TAG = "sha256", "uri", "stage"
"""Tags of logged models, model versions and data sets: the artifact's digest, its folder and its stage."""
EXTERNAL_TAG = "mlflow.model.isExternal"
DATA_CONTEXT_TAG = "mlflow.data.context"


def origin_tag(name: str) -> str:
    """The tag for one detail of a run's origin: version, dirty, machine, torch, transformers or vllm."""
    return f"r1flow.origin.{name}"


def gate_tag(gate: str, part: str = "") -> str:
    """The tag with a gate's status, or with a part of its record: evidence, evidence_digest or decision."""
    return f"r1flow.gate.{gate}{f'.{part}' if part else ''}"


def is_waiting(tags: Mapping[str, str]) -> bool:
    """Whether a run that ended may still go on, because one of its gates waits for an answer."""
    return float(tags.get(WAITING_TAG, 0)) > time.time()
