"""The runs of the study: pilot runs and the choices made from them, main runs, and which records count."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from json_lines import add_line, read_lines
from learning_cells import code_commit
from machine import machine
from paper_claims_design import STEPS_FIELD, Choice, Design, Run, overrides_of, start_of
from paper_claims_statistics import cannot_win, choose_rate, steps_for

from grpo.errors import InputError

Records = Mapping[Run, Mapping[str, Any]]
"""Run -> its record, as `paper_claims_runs.record_of` makes it."""


class Journal:
    """A file with one line of JSON per finished run. Records of another version of the recipe are skipped. Their runs
    are executed again, which is quick for stages that the store still has."""

    def __init__(self, path: Path, version: str):
        self.path, self.version = path, version
        self._made_with = {"commit": code_commit(), "machine": machine()}

    def records(self) -> dict[Run, dict[str, Any]]:
        """Run -> its record, the newest last."""
        records = {}
        for record in read_lines(self.path):
            if record.get("version") == self.version:
                run = Run(**record["run"])
                records.pop(run, None)  # made again: it moves to the end
                records[run] = record
        return records

    def add(self, run: Run, record: Mapping[str, Any]) -> None:
        add_line(self.path, {"version": self.version, **self._made_with, "run": asdict(run), **record})


def current(design: Design, records: Records, choices: Mapping[str, Choice]) -> dict[Run, Mapping[str, Any]]:
    """Records that count: of a run that is still defined as it was, with the measures that the questions need, and from
    the same start as the other runs of its seed."""
    again = superseded(design, records)
    return {
        run: record
        for run, record in records.items()
        if run not in again
        and _is_defined_so(design, run, record, choices)
        and lacking(design, run.arm, record) is None
    }


def _is_defined_so(design: Design, run: Run, record: Mapping[str, Any], choices: Mapping[str, Choice]) -> bool:
    """Whether the design still defines the run as it did for the record."""
    if run.arm not in design.arms:
        return False
    arm = design.arms[run.arm]
    if not choices.keys() >= {*chain_of(design, run.arm), *([arm.after] if arm.after else [])}:
        return False
    # The first 42 records have no graph. None of their arms has had another.
    same_graph = record.get("graph", arm.graph) == arm.graph and record.get("start") == start_of(design, run, choices)
    return same_graph and bool(record["overrides"] == overrides_of(design, run, choices))


def lacking(design: Design, name: str, record: Mapping[str, Any]) -> str | None:
    """What a record lacks that a question asks of its arm. A run that was killed and continued has no known memory, and
    one whose record in MLflow is incomplete has no curve."""
    arm = design.arms[name]
    if "diverged" in record:
        return None
    asked = {c.outcome for claim in design.claims for c in claim.contrasts if name in c.arms}
    if arm.evaluated and not record["table"]:
        return "evaluation"
    if arm.graph in STEPS_FIELD and not record.get("curve"):
        return "curve in MLflow"
    if "length_growth" in asked and "format" not in record["curve"]:
        return "format rate in MLflow"
    return "peak memory" if "peak_mb" in asked and record.get("peak_mb") is None else None


def superseded(design: Design, records: Records) -> list[Run]:
    """Main runs with an artifact that a newer record has with other contents under the same key: another CPU rounds
    differently, so arms of the seed started from different models. They are made again. The choice of rates compares
    means over seeds, not pairs: pilot runs are left as they are."""
    seeds = design.seeds.seeds()
    newest: dict[str, str] = {}
    again = []
    for run, record in reversed(
        [item for item in records.items() if item[0].seed in seeds and item[0].arm in design.arms]
    ):
        artifacts = record.get("artifacts", {})
        if any(newest.get(key, digest) != digest for key, digest in artifacts.items()):
            again.append(run)
        else:
            newest |= artifacts
    return again[::-1]


def chain_of(design: Design, name: str) -> list[str]:
    """Names of the arms whose overrides an arm starts from, nearest first."""
    above = design.arms[name].like
    return [above, *chain_of(design, above)] if above else []


def pilot_runs(design: Design, arm: str) -> list[Run]:
    """Runs from which the learning rate and the number of steps of an arm are chosen. Empty for an arm without a rate
    of its own."""
    settings = design.arms[arm]
    if settings.rate is None:
        return []
    rates, seeds = design.rates_of(settings), design.seeds.tuned_on
    return [Run(arm, seed, rate, settings.pilot_steps) for seed in seeds for rate in rates]


def decide(design: Design, arms: Sequence[str], records: Records) -> tuple[dict[str, Choice], list[Run]]:
    """Choices of the arms whose pilot runs are complete, and the missing pilot runs of the others.

    An arm that builds on another one has no pilot runs before the other's choice is made.
    """
    choices: dict[str, Choice] = {}
    missing: list[Run] = []
    for name in arms:  # each after those that it builds on
        arm = design.arms[name]
        if not {*arm.builds_on} <= choices.keys():
            continue
        known = current(design, {run: record for run, record in records.items() if run.arm == name}, choices)
        out = beaten(design, name, known)
        pilots = [run for run in pilot_runs(design, name) if run.rate not in out]
        if not_run := [run for run in pilots if run not in known]:
            missing += not_run
            continue
        choices[name] = _choice(design, name, choices, pilots, known)
    return choices, missing


def score(record: Mapping[str, Any]) -> float:
    """What a pilot run counts for its rate: held-out pass@1, and 0 if it diverged."""
    return 0.0 if "diverged" in record else float(record["table"]["pass@1"])


def beaten(design: Design, arm: str, known: Records) -> set[float]:
    """Rates of an arm that cannot win any more, whatever their missing pilot runs would give. `known`: current
    records."""
    scores: dict[float, list[float]] = {rate: [] for rate in design.rates_of(design.arms[arm])}
    for run in pilot_runs(design, arm):
        if run in known and run.rate is not None:
            scores[run.rate].append(score(known[run]))
    return cannot_win(scores, len(design.seeds.tuned_on))


def _choice(design: Design, name: str, choices: Mapping[str, Choice], pilots: list[Run], known: Records) -> Choice:
    arm = design.arms[name]
    if not pilots:
        inherited = choices[arm.like].steps if arm.like else None
        if arm.graph not in STEPS_FIELD or inherited is None or arm.steps is not None:
            return Choice(None, arm.steps)
        return Choice(None, max(1, round(arm.share * inherited)))
    rates = sorted({run.rate for run in pilots if run.rate is not None})
    rate = choose_rate({rate: [score(known[run]) for run in pilots if run.rate == rate] for rate in rates})
    if arm.steps_of is not None:
        steps = choices[arm.steps_of].steps
        return Choice(rate, None if steps is None else steps + arm.more_steps)
    if not arm.counts_tokens:
        return Choice(rate)
    chosen = [known[run] for run in pilots if run.rate == rate]
    curves = [record["curve"]["tokens"] for record in chosen if "diverged" not in record]
    if not curves:
        raise InputError(f"arm {name}: every pilot run of every rate diverged; its grid needs smaller ones")
    mean = [statistics.fmean(of_step) for of_step in zip(*curves, strict=True)]
    return Choice(rate, steps_for(mean, design.budget_tokens))


def main_runs(design: Design, arms: Sequence[str], choices: Mapping[str, Choice], seeds: Iterable[int]) -> list[Run]:
    """Runs that the claims are tested on, seed by seed, of the arms in `choices`."""
    runs = []
    for seed in seeds:
        for name in arms:
            if (choice := choices.get(name)) is not None:
                runs += [*checkpoint_runs(design, name, choice, seed), Run(name, seed, choice.rate, choice.steps)]
    return runs


def checkpoint_runs(design: Design, arm: str, choice: Choice, seed: int) -> list[Run]:
    """Shorter runs of an arm, in order. RL's learning rate is constant, so each equals the beginning of the whole
    run."""
    if choice.steps is None:
        return []
    return [Run(arm, seed, choice.rate, max(1, round(share * choice.steps))) for share in design.arms[arm].checkpoints]
