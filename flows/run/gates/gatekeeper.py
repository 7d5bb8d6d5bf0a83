"""Gates in a run: collect the metrics, check the conditions, and continue, stop or ask for approval.

If a server keeps the flow run, approval is given in Prefect's UI. A deployed run is suspended in the meantime, which
frees its worker; when resumed, it starts again from the top and reuses its finished stages. Any other run waits.
Without such a server, the terminal asks. Without a terminal, the run stops and prints how to continue.
"""

from __future__ import annotations

import getpass
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flows.home import home, store
from flows.prefect_server import keeps_runs
from flows.progress import Progress
from flows.recipe.schema import Recipe
from flows.run.gates.review import review_samples
from flows.stage_contract.run_page import artifact_key
from flows.stage_contract.stage import RunContext, Step
from flows.stages import evaluate
from tasks.gates.approvals import Decision, Decisions
from tasks.gates.conditions import Gate, Verdict, decision_key, plain, read_gate
from tasks.store.manifest import Manifest
from tasks.tracking.client import Tracking
from tasks.tracking.tags import WAITING_TAG, gate_tag


class GateStopped(Exception):
    """A gate ended the recipe. `can_be_approved`: nobody could be asked, so --approve would let it continue."""

    def __init__(self, message: str, gate: str, can_be_approved: bool = False):
        super().__init__(message)
        self.gate, self.can_be_approved = gate, can_be_approved


@dataclass(frozen=True)
class Answer:
    """A person's answer to a gate that asks: whether the run goes on, why, and who said so."""

    approve: bool
    note: str
    who: str


def _step(checkpoints: Sequence[str]) -> Step:
    return Step(evaluate.gate_stage(checkpoints), "evaluate", {"stages": checkpoints, "gate": True})


GATE_STEP = _step(())
"""A gate's evaluation as a step. The gate determines which checkpoints are evaluated."""
RunStep = Callable[[Step, Any, Mapping[str, str], int, RunContext], dict[str, Any]]
"""Function that runs a step with a configuration, inputs and a seed, here or elsewhere, and returns its flow's
result."""


@dataclass(frozen=True)
class Gatekeeper:
    """The gates of one run. `manifest_of` returns a stage's artifact, `on_read` is called with the result of each gate,
    `run` runs the evaluation that a gate asks for, and `label` names that run."""

    gates: Sequence[Gate]
    recipe: Recipe
    record: Tracking
    run_id: str
    approve: Sequence[str]
    manifest_of: Callable[[str], Manifest]
    on_read: Callable[[dict[str, Any]], None]
    run: RunStep
    label: str | None = None

    def after(self, stage: str) -> None:
        """Evaluates the gates after a stage that has finished.

        Raises:
            GateStopped: a gate failed and nobody approved it.
        """
        for gate in self.gates:
            if gate.after == stage:
                self._read(gate)

    def _read(self, gate: Gate) -> None:
        from prefect.exceptions import Pause

        evaluation = self._evaluate(gate) if gate.evaluate else None
        verdict = read_gate(gate, self._values(gate, evaluation), evaluate.checkpoints(gate.stages()))
        if gate.review is not None:
            reviewed = self.manifest_of(gate.after)
            verdict = replace(verdict, samples=review_samples(reviewed, gate.review), reviewed=reviewed.digest)
        keys = {stage: self.manifest_of(stage).key for stage in gate.stages()}
        key = decision_key(gate, keys | ({"gate": evaluation.key} if evaluation else {}))
        _publish(self.recipe, verdict)
        try:
            status, decision = self._outcome(gate, verdict, key)
        except BaseException as error:
            status = "stopped" if isinstance(error, Exception) else "waiting"
            self._record(gate, verdict, status, None, suspended=isinstance(error, Pause))
            raise
        if decision is not None and not decision.approved:
            self._record(gate, verdict, "refused", decision)
            why = f": {decision.note}" if decision.note else ""
            raise GateStopped(f"gate {gate.name!r} after {gate.after} was refused by {decision.who}{why}", gate.name)
        self._record(gate, verdict, status, decision)

    def _outcome(self, gate: Gate, verdict: Verdict, key: str) -> tuple[str, Decision | None]:
        if verdict.passed and gate.review is None:
            return "passed", None
        # "warn" does not skip the review: it is needed most when a condition fails.
        reviewed = gate.review is not None and (verdict.passed or gate.on_failure == "warn")
        action = "ask" if reviewed else gate.on_failure
        return _ACTIONS[action](gate, verdict, key, gate.name in self.approve)

    def _record(
        self, gate: Gate, verdict: Verdict, status: str, decision: Decision | None, suspended: bool = False
    ) -> None:
        """`suspended`: the run has ended, and goes on when somebody answers."""
        progress = Progress.current()
        progress.say(f"gate {gate.name}: {status}")
        for line in verdict.lines():
            progress.say(f"  {line}")
        tags = {
            gate_tag(gate.name): status,
            gate_tag(gate.name, "evidence"): "; ".join(verdict.lines()),
            gate_tag(gate.name, "evidence_digest"): verdict.digest(),
        }
        if suspended:
            tags[WAITING_TAG] = f"{time.time() + gate.wait_hours * 3600:.0f}"
        self.on_read({"name": gate.name, "after": gate.after, "status": status, "evidence": verdict.lines()})
        self.record.set_tags(
            self.run_id, tags | ({gate_tag(gate.name, "decision"): json.dumps(asdict(decision))} if decision else {})
        )

    def _evaluate(self, gate: Gate) -> Manifest:
        assert gate.evaluate is not None
        stages = gate.stages("evaluation")
        # The plain-text template of a base model and of R1-Zero is stored with the base model.
        stages |= {"base"} if stages & {"base", "r1_zero"} else set()
        checkpoints = list(evaluate.checkpoints(stages))
        inputs = {stage: self.manifest_of(stage).digest for stage in ["problems", *checkpoints]}
        config = self.recipe.evaluate.model_copy(update={**gate.evaluate.model_dump(), "k": None, "sets": []})
        where = RunContext(recipe=self.recipe.name, parent_run_id=self.run_id, label=self.label)
        summary = self.run(_step(checkpoints), config, inputs, self.recipe.seed, where)
        return store().resolve(summary["key"])

    def _values(self, gate: Gate, evaluation: Manifest | None) -> dict[Any, dict[str, float | None]]:
        values: dict[Any, dict[str, float | None]] = {}
        for stage in gate.stages("stage"):
            manifest = self.manifest_of(stage)
            values["stage", stage] = {**manifest.counts, **manifest.metrics}
        tables = {"evaluation": evaluation, "table": self.manifest_of("evaluate") if gate.stages("table") else None}
        for source, measured in tables.items():
            table = evaluate.read_table(measured) if measured else {}
            names = evaluate.checkpoints(gate.stages(source))  # type: ignore[arg-type]
            for stage in names:
                values[source, stage] = plain(table[names[stage]])
        return values


def _stop(gate: Gate, verdict: Verdict, key: str, approved: bool) -> tuple[str, None]:
    raise GateStopped(_failed(verdict), gate.name)


def _warn(gate: Gate, verdict: Verdict, key: str, approved: bool) -> tuple[str, None]:
    return "warned", None


def _ask(gate: Gate, verdict: Verdict, key: str, approved: bool) -> tuple[str, Decision]:
    """The recorded decision on this evidence, else the command line's, else a person's. A new decision is recorded."""
    decisions, evidence = Decisions(home()), verdict.digest()
    if (recorded := decisions.approval(key, evidence)) is not None:
        return "approved", recorded
    if approved:
        answer = Answer(approve=True, note="--approve", who=_user())
    elif keeps_runs():
        pause_key = f"{gate.name}-{key[:16]}-{evidence[:16]}-{len(decisions.of(key))}"
        answer = _ask_in_prefect(gate, verdict, pause_key)
    elif sys.stdin is not None and sys.stdin.isatty():
        answer = _ask_on_terminal(gate, verdict)
    else:
        raise GateStopped(f"{_said(verdict)}; it needs approval, and nobody can be asked here", gate.name, True)
    who = answer.who.strip() or "someone in Prefect"
    decision = Decision.now(gate.name, answer.approve, who, answer.note.strip(), evidence)
    decisions.add(key, decision)
    return "approved", decision


_ACTIONS: dict[str, Callable[[Gate, Verdict, str, bool], tuple[str, Decision | None]]] = {
    "stop": _stop,
    "warn": _warn,
    "ask": _ask,
}


def _ask_in_prefect(gate: Gate, verdict: Verdict, pause_key: str) -> Answer:
    from flows.run.gates.approval_form import Undecided, ask

    try:
        answer = ask(gate, verdict, _said(verdict), pause_key)
    except Undecided:
        raise GateStopped(f"{_said(verdict)}; nobody decided within {gate.wait_hours:g} hours", gate.name) from None
    return Answer(answer.approve, answer.note, answer.who)


def _ask_on_terminal(gate: Gate, verdict: Verdict) -> Answer:
    say = Progress.current().say
    say(f"gate {gate.name} after {gate.after} asks:")
    for line in verdict.lines():
        say(f"  {line}")
    for sample in verdict.samples:
        say(sample)
    say("Go on? [y/N]" if verdict.passed else "Go on all the same? [y/N]")
    approve = sys.stdin.readline().strip().lower() in ("y", "yes")
    say("A note, for the record:")
    return Answer(approve=approve, note=sys.stdin.readline().strip(), who=_user())


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"user {os.getuid()}"


def _said(verdict: Verdict) -> str:
    if verdict.passed:
        return f"gate {verdict.gate!r} after {verdict.after} asks for a review of {len(verdict.samples)} samples"
    return _failed(verdict)


def _failed(verdict: Verdict) -> str:
    first, *rest = verdict.failures
    return f"gate {verdict.gate!r} after {verdict.after} failed: {first}" + (f", and {len(rest)} more" if rest else "")


def _publish(recipe: Recipe, verdict: Verdict) -> None:
    """Publishes the evidence as an artifact in Prefect."""
    if not keeps_runs():
        return
    from prefect.artifacts import create_markdown_artifact

    key = artifact_key(f"gate {recipe.name} {verdict.gate}")
    create_markdown_artifact(markdown=verdict.markdown(), key=key, description=f"Gate after {verdict.after}.")
