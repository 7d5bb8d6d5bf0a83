"""Settings for the routers of a mixture of experts in training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo.settings import Settings


class Experts(Settings):
    """For models with experts; with others every choice but the default is refused."""

    routers: Literal["trained", "frozen"] = Field(
        "trained",
        description="frozen: router weights, which choose each token's experts, are not trained. R1: unpublished.",
    )
    balance_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the load-balancing loss (Switch Transformer, arXiv 2101.03961), which is 1 if all "
        "experts of a layer are chosen equally often, and up to their number if only one is. DeepSeek-V3: 1e-4. R1: "
        "unpublished.",
    )
    replay: bool = Field(
        False,
        description="Updates use the experts that the sampler chose for each token (routing replay, R3, arXiv "
        "2510.11370), so that rounding cannot change experts in between. For models sampled with packed attention. "
        "Stores layers x experts per token, two bytes each. R1: unpublished.",
    )
