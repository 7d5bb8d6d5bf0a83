"""Processor, memory, disk, network and GPUs of a stage's machine, as MLflow's system metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tasks.tracking.connection import Connection

INTERVAL_S = 10.0
"""Seconds between samples, unless MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL says otherwise."""


@contextlib.contextmanager
def system_metrics(record: Connection, run_id: str) -> Iterator[None]:
    """Logs them to a run while the block runs, from a thread of MLflow's."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(run_id, sampling_interval=INTERVAL_S, tracking_uri=record.uri)
    monitor.start()
    yield
    # Not where the block failed: the thread ends with the run, and to wait for a server that is away delays the end.
    monitor.finish()
