"""The unified view (DSM eq. 5, table 10): six methods share one loop and differ in data and credit.

    grad J = E over D of (1/|o|) sum over t of GC(q, o, t) grad log pi(o_t)

| method     | completions come from | credit of a completion           | gradient coefficient GC                 |
|------------|-----------------------|----------------------------------|-----------------------------------------|
| sft        | demonstrations        | 1                                | 1                                       |
| rft        | the initial policy    | 1 if correct, else 0             | the same                                |
| online_rft | the policy            | 1 if correct, else 0             | the same                                |
| dpo        | the initial policy    | pairs of a better and a worse    | +-beta sigma(margin of the worse one)   |
| ppo        | the policy            | reward, KL and a value function  | GAE's A_t                               |
| grpo       | the policy, in groups | reward relative to the group     | A_it + beta (pi_ref / pi - 1)           |

METHODS holds everything that depends on the method. The rest of the package looks it up there and never compares method
names. Importing this module does not import torch, so that memory estimates can use it too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from grpo.config.common import Hardware
from grpo.config.rl import RL, MethodName

ValueModel = Literal["model", "head"]


@dataclass(frozen=True)
class Method:
    """Everything that depends on the method: data, credit, loss and models."""

    source: Literal["demonstrations", "pairs", "initial", "policy"]  # where completions come from
    credit: Literal["all", "correct", "preference_pairs", "gae", "group_relative"]  # a name in credit.CREDITS
    loss: Literal["policy", "actor_critic", "preference"]  # a name in Update's losses
    kl: Literal["none", "loss", "reward", "preference"]  # where the reference is used
    objective: str | None = None  # a name in OBJECTIVES; None: the recipe's objective

    @property
    def samples(self) -> bool:
        """Whether completions are sampled and scored; if not, there are neither problems nor rewards."""
        return self.source not in ("demonstrations", "pairs")

    @property
    def online(self) -> bool:
        """Whether completions are sampled from the policy being trained."""
        return self.source == "policy"

    def reads_reference(self, settings: RL) -> bool:
        """Whether the loss, the reward or a metric uses log-probabilities under a reference."""
        if self.kl in ("loss", "reward"):
            return settings.kl_coef > 0 or settings.health.kl_budget.limit is not None
        return self.kl == "preference"

    def keeps_reference(self, settings: RL) -> bool:
        """Whether a frozen copy of the policy is in memory. With LoRA, the policy without its adapters is used
        instead."""
        return settings.lora is None and (self.source == "initial" or self.reads_reference(settings))

    def reference_hardware(self, settings: RL) -> Hardware:
        """Hardware settings of that copy. A moving average has the dtype of the policy's weights, because bfloat16
        would round its small moves away."""
        averaged = settings.reference_refresh_steps is not None and settings.reference_mixing < 1
        return settings.hardware.to_train() if averaged and self.source != "initial" else settings.hardware

    def value_model(self, settings: RL) -> ValueModel | None:
        """The value model: "model" (a separate model), "head" (a head on the policy), or None."""
        return settings.ppo.value if self.loss == "actor_critic" else None

    def objective_name(self, settings: RL) -> str:
        """Name of the policy objective in grpo/algorithms/objectives.py."""
        return self.objective or settings.objective

    def loss_kl_coef(self, settings: RL) -> float:
        """Weight of the KL penalty in the loss; 0 if the penalty is part of the reward or absent."""
        return settings.kl_coef if self.kl == "loss" else 0.0

    def skips_zero_advantages(self, settings: RL) -> bool:
        """Whether a completion whose advantages are all 0 has no gradient, so that the update may skip it."""
        return self.loss == "policy" and not self.loss_kl_coef(settings)

    def temperature(self, settings: RL) -> float:
        """Temperature of the policy's log-probabilities. Online methods compare policies at the sampling temperature;
        completions that the policy did not sample are fitted at temperature 1."""
        return settings.sampling.temperature if self.online else 1.0


METHODS: dict[MethodName, Method] = {
    "sft": Method(source="demonstrations", credit="all", loss="policy", kl="none", objective="likelihood"),
    "rft": Method(source="initial", credit="correct", loss="policy", kl="none", objective="likelihood"),
    "online_rft": Method(source="policy", credit="correct", loss="policy", kl="none", objective="likelihood"),
    "dpo": Method(source="initial", credit="preference_pairs", loss="preference", kl="preference"),
    "ppo": Method(source="policy", credit="gae", loss="actor_critic", kl="reward"),
    "grpo": Method(source="policy", credit="group_relative", loss="policy", kl="loss"),
}


def method_of(settings: RL) -> Method:
    """The method for these settings. DPO's pairs may be given instead of sampled."""
    method = METHODS[settings.method]
    return replace(method, source="pairs") if settings.dpo.files and settings.method == "dpo" else method


def reads_reference(settings: RL) -> bool:
    """Whether a reference model computes log-probabilities of each completion, which costs one more forward pass."""
    return method_of(settings).reads_reference(settings)


def keeps_reference(settings: RL) -> bool:
    """Whether a frozen copy of the policy is also in memory."""
    return method_of(settings).keeps_reference(settings)


def reference_hardware(settings: RL) -> Hardware:
    """Hardware settings of that copy."""
    return method_of(settings).reference_hardware(settings)


def value_model(settings: RL) -> ValueModel | None:
    """The value model under these settings: "model" (as large as the policy), "head", or None."""
    return method_of(settings).value_model(settings)
