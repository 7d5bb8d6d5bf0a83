"""Decisions about a dispatched stage: given its flow runs so far, wait for one, start another, or give up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prefect.utilities.urls import url_for

from flows.home import store
from grpo.errors import InputError
from tasks.store.manifest import Manifest
from tasks.trainer.outcome import StageFailed

TRIES = 3
"""Number of flow runs of one stage that may crash before the recipe gives up."""
POLL_S, MAX_POLL_S = 2.0, 10.0
"""Seconds between two looks at a flow run: at first, and at most."""
POLL_SHARE = 0.05
"""Share of the time waited so far that passes until the next look: a hundred recipes that wait for a place do not keep
the server busy, and a stage's end is noticed within a twentieth of its time."""

KEY, RECIPE_RUN, RUN_COUNT, ABOVE = "r1flow.key:", "r1flow.by:", "r1flow.life:", "r1flow.above:"
"""Prefixes of the tags by which a job's flow runs are found again."""
_ERROR = "Flow run encountered an exception: "


def tag_value(tags: Iterable[str], prefix: str) -> str | None:
    """The rest of the first tag that begins with `prefix`."""
    return next((tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)), None)


@dataclass(frozen=True)
class Job:
    """A stage to be run by its own flow run.

    `recipe_run_id` is the recipe's flow run, and `run_count` counts its starts. `min_attempt`: a forced stage is done
    by an attempt with at least this number; None: any artifact of the key will do. `queue` is a queue of the stage's
    work pool; None: the deployment's own queue.
    """

    stage: str
    run_name: str
    deployment: str
    key: str
    parameters: Mapping[str, Any]
    recipe_run_id: str
    run_count: int
    min_attempt: int | None = None
    queue: str | None = None

    @property
    def tags(self) -> list[str]:
        # The tag contains the last attempt that is not enough.
        forced = [] if self.min_attempt is None else [f"{ABOVE}{self.min_attempt - 1}"]
        return [f"{KEY}{self.key}", f"{RECIPE_RUN}{self.recipe_run_id}", f"{RUN_COUNT}{self.run_count}", *forced]

    def artifact(self) -> Manifest | None:
        """The artifact that completes the job; None before it is published."""
        manifest = store().find(self.key, compare=False)
        return manifest if manifest and manifest.attempt >= (self.min_attempt or 1) else None


@dataclass(frozen=True)
class Child:
    """A flow run of a job. `mine`: whether this recipe run has started it since its own latest start."""

    id: Any
    type: str  # Prefect's state type
    message: str = ""
    mine: bool = True


@dataclass(frozen=True)
class Action:
    """The next action: wait for a child, start one, or fail with a child's message."""

    kind: Literal["wait", "start", "fail"]
    child: Child | None = None


FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
_MOST_ADVANCED_FIRST = ("CANCELLING", "RUNNING", "PENDING", "PAUSED", "SCHEDULED")


def decide(children: Sequence[Child]) -> Action:
    """The next action for a job whose artifact is missing, given its flow runs so far, oldest first.

    A live flow run is waited for, whoever started it. It does not matter how a flow run of another recipe run, or of an
    earlier start of this one, ended: the artifact is missing, so the stage runs. If one of our own flow runs crashed,
    it is replaced, up to `TRIES` times.
    """
    alive = [child for child in children if child.type not in FINAL]
    if alive:
        return Action("wait", min(alive, key=lambda child: _MOST_ADVANCED_FIRST.index(child.type)))
    mine = [child for child in children if child.mine]
    if not mine:
        return Action("start")
    crashed = sum(child.type == "CRASHED" for child in mine)
    return Action("start") if mine[-1].type == "CRASHED" and crashed < TRIES else Action("fail", mine[-1])


def failure(child: Child, job: Job) -> Exception:
    """The error of a job whose flow run ended without its artifact; the message is the stage's own, if it left one."""
    message = " ".join(child.message.split())
    url = url_for("flow-run", child.id) or str(child.id)
    if child.type == "CANCELLED":
        return StageFailed(f"its flow run was cancelled; see {url}")
    if child.type == "COMPLETED":
        return StageFailed(
            f"its flow run ended well, but {store().backend.place} has no artifact {job.key[:16]}; its worker must "
            f"have the same R1FLOW_HOME, or the same R1FLOW_STORE; see {url}"
        )
    kind, colon, text = message.partition(_ERROR)[2].partition(": ")
    if colon and child.type == "FAILED":
        return InputError(text) if kind == "InputError" else StageFailed(text)
    crashes = f"crashed {TRIES} times; the last said: " if child.type == "CRASHED" else ""
    return StageFailed(f"{crashes}{message or 'nothing'}; see {url}")


def pause_s(waited_s: float) -> float:
    """Seconds until the next look at a flow run that has been waited for so long."""
    return min(max(POLL_S, POLL_SHARE * waited_s), MAX_POLL_S)
