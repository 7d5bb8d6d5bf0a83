"""The unified view (DSM eq. 5, table 10): six methods are one loop with another data source and another credit.

    grad J = E over D of (1/|o|) sum over t of GC(q, o, t) grad log pi(o_t)

| method     | completions come from | credit of a completion          | gradient coefficient GC                 |
|------------|-----------------------|---------------------------------|-----------------------------------------|
| sft        | given demonstrations  | 1                               | 1                                       |
| rft        | the initial policy    | 1 if right, else 0              | the same                                |
| online_rft | the policy            | 1 if right, else 0              | the same                                |
| dpo        | the initial policy    | pairs, better and worse         | +-beta sigma(margin of the worse one)   |
| ppo        | the policy            | reward, KL and a learnt value   | GAE's A_t                               |
| grpo       | the policy, in groups | reward relative to the group    | A_it + beta (pi_ref / pi - 1)           |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo.config.rl import RL, MethodName


@dataclass(frozen=True)
class Method:
    data: Literal["given", "initial", "policy"]  # who wrote the completions
    credit: Literal["one", "right", "pairs", "value", "group"]
    kl: Literal["none", "loss", "reward", "pairs"]  # where the reference comes in

    def needs_reference(self, settings: RL) -> bool:
        """Whether anything reads the log-probabilities of a reference."""
        measured = settings.kl_coef > 0 or settings.health.kl_budget.limit is not None
        return self.kl == "pairs" or (self.kl in ("loss", "reward") and measured)

    def temperature(self, settings: RL) -> float:
        """Of the log-probabilities: online, the ratio is between policies at the sampling temperature; what somebody
        else wrote is fitted as it is."""
        return settings.sampling.temperature if self.data == "policy" else 1.0

    def keeps_initial(self, settings: RL) -> bool:
        """Whether a second, frozen policy has to be kept."""
        return self.data == "initial" or self.needs_reference(settings)


METHODS: dict[MethodName, Method] = {
    "sft": Method(data="given", credit="one", kl="none"),
    "rft": Method(data="initial", credit="right", kl="none"),
    "online_rft": Method(data="policy", credit="right", kl="none"),
    "dpo": Method(data="initial", credit="pairs", kl="pairs"),
    "ppo": Method(data="policy", credit="value", kl="reward"),
    "grpo": Method(data="policy", credit="group", kl="loss"),
}
