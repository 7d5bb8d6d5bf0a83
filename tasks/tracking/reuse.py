"""Records stages that a recipe run reuses, as a tag and a link on its run that point to the run that did the work."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tasks.store.manifest import Manifest
from tasks.tracking import connection
from tasks.tracking.client import Tracking
from tasks.tracking.tags import NOTE_TAG, REUSED_TAG

_HEADING = "**Reused stages**"


@dataclass(frozen=True)
class Reuse:
    """A stage that a recipe run reused at time `at` (seconds since 1970). `made_by`: the run that did the work; "" if
    unknown."""

    stage: str
    key: str
    digest: str
    made_by: str
    at: float


def reuses(tags: Mapping[str, str]) -> Iterator[Reuse]:
    """The stages that a recipe run reused, read from its tags."""
    for name, text in tags.items():
        if name.startswith(REUSED_TAG):
            yield Reuse(**json.loads(text))


def record_reuse(record: Tracking, parent: str, manifest: Manifest) -> None:
    """Records on a recipe run that it reuses an artifact. Does nothing if that is already recorded, or if the run's own
    stage made the artifact, as in a recipe run that continues.

    Raises:
        InputError: MLflow has been unavailable for too long.
    """
    if record.has_stage_run(parent, manifest.stage, manifest.digest):
        return
    reuse = Reuse(manifest.stage, manifest.key, manifest.digest, manifest.mlflow_run_id or "", time.time())
    tag = f"{REUSED_TAG}{manifest.stage}.{manifest.digest[:12]}"

    def note(client: Any) -> None:
        from mlflow.entities import RunTag

        tags = client.get_run(parent).data.tags
        if tag not in tags:
            before = tags.get(NOTE_TAG, "")
            start = before if _HEADING in before else f"{before}\n\n{_HEADING}\n".lstrip()
            note_and_tag = {NOTE_TAG: f"{start}\n- {_link(client, reuse)}", tag: json.dumps(asdict(reuse))}
            client.log_batch(parent, tags=[RunTag(name, text) for name, text in note_and_tag.items()])

    record.or_stop(lambda: note(record.client), connection.MAX_AWAY_S)
    if (model_id := record.models.find(manifest.digest)) is not None:
        record.models.log_input(parent, model_id)
    else:
        record.log_dataset(parent, manifest, manifest.stage, "input")


def _link(client: Any, reuse: Reuse) -> str:
    """Markdown link to the run that did the work, in a form that works in MLflow's UI on any server."""
    from mlflow.exceptions import MlflowException

    try:
        made = client.get_run(reuse.made_by) if reuse.made_by else None
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        made = None  # deleted, or recorded in another MLflow
    if made is None:
        return f"{reuse.stage}, artifact {reuse.key[:12]}"
    name = made.info.run_name.replace("`", "'")
    return f"[{reuse.stage}](#/experiments/{made.info.experiment_id}/runs/{reuse.made_by}) made by `{name}`"
