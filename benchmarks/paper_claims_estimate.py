"""How long the study of the papers' claims takes: from the journal's own seconds, else from the design's guesses."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from paper_claims_design import STEPS_FIELD, Choice, Design, Graph, Run
from paper_claims_plan import Records, beaten, chain_of, current, decide, main_runs, pilot_runs

TO_DEV1 = ("problems", "base", "cold_start_data", "cold_start_sft")
SHARED: Mapping[Graph, tuple[str, ...]] = {
    "dev1": TO_DEV1,
    "rl": TO_DEV1,
    "zero": ("problems", "base"),
    "small": ("problems", "base_small", "cold_start_data", "cold_start_sft"),
    "distill": (*TO_DEV1, "rl", "sft_data", "base_small"),
}
"""Graph -> its stages that other runs of the seed share, made once."""
OWN: Mapping[Graph, tuple[str, ...]] = dict.fromkeys(SHARED, ("evaluate",)) | {"distill": ("student_small", "evaluate")}
"""Graph -> its other stages, besides its own RL."""
Artifact = tuple[int, str]
"""Seed and name of a shared artifact; those of another origin have a longer name."""


def estimate_seconds(
    design: Design, arms: Sequence[str], seeds: Sequence[int], records: Records, has: Callable[[str], bool]
) -> tuple[float, float]:
    """Seconds on one core: (of all pilot and main runs, of those that are missing).

    Computed from the medians of the records, and from the design's guesses for what has none. Arms without a choice are
    assumed to take as many steps as their pilot runs. `has`: whether the home still has the artifact of a key. What a
    missing run needs of finished ones is counted if it has not.
    """
    choices, _ = decide(design, arms, records)
    assumed = {name: choices.get(name) or _assumed(design, name) for name in arms}
    known = current(design, records, choices)
    pilots = [run for name in arms for run in pilot_runs(design, name) if run.rate not in beaten(design, name, known)]
    runs = list(dict.fromkeys([*pilots, *main_runs(design, arms, assumed, seeds)]))
    cost = _Cost(design, records, assumed)
    left = [run for run in runs if run not in known]
    here: set[Artifact] = set()
    for run, record in known.items():
        there = {stage for stage, key in record.get("keys", {}).items() if has(key)}
        if "reasoning_rl" in there:
            cost.kept.add(run)
            there.add("rl")
        here |= {cost.artifact(run, stage) for stage in there.intersection(cost.shared(run))}
    return cost.seconds(runs, set()), cost.seconds(left, here)


class _Cost:
    def __init__(self, design: Design, records: Records, choices: Mapping[str, Choice]):
        self.design, self.records, self.choices = design, records, choices
        self.kept: set[Run] = set()  # whose policy the home still has

    def shared(self, run: Run) -> list[str]:
        """Stages of a run that others share, and the RL that it takes from another arm."""
        arm = self.design.arms[run.arm]
        stages = [] if arm.after else [*SHARED[arm.graph]]
        read = any("process_reward_model" in text for name in self._chain(run.arm) for text in self._overrides(name))
        return [*stages, "process_reward_model"] if read and "process_reward_model" not in arm.keeps else stages

    def artifact(self, run: Run, stage: str) -> Artifact:
        arm = self.design.arms[run.arm]
        own = arm.after is not None or (arm.graph == "small" and stage.startswith("cold_start"))
        return run.seed, f"{run.arm} {stage}" if own else f"teacher of {run.arm}" if stage == "rl" else stage

    def seconds(self, runs: Sequence[Run], made: set[Artifact]) -> float:
        """Of runs, one after the other. `made`: shared artifacts that are there."""
        total = 0.0
        for run in runs:
            arm = self.design.arms[run.arm]
            total += self.design.seconds.run
            if arm.seconds is not None and not self._own(run.arm):
                total += arm.seconds
                continue
            new = [stage for stage in self.shared(run) if self.artifact(run, stage) not in made]
            made |= {self.artifact(run, stage) for stage in new}
            if arm.like and "rl" in new:
                choice = self.choices[arm.like]
                teacher = Run(arm.like, run.seed, choice.rate, choice.steps)
                new.remove("rl")
                total += 0.0 if teacher in runs or teacher in self.kept else self._rl(teacher)
            own = [stage for stage in OWN[arm.graph] if arm.evaluated or stage != "evaluate"]
            total += sum(self._stage(stage, run.arm) for stage in [*new, *own]) + self._rl(run)
        return total

    def _rl(self, run: Run) -> float:
        if run.steps is None or self.design.arms[run.arm].graph not in STEPS_FIELD:
            return 0.0
        of_steps = {
            other: record["seconds"]["rl"] / other.steps
            for other, record in self.records.items()
            if other.steps and "rl" in record.get("seconds", {})
        }
        known = [value for other, value in of_steps.items() if other.arm == run.arm] or [*of_steps.values()]
        return run.steps * (statistics.median(known) if known else self.design.seconds.step)

    def _stage(self, stage: str, arm: str) -> float:
        known = [record["seconds"][stage] for record in self._own(arm) if stage in record["seconds"]]
        if not known:  # arms with a guess of their own are of another size
            others = [run for run in self.records if not getattr(self.design.arms.get(run.arm), "seconds", None)]
            seconds = [self.records[run].get("seconds", {}) for run in others]
            known = [of[stage] for of in seconds if stage in of]
        return statistics.median(known) if known else self.design.seconds.stages[stage]

    def _own(self, arm: str) -> list[Mapping[str, Mapping[str, float]]]:
        return [record for run, record in self.records.items() if run.arm == arm and "seconds" in record]

    def _chain(self, name: str) -> list[str]:
        return [name, *chain_of(self.design, name)]

    def _overrides(self, name: str) -> list[str]:
        return self.design.arms[name].overrides


def _assumed(design: Design, name: str) -> Choice:
    """A choice for the estimate, before the pilot runs."""
    arm = design.arms[name]
    if arm.steps is not None or arm.pilot_steps is not None:
        return Choice(design.rates_of(arm)[0] if arm.rate else None, arm.steps or arm.pilot_steps)
    above = _assumed(design, arm.like).steps if arm.like and arm.graph in STEPS_FIELD else None
    return Choice(design.rates_of(arm)[0] if arm.rate else None, None if above is None else round(arm.share * above))
