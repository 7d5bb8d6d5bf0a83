"""MLflow tags on the runs whose artifacts are stale."""

from __future__ import annotations

from tasks.store.stale import stale_reasons
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.tags import STALE_TAG


def update_stale_tags(store: Store, tracking: Tracking) -> None:
    """Tag the runs that made stale artifacts with the reason, and remove the tag from all others."""
    reasons = stale_reasons(store)
    missing = {m.mlflow_run_id: reasons[m.key] for m in store.list() if m.key in reasons and m.mlflow_run_id}
    for run_id, reason in tracking.tagged(STALE_TAG).items():
        if run_id not in missing:
            tracking.delete_tag(run_id, STALE_TAG)
        elif missing[run_id] == reason:
            del missing[run_id]
    for run_id, reason in missing.items():
        tracking.set_tags(run_id, {STALE_TAG: reason})
