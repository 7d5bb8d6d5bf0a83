"""The process that records a run, and how runs are closed if that process has died."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from grpo.processes.lifetime import process_name
from tasks.estimate.origin import origin
from tasks.tracking.connection import Connection
from tasks.tracking.reader import with_tags
from tasks.tracking.tags import (
    COMMIT_TAG,
    HOST_TAG,
    PIDS_TAG,
    PROCESS_TAG,
    SOURCE_TAG,
    SOURCE_TYPE_TAG,
    START_TAG,
    USER_TAG,
    origin_tag,
)

PROMPT_S = 1.0
"""Seconds. A run start that took less time sent only one request."""


def owner_tags() -> dict[str, str]:
    """Tags that identify this process, so that others can tell whether it is alive."""
    return {HOST_TAG: socket.gethostname(), PROCESS_TAG: process_name(os.getpid()) or "", PIDS_TAG: _pids()}


def _pids() -> str:
    """The namespace of process ids. Containers in the host's network have its name and namespaces of their own."""
    return os.readlink("/proc/self/ns/pid")


def origin_tags() -> dict[str, str]:
    """Tags with the code, user, machine and libraries of this process. MLflow shows the first ones in its own
    columns."""
    known = dict(origin())
    tags = {SOURCE_TAG: "r1flow", SOURCE_TYPE_TAG: "LOCAL"}
    for name, tag in (("user", USER_TAG), ("commit", COMMIT_TAG)):
        if value := known.pop(name, ""):
            tags[tag] = value
    return tags | {origin_tag(name): value for name, value in known.items()}


def runs_of_dead_processes(connection: Connection) -> list[str]:
    """Ids of the runs that dead processes of this host left RUNNING."""
    condition = " and ".join(["attributes.status = 'RUNNING'", *with_tags({HOST_TAG: socket.gethostname()})])
    runs = connection.client.search_runs(connection.experiments(), condition, max_results=10_000)
    return [run.info.run_id for run in runs if not is_alive(run.data.tags)]


def is_alive(tags: Mapping[str, str]) -> bool:
    """Whether the process that records a run, according to its tags, is alive or may be alive on another host."""
    pid, _, _ = tags.get(PROCESS_TAG, "").partition(" ")
    # A process is identified by its id and its start time, so a reused id does not match.
    here = tags.get(HOST_TAG) == socket.gethostname() and tags.get(PIDS_TAG, _pids()) == _pids()
    known = here and pid.isdecimal()
    return not known or tags[PROCESS_TAG] == process_name(int(pid))


def end_runs_of_dead_processes(connection: Connection) -> list[str]:
    """Marks runs that dead processes of this host left RUNNING as KILLED. Returns their ids."""
    killed = runs_of_dead_processes(connection)
    for run_id in killed:
        connection.client.set_terminated(run_id, "KILLED")
    return killed


def delete_repeats(connection: Connection, token: str, run_id: str) -> None:
    """Deletes duplicate runs from one start, except `run_id`. MLflow's client repeats a request if the server answers
    too late, and the server then begins one run per request."""
    runs = connection.client.search_runs(connection.experiments(), f"tags.`{START_TAG}` = '{token}'")
    for run in runs:
        if run.info.run_id != run_id:
            connection.client.set_terminated(run.info.run_id, "KILLED")  # a deleted run keeps its status
            connection.client.delete_run(run.info.run_id)
