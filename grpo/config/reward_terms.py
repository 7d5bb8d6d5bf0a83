"""Settings of the weighted sum of rewards."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from grpo.settings import Settings


class RewardTerm(Settings):
    """One reward in the weighted sum."""

    weight: float = Field(1.0, allow_inf_nan=False, description="Factor of this reward in the sum.")
    options: dict[str, bool | int | float | str] = Field({}, description="Arguments of the reward function.")


def _terms(value: Any) -> Any:
    """Parses the terms. A bare number is a weight; in a table, all fields except the weight are options of the
    reward."""
    if not isinstance(value, dict):
        return value
    terms: dict[str, Any] = {}
    for name, term in value.items():
        if isinstance(term, bool) or not isinstance(term, (int, float, dict)):
            terms[name] = term  # RewardTerm rejects it, with the name in the message
        elif isinstance(term, dict) and "options" not in term:
            options = {key: option for key, option in term.items() if key != "weight"}
            terms[name] = {"weight": term.get("weight", 1.0), "options": options}
        else:
            terms[name] = term if isinstance(term, dict) else {"weight": float(term)}
    return terms


Rewards = Annotated[dict[str, RewardTerm], BeforeValidator(_terms)]
