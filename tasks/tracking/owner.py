"""The process that records a run, and the end of runs whose process has died."""

from __future__ import annotations

import os
import socket

from grpo.processes.lifetime import process_name
from tasks.tracking.connection import Connection
from tasks.tracking.reader import with_tags
from tasks.tracking.tags import HOST_TAG, PROCESS_TAG


def owner_tags() -> dict[str, str]:
    """Tags that identify this process, so that others can tell whether it is alive."""
    return {HOST_TAG: socket.gethostname(), PROCESS_TAG: process_name(os.getpid()) or ""}


def end_runs_of_dead_processes(connection: Connection) -> list[str]:
    """Mark the runs that dead processes of this host left RUNNING as KILLED. Returns their ids."""
    killed = []
    condition = " and ".join(["attributes.status = 'RUNNING'", *with_tags({HOST_TAG: socket.gethostname()})])
    for run in connection.client.search_runs(connection.experiments(), condition, max_results=10_000):
        pid, _, _ = run.data.tags.get(PROCESS_TAG, "").partition(" ")
        # A process is named by its id and its start time, so a reused id does not count.
        if pid.isdecimal() and run.data.tags[PROCESS_TAG] != process_name(int(pid)):
            connection.client.set_terminated(run.info.run_id, "KILLED")
            killed.append(run.info.run_id)
    return killed
