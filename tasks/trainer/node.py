"""A machine that is not the first: it lends its processors to the trainers that the first one starts, and nothing else.

It makes no artifact, logs to no tracking server and knows no recipe.
"""

from __future__ import annotations

import sys
import time
import uuid
from pathlib import Path

from grpo.errors import InputError
from tasks.trainer.launch import StageFailed, command, failure, trainer_environment, watched
from tasks.trainer.rendezvous import ID, Announcement, Meeting

POLL_S = 0.5
PATIENCE_S = 600.0
"""How long it waits for the first machine to appear: as long as torchrun waits for the others."""
PARTING_S = 30.0
"""A trainer that is over on the first machine is stopped here after so long. Over means ended, well or not."""


class _Over(Exception):
    pass


def join(meeting: Meeting) -> int:
    """Take part in every trainer of the run that `meeting` is about, until the first machine's command ends.

    Returns 0 if the last of them ended well here, else 1. Raises InputError where no first machine appears.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not meeting.led():
        if time.monotonic() > deadline:
            raise InputError(
                f"no first machine at {meeting.endpoint} for {PATIENCE_S:g} s ({meeting.folder}); start the same "
                "command there with PET_NODE_RANK=0 and the same home folder"
            )
        time.sleep(POLL_S)
    code, last = 0, ""
    while meeting.led():
        told = meeting.announced()
        if told is None or told.id == last:
            time.sleep(POLL_S)
            continue
        last, code = told.id, _take_part(meeting, told)
    return code


def _take_part(meeting: Meeting, told: Announcement) -> int:
    job = Path(told.job)
    log = job.with_name(f"trainer-{meeting.rank}.log")
    start = log.stat().st_size if log.exists() else 0
    ends: float | None = None

    def poll() -> None:
        nonlocal ends
        if ends is None and (not meeting.led() or meeting.announced() != told):
            ends = time.monotonic() + PARTING_S
        if ends is not None and time.monotonic() > ends:
            raise _Over

    _say(meeting, f"joins {job}")
    mark = uuid.uuid4().hex
    environment = trainer_environment({ID: told.id}, mark, told.processes)
    try:
        code = watched(command(job, told.processes, told.nodes), log, environment, mark, poll)
    except _Over:
        _say(meeting, f"the first machine's trainer is over; stopped this one's; log: {log}")
        return 1
    if code:
        ended = failure(code, told.processes * told.nodes, log, start)
        _say(meeting, str(ended) if isinstance(ended, StageFailed) else f"error: {ended}")
        return 1
    return 0


def _say(meeting: Meeting, text: str) -> None:
    print(f"machine {meeting.rank}: {text}", file=sys.stderr, flush=True)
