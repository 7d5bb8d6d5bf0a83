"""What verl's processes and this library say to each other, and the names by which verl knows this library's parts."""

from __future__ import annotations

from typing import TypedDict

TOKEN_HEADER = "X-R1flow-Token"
REWARD = "reward"
"""Field of the reply: the weighted sum of the completion's rewards."""
AGENT_LOOP = "r1flow"


class ServerAddress(TypedDict):
    """Where the reward server is, and what agent loops need to know."""

    url: str
    token: str  # in the header of each request
    end: int  # the token that ends a completion


class Sampled(TypedDict):
    """The request: a completion of the prompt in a row of the prompts."""

    row: int
    tokens: list[int]
    logprobs: list[float]  # under the policy that sampled it; empty if the sampler does not say them


def advantage_name(advantage: str, std: str) -> str:
    """Of an advantage estimator."""
    return f"r1flow_{advantage}_{std}"


def objective_name(objective: str) -> str:
    """Of a policy loss."""
    return f"r1flow_{objective}"
