"""Digests of the judges' prompts, which are part of the key of stages that ask them."""

from __future__ import annotations

from grpo.judging.questions import DIGESTS

PROMPT_DIGESTS = {name: DIGESTS[name] for name in ("compare", "correct", "quality", "safe")}
"""Prompts that stages ask which make data."""
EVALUATION_DIGESTS = {name: DIGESTS[name] for name in ("compare", "refused")}
"""Prompts that an evaluation asks."""
VERIFYING_DIGESTS = {name: DIGESTS[name] for name in ("correct", "criterion")}
"""Prompts that verifiers and rewards ask."""
