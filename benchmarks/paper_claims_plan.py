"""The runs of the study: pilot runs and the choices made from them, main runs, missing runs, and their cost."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from learning_cells import code_commit
from machine import machine
from paper_claims_design import STEPS_FIELD, Choice, Design, Run, overrides_of
from paper_claims_statistics import choose_rate, steps_for

Records = Mapping[Run, Mapping[str, Any]]
"""Run -> its record, as `paper_claims_runs.record_of` makes it."""
SHARED = ("problems", "base", "base_small", "cold_start_data", "cold_start_sft", "process_reward_model")
"""Stages whose artifacts most arms of a seed share."""
STAGES: Mapping[str, tuple[str, ...]] = {
    "dev1": ("problems", "base", "cold_start_data", "cold_start_sft", "evaluate"),
    "rl": ("problems", "base", "cold_start_data", "cold_start_sft", "evaluate"),
    "zero": ("problems", "base", "evaluate"),
    "small": ("problems", "base_small", "cold_start_data", "cold_start_sft", "evaluate"),
    "distill": (
        "problems",
        "base",
        "cold_start_data",
        "cold_start_sft",
        "sft_data",
        "base_small",
        "student_small",
        "evaluate",
    ),
}
"""Graph -> its stages besides RL, for the estimate."""


class Journal:
    """A file with one line of JSON per finished run. Records of another version of the recipe are skipped. Their runs
    are executed again, which is quick for stages that the store still has."""

    def __init__(self, path: Path, version: str):
        self.path, self.version = path, version
        self._made_with = {"commit": code_commit(), "machine": machine()}

    def records(self) -> dict[Run, dict[str, Any]]:
        """Run -> its record. Incomplete lines, left by a killed process, are skipped."""
        records = {}
        for line in self.path.read_text().splitlines() if self.path.is_file() else ():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record.get("version") == self.version:
                records[Run(**record["run"])] = record
        return records

    def add(self, run: Run, record: Mapping[str, Any]) -> None:
        line = json.dumps({"version": self.version, **self._made_with, "run": asdict(run), **record})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:  # the first newline ends a line that a killed process left incomplete
            file.write(f"\n{line}\n")


def current(design: Design, records: Records, choices: Mapping[str, Choice]) -> dict[Run, Mapping[str, Any]]:
    """Records whose overrides are still those of the design. Others are of an earlier design."""
    return {
        run: record
        for run, record in records.items()
        if run.arm in design.arms
        and choices.keys() >= {*_chain(design, run.arm)}
        and record["overrides"] == overrides_of(design, run, choices)
    }


def _chain(design: Design, name: str) -> list[str]:
    """Names of the arms whose overrides an arm starts from, nearest first."""
    above = design.arms[name].like
    return [above, *_chain(design, above)] if above else []


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
        if not {*filter(None, (arm.like, arm.after))} <= choices.keys():
            continue
        known = current(design, {run: record for run, record in records.items() if run.arm == name}, choices)
        pilots = pilot_runs(design, name)
        if lacking := [run for run in pilots if run not in known]:
            missing += lacking
            continue
        choices[name] = _choice(design, name, choices, pilots, known)
    return choices, missing


def _choice(design: Design, name: str, choices: Mapping[str, Choice], pilots: list[Run], known: Records) -> Choice:
    arm = design.arms[name]
    if not pilots:
        inherited = choices[arm.like].steps if arm.like else None
        if arm.graph not in STEPS_FIELD or inherited is None or arm.steps is not None:
            return Choice(None, arm.steps)
        return Choice(None, max(1, round(arm.share * inherited)))
    scores = {
        rate: [known[run]["table"]["pass@1"] for run in pilots if run.rate == rate] for rate in design.rates_of(arm)
    }
    rate = choose_rate(scores)
    if not arm.counts_tokens:
        return Choice(rate)
    curves = [known[run]["curve"]["tokens"] for run in pilots if run.rate == rate]
    mean = [statistics.fmean(of_step) for of_step in zip(*curves, strict=True)]
    return Choice(rate, steps_for(mean, arm.budget * design.budget_tokens))


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


def estimate_seconds(
    design: Design, arms: Sequence[str], seeds: Sequence[int], records: Records
) -> tuple[float, float]:
    """Seconds on one core: (of all pilot and main runs, of those that are missing).

    Computed from the medians of the records, and from the design's guesses for stages without a record. Arms without
    a choice are assumed to take as many steps as their pilot runs.
    """
    choices, _ = decide(design, arms, records)
    assumed = {name: choices.get(name) or _assumed(design, name) for name in arms}
    pilots = [run for name in arms for run in pilot_runs(design, name)]
    mains = main_runs(design, arms, assumed, seeds)
    known = current(design, records, choices)
    seconds = partial(_seconds, design, records)
    everything, missing = 0.0, 0.0
    made: set[tuple[int, str]] = set()
    for run in dict.fromkeys([*pilots, *mains]):
        arm = design.arms[run.arm]
        shared = [stage for stage in STAGES[arm.graph] if stage in SHARED] if arm.after is None else []
        if _reads_step_model(design, run.arm) and "process_reward_model" not in arm.keeps:
            shared.append("process_reward_model")
        # A smaller base and a second round have artifacts of their own.
        variant = run.arm if arm.graph == "small" or arm.after else ""
        new = [stage for stage in shared if (run.seed, variant + stage) not in made]
        made |= {(run.seed, variant + stage) for stage in new}
        cost = seconds(run, new)
        everything += cost
        missing += 0.0 if run in known else cost
    return everything, missing


def _assumed(design: Design, name: str) -> Choice:
    """A choice for the estimate, before the pilot runs."""
    arm = design.arms[name]
    if arm.steps is not None or arm.pilot_steps is not None:
        return Choice(design.rates_of(arm)[0] if arm.rate else None, arm.steps or arm.pilot_steps)
    above = _assumed(design, arm.like).steps if arm.like and arm.graph in STEPS_FIELD else None
    return Choice(design.rates_of(arm)[0] if arm.rate else None, None if above is None else round(arm.share * above))


def _reads_step_model(design: Design, name: str) -> bool:
    chain = [name, *_chain(design, name)]
    return any("process_reward_model" in text for arm in chain for text in design.arms[arm].overrides)


def _measured(records: Records, stage: str, arm: str) -> list[float]:
    """Seconds that the stage took in runs of the arm, or in all runs if the arm has none."""
    seconds = {run: record["seconds"][stage] for run, record in records.items() if stage in record["seconds"]}
    return [value for run, value in seconds.items() if run.arm == arm] or [*seconds.values()]


def _seconds(design: Design, records: Records, run: Run, shared: Sequence[str]) -> float:
    """Seconds of a run on one core. `shared`: those of its shared stages that no earlier run has made."""
    own = [stage for stage in STAGES[design.arms[run.arm].graph] if stage not in SHARED]
    total = design.seconds.run
    for stage in [*shared, *own]:
        measured = _measured(records, stage, run.arm)
        total += statistics.median(measured) if measured else design.seconds.stages[stage]
    if run.steps is not None:
        of_arm = [(r["seconds"]["rl"], other.steps) for other, r in records.items() if other.arm == run.arm]
        rates = [seconds / steps for seconds, steps in of_arm if steps]
        total += run.steps * (statistics.median(rates) if rates else design.seconds.step)
    return total
