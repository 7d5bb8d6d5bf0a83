"""Recipe sections, one per stage and in the paper's order: typed, validated settings.

Sources: R1 = arXiv 2501.12948 (v2: the Nature version), DSM = DeepSeekMath, arXiv 2402.03300.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from grpo.config.common import Sampling
from grpo.config.engines import TextEngineSettings, check_shards
from grpo.config.judge import JudgeSettings
from grpo.config.supervised import SFT, Pretrain, RewardModel
from grpo.data.template import BOXED_ZERO_TEMPLATE, ZERO_TEMPLATE, AnswerStyle
from tasks.evaluation.sets.settings import SetData, check_names
from tasks.preferences.files import PreferenceFile
from tasks.problems.miniature.everyday import EverydaySource
from tasks.problems.miniature.sums import SumsSource
from tasks.problems.sources import FileSource, HubSource, ReasoningGymSource


class Section(BaseModel):
    """A table of the recipe file. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


Source = Annotated[
    ReasoningGymSource | FileSource | HubSource | SumsSource | EverydaySource, Field(discriminator="kind")
]


ZeroTemplate = Annotated[str, BeforeValidator(lambda text: BOXED_ZERO_TEMPLATE if text == "boxed" else text)]


class Problems(Section):
    """The problems that are asked, and those that are held out."""

    sources: list[Source] = Field(min_length=1, description="Where problems come from.")
    answer_style: AnswerStyle = Field(
        "tags",
        exclude_if=lambda value: value == "tags",
        description="How completions mark the answer after their reasoning. tags: <answer>...</answer> (R1-Zero). "
        "boxed: a summary whose last \\boxed{} is the answer (R1 from its cold start on). auto: either, for models "
        "trained elsewhere. A source or a row can override it. Format reward, verifiers, filters, demonstrations and "
        "evaluation follow it; a plain-text template that names a form itself takes precedence.",
    )
    held_out_share: float = Field(
        0.1, gt=0, lt=1, description="Share of prompts that are never trained on, chosen by the hash of their text."
    )
    held_out_max: int = Field(
        512, ge=1, description="Maximum held-out problems per domain; the rest are dropped, never trained on."
    )
    validation_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        exclude_if=lambda value: value == 0,
        description="Share of the other prompts that no stage trains on either, for validate_every. Evaluation does "
        "not use them, so choosing a checkpoint by them leaves evaluation problems unseen.",
    )
    ngram: int = Field(
        10, ge=2, description="Length, in words, of n-grams that training and held-out prompts may not share. R1: 10."
    )
    boilerplate_share: float = Field(
        0.01, ge=0, le=1, description="N-grams in more than this share of held-out prompts are a template, not a leak."
    )
    test_sets: list[SetData] = Field(
        [],
        exclude_if=lambda value: not value,
        description="Test sets that no training prompt may overlap with. A recipe's flows add those of evaluate.sets.",
    )

    @model_validator(mode="after")
    def _names_of_sets_differ(self) -> Problems:
        check_names(self.test_sets)
        return self


class Base(Section):
    """The base model: a folder or hub name, or a small one made from nothing. Exactly one of the two."""

    model: str | None = Field(None, description="Hugging Face folder or hub name of a pretrained base model.")
    remote_code: bool = Field(
        False,
        exclude_if=lambda value: not value,
        description="Whether `model` may include its own modules (auto_map in its configuration), which run with your "
        "permissions. Stages that load models made from it need the same setting in their hardware.",
    )
    documents: int = Field(60_000, ge=100, description="Documents in the miniature corpus (only with `pretrain`).")
    tagged_share: float = Field(
        0.04, ge=0, le=1, description="Share of its conversations that use think and answer tags."
    )
    pretrain: Pretrain | None = Field(None, description="Train a small base model on the miniature corpus.")
    zero_template: ZeroTemplate = Field(
        ZERO_TEMPLATE,
        pattern=r"(?s)\{prompt\}",
        description="Plain-text prompt that contains {prompt}, because a base model knows no chat tokens. The default "
        "paraphrases R1's, with answer tags; 'boxed' is the same for boxed answers. Answers are read in the form that "
        "it names, else in problems.answer_style.",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Base:
        if (self.model is None) == (self.pretrain is None):
            raise ValueError("give either model (a folder or hub name) or pretrain (settings of a small model)")
        return self


class RewardModels(Section):
    """Helpful: pairs, the summary only. Safe: labels, the whole response (R1 v2, stage 4)."""

    prompts: int = Field(
        ge=0,
        description="General prompts to answer; a judge compares and labels the responses. 0: only files. R1: 66,000 "
        "pairs, 106,000 labels.",
    )
    files: list[PreferenceFile] = Field(
        [],
        description="Existing preferences, besides the judged ones: pairs, ranked lists or safe/unsafe labels, with "
        "the columns listed on the docs page Alignment.",
    )
    responses_per_prompt: int = Field(4, ge=2, description="Responses of the SFT model per prompt.")
    sampling: Sampling | None = Field(None, description="How they are sampled; required unless prompts is 0.")
    engine: TextEngineSettings | None = Field(
        None,
        exclude_if=lambda engine: engine is None,
        description="Sampling engine: vLLM (local, server), or an endpoint that serves the SFT model. None: as "
        "helpful.hardware.sampler says.",
    )
    judge: JudgeSettings = JudgeSettings()
    judgments_per_pair: int = Field(4, ge=1, description="Judgments per pair, in random order, averaged. R1: 4.")
    margin: float = Field(1.0, ge=0, le=2, description="Keep pairs whose mean difference is above this. R1: 1.")
    length_ratio_max: float = Field(
        3.0,
        ge=1,
        description="Maximum ratio of a pair's longer summary to its shorter one, in words; R1 keeps lengths "
        "comparable.",
    )
    held_out_share: float = Field(0.15, gt=0, lt=1, description="Share of prompts whose pairs only measure accuracy.")
    helpful: RewardModel
    safe: RewardModel

    @model_validator(mode="after")
    def _preferences_come_from_somewhere(self) -> RewardModels:
        if self.prompts and self.sampling is None:
            raise ValueError("sampling is missing; it says how responses to the prompts are made")
        if not self.prompts and not self.files:
            raise ValueError("prompts is 0 and there are no files; give one of them, or both")
        if self.safe.margin or self.safe.centring:
            raise ValueError("safe learns from labels, margin and centring are for pairs; set them in helpful")
        if self.prompts:
            check_shards(self.engine, self.helpful.hardware)
        return self


class Alignment(Section):
    """How often the last two stages before evaluation are gone through (DSM, algorithm 1)."""

    rounds: int = Field(
        1,
        ge=1,
        description="Rounds of reward_models and alignment_rl. From the second on, the previous round's policy is "
        "judged and is the reference, and the reward models are trained further. R1: 1. DSM: the first helps most.",
    )
    replay_share: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of later reward models' training data that comes from earlier rounds. DSM: 0.1.",
    )


class Student(Section):
    """A model that learns from the SFT data."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][\w.-]*$", description="Checkpoint name; its stages are base_NAME and student_NAME."
    )
    base: Base = Field(description="The model that it starts from. R1: Qwen2.5 of 1.5B to 32B, Llama 3 of 8B and 70B.")
    sft: SFT = Field(
        description="R1: 2-3 epochs, batch 64, cosine to a tenth of the peak, which is 1e-4 (1.5B) to 2e-5 (70B)."
    )

    @model_validator(mode="after")
    def _name_is_free(self) -> Student:
        if re.fullmatch(r"base|zero|dev[123]|ppo|r1(_\d+)?", self.name):
            raise ValueError(f"name: {self.name!r} is a checkpoint of the recipe; choose another")
        return self


class Distill(Section):
    """SFT of smaller students, no RL (R1, distillation)."""

    students: list[Student] = Field(min_length=1, description="One or more students, each its own checkpoint.")

    @model_validator(mode="after")
    def _names_differ(self) -> Distill:
        names = [student.name for student in self.students]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two students are called {twice[0]!r}; give each a name of its own")
        return self


class Report(Section):
    """Settings of the report."""

    samples: int = Field(3, ge=0, description="Completions shown for each checkpoint.")
