"""Settings for the routers of a mixture of experts in training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo.settings import Settings


class Experts(Settings):
    """For models with experts; with others every choice but the default is refused."""

    routers: Literal["trained", "frozen"] = Field(
        "trained",
        description="frozen: the weights that choose a token's experts stay as they are, and only what the experts do "
        "is trained. R1: unpublished.",
    )
    balance_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the balance loss (Switch Transformer, arXiv 2101.03961), which is 1 where all experts "
        "of a layer are chosen equally often, and up to their number where one is. DeepSeek-V3: 1e-4. R1: unpublished.",
    )
    replay: bool = Field(
        False,
        description="The update computes each token with the experts that the sampler chose for it (routing replay, "
        "R3, arXiv 2510.11370), so that rounding changes no expert between the two. For models that are sampled "
        "packed. Holds layers x experts a token, two bytes each, of every token. R1: unpublished.",
    )
