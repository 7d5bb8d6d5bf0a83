"""CPU, memory, disk, network and GPU usage of a stage's machine, as MLflow system metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tasks.tracking.connection import Connection

INTERVAL_S = 10.0
"""Seconds between samples, unless MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL is set."""


@contextlib.contextmanager
def system_metrics(record: Connection, run_id: str) -> Iterator[None]:
    """Logs system metrics to a run while the block runs, from an MLflow thread."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(run_id, sampling_interval=INTERVAL_S, tracking_uri=record.uri)
    monitor.start()
    yield
    # Not if the block failed: the thread ends with the run, and waiting for an unavailable server would delay the end.
    monitor.finish()
