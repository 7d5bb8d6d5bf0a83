"""Runs on every machine except the first: takes part in the trainers that the first machine starts, and does nothing
else.

It makes no artifact, logs to no tracking server and knows no recipe.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from pathlib import Path

from grpo.errors import InputError
from tasks.trainer.launch import hardware_of
from tasks.trainer.outcome import StageFailed, failure
from tasks.trainer.process_group import command, run_watched, trainer_environment
from tasks.trainer.rendezvous import ID, Announcement, Rendezvous

POLL_S = 0.5
PATIENCE_S = 600.0
"""Seconds to wait for the first machine to appear: as long as torchrun waits for the others."""
PARTING_S = 30.0
"""Seconds after a trainer has ended on the first machine, successfully or not, until it is stopped here."""


class _EndedOnFirstMachine(Exception):
    pass


def run_node(rendezvous: Rendezvous) -> int:
    """Takes part in every trainer of a run until the first machine's command ends.

    Returns 0 if the last trainer succeeded here, else 1.

    Raises:
        InputError: no first machine appeared within 10 minutes.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not rendezvous.is_led():
        if time.monotonic() > deadline:
            raise InputError(
                f"no first machine at {rendezvous.endpoint} for {PATIENCE_S:g} s ({rendezvous.folder}); start the same "
                "command there with PET_NODE_RANK=0 and the same home folder"
            )
        time.sleep(POLL_S)
    code, last = 0, ""
    while rendezvous.is_led():
        announcement = rendezvous.announcement()
        if announcement is None or announcement.id == last:
            time.sleep(POLL_S)
            continue
        last, code = announcement.id, _take_part(rendezvous, announcement)
    return code


def _take_part(rendezvous: Rendezvous, announcement: Announcement) -> int:
    job = Path(announcement.job)
    log = job.with_name(f"trainer-{rendezvous.rank}.log")
    start = log.stat().st_size if log.exists() else 0
    deadline: float | None = None

    def poll() -> None:
        nonlocal deadline
        if deadline is None and (not rendezvous.is_led() or rendezvous.announcement() != announcement):
            deadline = time.monotonic() + PARTING_S
        if deadline is not None and time.monotonic() > deadline:
            raise _EndedOnFirstMachine

    _print(rendezvous, f"joins {job}")
    mark = uuid.uuid4().hex
    hardware = hardware_of(json.loads(job.read_text()))
    environment = trainer_environment({ID: announcement.id}, mark, hardware)
    try:
        code = run_watched(command(job, hardware.processes, hardware.nodes), log, environment, mark, poll)
    except _EndedOnFirstMachine:
        _print(rendezvous, f"the first machine's trainer is over; stopped this one's; log: {log}")
        return 1
    if code:
        error = failure(code, hardware.processes * hardware.nodes, log, start)
        _print(rendezvous, str(error) if isinstance(error, StageFailed) else f"error: {error}")
        return 1
    return 0


def _print(rendezvous: Rendezvous, text: str) -> None:
    print(f"machine {rendezvous.rank}: {text}", file=sys.stderr, flush=True)
