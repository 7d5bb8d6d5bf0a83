"""The recipe: a typed, validated configuration with one section per stage. The sections are in neighboring modules."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from flows.recipe.data_sections import ColdStartData, SFTData
from flows.recipe.evaluation import Evaluate
from flows.recipe.process_rewards import ProcessRewards
from flows.recipe.sections import (
    Alignment,
    Base,
    Distill,
    Problems,
    Report,
    RewardModels,
    Section,
)
from grpo.config.rl import RL, STEP_MODEL
from grpo.config.supervised import SFT
from tasks.gates.conditions import Gate
from tasks.problems.miniature.corpus import LEFT_OUT


class Recipe(Section):
    """A whole recipe. Equal recipes make equal artifacts."""

    name: str = Field(pattern=r"^[\w.-]+$", description="Name of the MLflow experiment.")
    description: str = Field(description="Purpose and requirements of the recipe.")
    seed: int = Field(0, ge=0, le=2**53, description="All random choices derive from it.")
    device: Literal["H200", "H100", "A100", "cpu"] | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="Device that stages are sized for: the default of `r1 plan --estimate`.",
    )
    problems: Problems
    base: Base
    cold_start_data: ColdStartData
    cold_start_sft: SFT
    reasoning_rl: RL
    sft_data: SFTData
    sft: SFT
    reward_models: RewardModels
    alignment_rl: RL
    alignment: Alignment = Alignment()
    evaluate: Evaluate
    report: Report = Report()
    gates: list[Gate] = Field(
        [], description="Conditions between stages; a failed one stops the run, warns, or asks a person."
    )
    r1_zero: RL | None = Field(None, description="GRPO straight from the base model, for the flow train_r1_zero.")
    process_reward_model: ProcessRewards | None = Field(
        None, description="A model that scores Dev1's steps, for RL whose step_reward is 'process_reward_model'."
    )
    cold_start_from_zero: ColdStartData | None = Field(
        None, description="The cold start of the flow train_dev1: R1-Zero's trajectories, rewritten."
    )
    distill: Distill | None = Field(None, description="Students of Dev2, for the flow distill.")
    rlhf_ppo: RL | None = Field(None, description="PPO against the reward models, for the flow rlhf_ppo.")

    @model_validator(mode="after")
    def _zero_is_rewritten(self) -> Recipe:
        if self.cold_start_from_zero and self.cold_start_from_zero.source != "r1_zero":
            raise ValueError(
                f"cold_start_from_zero.source is {self.cold_start_from_zero.source!r}; it must be 'r1_zero'"
            )
        return self

    @model_validator(mode="after")
    def _ppo_is_ppo(self) -> Recipe:
        if self.rlhf_ppo and self.rlhf_ppo.method != "ppo":
            raise ValueError(f"rlhf_ppo.method is {self.rlhf_ppo.method!r}; it must be 'ppo'")
        return self

    @model_validator(mode="after")
    def _the_miniatures_text_leaves_out_enough(self) -> Recipe:
        if self.base.pretrain and self.problems.held_out_share > LEFT_OUT:
            raise ValueError(
                f"problems.held_out_share is {self.problems.held_out_share}, but the text of base.pretrain leaves out "
                f"only {LEFT_OUT} of the sums: at most so many can be held out"
            )
        return self

    @model_validator(mode="after")
    def _validation_has_problems(self) -> Recipe:
        for name in ("reasoning_rl", "alignment_rl", "r1_zero", "rlhf_ppo"):
            settings = getattr(self, name)
            if settings and settings.validate_every and not self.problems.validation_share:
                raise ValueError(f"{name}.validate_every needs problems.validation_share above 0")
        return self

    @model_validator(mode="after")
    def _step_model_is_made(self) -> Recipe:
        asking = [name for name in ("reasoning_rl", "alignment_rl") if getattr(self, name).reads_step_model]
        if asking and self.process_reward_model is None:
            raise ValueError(f"{asking[0]}.step_reward: add the section {STEP_MODEL}, or give a rule or a folder")
        if self.r1_zero and self.r1_zero.reads_step_model:
            raise ValueError(f"r1_zero.step_reward: {STEP_MODEL!r} is trained from Dev1; give a rule or a folder")
        return self

    @model_validator(mode="after")
    def _later_rounds_are_judged(self) -> Recipe:
        if self.alignment.rounds > 1 and not self.reward_models.prompts:
            raise ValueError(
                "alignment.rounds is above 1, but reward_models.prompts is 0; later rounds judge what the policy "
                "answers, so give prompts and sampling"
            )
        return self

    @model_validator(mode="after")
    def _uncertainty_is_known(self) -> Recipe:
        models = (self.reward_models.helpful, self.reward_models.safe)
        if self.alignment_rl.uncertainty_penalty and all(model.ensemble == 1 for model in models):
            raise ValueError(
                "alignment_rl.uncertainty_penalty needs an ensemble: set reward_models.helpful.ensemble to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _gates_are_known(self) -> Recipe:
        stages = set(type(self).model_fields) - {
            "name",
            "description",
            "seed",
            "gates",
            "alignment",
            "cold_start_from_zero",
        }
        later = range(2, self.alignment.rounds + 1)
        stages |= {f"{name}_{number}" for name in ("reward_models", "alignment_rl") for number in later}
        names = [gate.name for gate in self.gates]
        for gate in self.gates:
            if names.count(gate.name) > 1:
                raise ValueError(f"two gates have the name {gate.name!r}; give each its own")
            for stage in sorted(gate.stages()):
                if stage not in stages:
                    raise ValueError(
                        f"gate {gate.name!r}: unknown stage {stage!r}; known are {', '.join(sorted(stages))}"
                    )
        return self
