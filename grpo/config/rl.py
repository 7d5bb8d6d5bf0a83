"""Settings of reinforcement learning and of the methods with which it is compared.

Sources: R1 = arXiv 2501.12948 (v2: the Nature version), DSM = DeepSeekMath, arXiv 2402.03300. If the paper does not
give a value, the description says "unpublished".
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo.config.baselines import DPO, PPO
from grpo.config.common import Hardware, Lora, Optimizer, Sampling
from grpo.config.curriculum import Curriculum
from grpo.config.engines import VLLM, check_partners
from grpo.config.experts import Experts
from grpo.config.judge import JudgeSettings
from grpo.config.reward_terms import Rewards, RewardTerm
from grpo.config.rl_by_verl import check_rl_by_verl
from grpo.config.scoring import Scoring
from grpo.config.validation import Keep, ValidateEvery, Validation
from grpo.health.checks import HealthSettings
from grpo.rewards.registry import JUDGE_REWARDS
from grpo.rewards.registry import check as check_reward
from grpo.rewards.steps import find as find_step_reward
from grpo.rewards.steps import is_folder
from grpo.settings import Settings

STEP_MODEL = "process_reward_model"
"""`step_reward` for the process reward model that a stage of the recipe trains; replaced by that model's folder."""
MethodName = Literal["grpo", "ppo", "online_rft", "rft", "dpo", "sft"]


class BranchWeights(Settings):
    """Factors of the two branches, rules and reward models, on top of each reward's weight. Unpublished."""

    rule: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="Factor of accuracy, format, language and other rules."
    )
    preference: float = Field(1.0, ge=0, allow_inf_nan=False, description="Factor of the helpful and safety models.")


class RL(Settings):
    """One loop for GRPO, PPO, online RFT, RFT, DPO and SFT: they differ in data, reward and gradient coefficient (DSM
    eq. 5 and table 10).

    A step is one optimizer update on `prompts_per_step * group_size` completions; a rollout samples for `minibatches`
    steps at once and is used for `inner_epochs` epochs, so that its last update learns from samples that are
    `minibatches * inner_epochs - 1` updates old.
    """

    method: MethodName = Field("grpo", description="Training method; everything else stays the same.")
    steps: int = Field(
        ge=1, description="Optimizer updates. R1-Zero: 10,400; alignment: 1,700; reasoning: unpublished."
    )
    prompts_per_step: int = Field(32, ge=1, le=1_000_000, description="Problems per step. R1: 32.")
    group_size: int = Field(16, ge=2, le=65_536, description="Completions per problem (G). R1: 16.")
    minibatches: int = Field(1, ge=1, description="Steps that share one rollout. R1: 16 (8,192 outputs, 512 per step).")
    inner_epochs: int = Field(1, ge=1, description="Passes over each rollout. R1: 1.")

    objective: str = Field(
        "grpo",
        description="Objective of GRPO and PPO; the docs page Objectives compares them. R1: grpo, or grpo_sequence as "
        "its equation 1 is printed.",
    )
    clip_eps_low: float = Field(0.2, gt=0, description="Ratio's lower clip bound is 1 - this. R1: 10, never binding.")
    clip_eps_high: float = Field(0.2, gt=0, description="Ratio's upper clip bound is 1 + this. R1: 10.")
    kl_coef: float = Field(0.001, ge=0, description="Weight of the KL penalty to the reference. R1: 0.001.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="Per-token estimator of the KL divergence (Schulman). GRPO: k3."
    )
    kl_stale_correction: bool = Field(False, description="Multiply the KL penalty by the ratio, for stale samples.")
    reference_refresh_steps: int | None = Field(
        None, ge=1, description="Steps between updates of the reference to the policy. R1: 400. None: never."
    )
    reference_mixing: float = Field(
        1.0, gt=0, le=1, description="Size of that update: 1 copies the policy (R1), less is a moving average."
    )

    advantage: Literal["grpo", "dr_grpo", "batch_std", "rloo"] = Field(
        "grpo", description="How a group's rewards become advantages; see the docs page Objectives. R1: grpo."
    )
    std: Literal["population", "sample"] = Field(
        "population", description="Formula of the standard deviation. Unpublished."
    )
    supervision: Literal["outcome", "process"] = Field(
        "outcome", description="One reward per completion, or one per reasoning step (DSM 4.1.3). R1: outcome."
    )
    step_reward: str = Field(
        "equations",
        description="What scores steps under process supervision: 'equations' or another step reward of the library, "
        "module:function, a process reward model's folder (a path that begins with . / or ~), or "
        "'process_reward_model', the model of the recipe's stage of that name.",
    )

    sampling: Sampling
    engine: VLLM | None = Field(
        None, description="Engine that samples rollouts: vLLM, local or a server. None: as hardware.sampler says."
    )
    rollouts_ahead: Literal[0, 1] = Field(
        0,
        description="1: sample the next rollout while training on the current one; the weights that sampled it are "
        "one rollout old when it is used. Pays off if sampling has its own devices: a server engine.",
    )
    sampler_ratio_max: float = Field(
        2.0,
        ge=1,
        description="If the sampler is not exactly the policy (vLLM, rollouts ahead), each token's advantage is "
        "multiplied by pi / pi_sampler, capped at this: truncated importance sampling. R1: unpublished.",
    )
    max_new_tokens_from: dict[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]] = Field(
        {},
        description="{step: tokens}: maximum length from that step on, not sampling's. R1-Zero: 65,536 from 8,200 on.",
    )
    dynamic_sampling_rounds: int = Field(
        0,
        ge=0,
        description="Maximum rounds of replacing groups without reward variance (with process supervision, across all "
        "steps) by new problems (DAPO). `reward` metrics cover all groups, `kept_reward` those trained on. R1: 0.",
    )
    mask_truncated: bool = Field(False, description="Do not train on completions cut off at the maximum length.")
    source_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="Relative sampling frequency of each source of reasoning problems. Empty: as in the data.",
    )
    curriculum: Curriculum | None = Field(None, description="Skip problems that teach little. None: use all.")
    general_last_steps: int = Field(
        0,
        ge=0,
        description="Use general prompts and preference rewards only in this many last steps. R1: 400 of 1,700, "
        "because longer training on them led to reward hacking.",
    )
    general_share: float = Field(0.0, ge=0, le=1, description="Share of general prompts in those steps. Unpublished.")

    rewards: Rewards = Field(
        {"accuracy": RewardTerm(), "format": RewardTerm()},
        description="Weighted sum: name = weight, or name = { weight, options }. Names of the library's rewards, "
        "'helpful' and 'safe' (reward models), 'judge' and 'rubric' (a judge), or your own module:function. R1 adds "
        "accuracy, format and language directly.",
    )
    reward_models: dict[Literal["helpful", "safe"], str] = Field(
        {},
        exclude_if=lambda m: not m,
        description="Folders or hub names of models for these rewards, instead of trained ones.",
    )
    uncertainty_penalty: float = Field(
        0.0,
        ge=0,
        description="Ensembles of reward models give their members' mean minus this times the standard deviation, so "
        "that disagreement is not worth exploiting (arXiv 2310.02743). R1: one model, so none.",
    )
    judge: JudgeSettings | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="Model that decides what rules cannot: problems with verifier 'judge' or 'rubric', and rewards "
        "judge and rubric. R1 uses one in rejection sampling, not in RL. None: no judge.",
    )
    branch_weights: BranchWeights = BranchWeights()
    scoring: Scoring = Scoring()
    health: HealthSettings = HealthSettings()
    ppo: PPO = PPO()
    dpo: DPO = DPO()
    lora: Lora | None = Field(None, description="Train low-rank adapters instead of all weights. None: all weights.")
    experts: Experts = Field(Experts(), exclude_if=lambda value: value == Experts())
    micro_batch_tokens: int = Field(
        16384,
        ge=64,
        description="Tokens per forward and backward pass, packed without padding; bounds memory.",
    )
    optimizer: Optimizer
    hardware: Hardware = Hardware()
    save_every: int = Field(
        20,
        ge=1,
        description="Steps between checkpoints that a killed job resumes from. After ten minutes one is due anyway, "
        "except with verl.",
    )
    samples_every: int = Field(20, ge=1, description="Steps between saved sample completions.")
    validate_every: ValidateEvery = None
    validation: Validation = Field(Validation(), exclude_if=lambda value: value == Validation())
    keep: Keep = "last"

    @model_validator(mode="after")
    def _general_fits(self) -> RL:
        if self.general_last_steps > self.steps:
            raise ValueError(f"general_last_steps ({self.general_last_steps}) exceeds steps ({self.steps})")
        if self.general_last_steps and not self.general_share:
            raise ValueError("general_last_steps is set, so general_share must be above 0")
        return self

    @model_validator(mode="after")
    def _rewards_are_known(self) -> RL:
        if self.judge and not self.judge.is_model:
            raise ValueError(f"judge.kind {self.judge.kind!r} verifies no answers; take 'openai' or 'local'")
        for name, term in self.rewards.items():
            check_reward(name, term.options)
            if name in JUDGE_REWARDS and not self.judge:
                raise ValueError(f"reward {name!r} is a judge's; set judge to a model")
        by_rule = self.step_reward != STEP_MODEL and not is_folder(self.step_reward)
        if self.supervision == "process" and by_rule:
            find_step_reward(self.step_reward)
        return self

    @model_validator(mode="after")
    def _objective_is_known(self) -> RL:
        if self.objective != "grpo":  # importing torch takes seconds, so check only non-default values
            from grpo.algorithms.objectives import OBJECTIVES

            if self.objective not in OBJECTIVES:
                raise ValueError(f"objective: no {self.objective!r} here; choose from {', '.join(OBJECTIVES)}")
        return self

    @model_validator(mode="after")
    def _parts_agree(self) -> RL:
        if self.lora and self.reference_refresh_steps:
            raise ValueError("with lora the reference is the base itself; leave reference_refresh_steps out")
        if self.lora and self.method == "ppo" and self.ppo.value == "head":
            raise ValueError("lora trains no value head; set ppo.value to 'model'")
        if self.supervision == "process" and self.method != "grpo":
            raise ValueError(f"process supervision is a form of grpo; method is {self.method!r}")
        if self.supervision == "process" and self.advantage != "grpo":
            raise ValueError(f"process supervision needs advantage 'grpo'; it is {self.advantage!r}")
        if self.rollouts_ahead and self.method not in ("grpo", "online_rft"):
            raise ValueError(f"rollouts_ahead is for grpo and online_rft; method is {self.method!r}")
        if self.rollouts_ahead and self.dynamic_sampling_rounds:
            raise ValueError("dynamic_sampling_rounds waits for rewards before it asks again; set rollouts_ahead to 0")
        if self.rollouts_ahead and self.engine and self.engine.kind == "local":
            raise ValueError("a local engine computes where the trainer does; for rollouts_ahead take kind 'server'")
        if self.dpo.files and self.method != "dpo":
            raise ValueError(f"dpo.files are pairs for method 'dpo'; method is {self.method!r}")
        check_partners(self.engine, self.hardware.processes * self.hardware.nodes)
        own = self.hardware.sampler == "own" and not self.engine and not self.rollouts_ahead
        if self.experts.replay and not (own and self.method in ("grpo", "online_rft")):
            raise ValueError(
                "experts.replay takes the experts that this library's sampler chose, in grpo and online_rft; set "
                "hardware.sampler = 'own' and rollouts_ahead = 0, without an engine"
            )
        self.hardware.check_adapters(self.lora)
        self.hardware.check_optimizer(self.optimizer.kind)
        if self.hardware.tensor_parallel > 1 and self.method == "ppo":
            raise ValueError("tensor_parallel divides no value model; set it to 1, or take sequence_parallel")
        if self.hardware.sharing > 1 and (self.experts.replay or self.experts.balance_coef):
            raise ValueError(
                "experts.replay and experts.balance_coef count the tokens of whole sequences; set "
                "hardware.sequence_parallel and hardware.tensor_parallel to 1"
            )
        if self.uncertainty_penalty and not {"helpful", "safe"} & self.rewards.keys():
            raise ValueError("uncertainty_penalty is for reward models, and rewards name neither 'helpful' nor 'safe'")
        if self.curriculum and self.curriculum.min_pass_rate >= self.curriculum.max_pass_rate:
            raise ValueError("curriculum.min_pass_rate must be below curriculum.max_pass_rate")
        return self

    @model_validator(mode="after")
    def _optimizer_is_for_rl(self) -> RL:
        if self.optimizer.kind == "muon":
            raise ValueError("optimizer.kind 'muon' is for pretraining, SFT and reward models; take 'adamw'")
        return self

    @model_validator(mode="after")
    def _weights_move(self) -> RL:
        rates = [] if self.lora else [self.optimizer.learning_rate]  # adapters are float32
        if self.method == "ppo" and self.ppo.value == "model":
            rates.append(self.ppo.value_learning_rate or self.optimizer.learning_rate)
        for rate in rates:
            self.hardware.check_learning_rate(rate)
        return self

    @model_validator(mode="after")
    def _validation_fits(self) -> RL:
        self.validation.check(self.validate_every, self.keep, self.method, self.rewards)
        return self

    @model_validator(mode="after")
    def _verl_knows_them(self) -> RL:
        if self.hardware.trainer is not None:
            check_rl_by_verl(self)
        return self

    @model_validator(mode="after")
    def _guards_see_something(self) -> RL:
        """Refuses a guard that has no metric to check, because it would never report anything."""
        self.health.kl_budget.check(self.method)
        given, only_general = self.method == "sft" or bool(self.dpo.files), self.general_share == 1
        self.health.rule_accuracy.check(self.rewards, given, only_general and self.general_last_steps == self.steps)
        return self

    @property
    def reads_step_model(self) -> bool:
        """Whether the recipe's own process reward model scores the steps."""
        return self.supervision == "process" and self.step_reward == STEP_MODEL

    def max_new_tokens(self, step: int) -> int:
        """Maximum completion length, in tokens, of a rollout that begins at `step`, counted from 0."""
        reached = [start for start in self.max_new_tokens_from if start <= step]
        return self.max_new_tokens_from[max(reached)] if reached else self.sampling.max_new_tokens
