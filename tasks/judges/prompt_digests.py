"""Digests of the judges' prompts, which are part of the key of stages that use them."""

from __future__ import annotations

from grpo.config.judge import JudgeSettings
from grpo.judging.create_voter import MODELS
from grpo.judging.questions import DIGESTS

PROMPT_DIGESTS = {name: DIGESTS[name] for name in ("compare", "correct", "quality", "safe")}
"""Prompts used by stages that make data."""
EVALUATION_DIGESTS = {name: DIGESTS[name] for name in ("compare", "refused")}
"""Prompts used by an evaluation."""
VERIFYING_DIGESTS = {name: DIGESTS[name] for name in ("correct", "criterion")}
"""Prompts used by verifiers and rewards."""
_FIRST = {
    "correct": "a15bd300652c58fd043bfd01e399d0d5624939d077d8fb51dd32f46ebb522147",
    "criterion": "387dce64d3d881b0ece0a7a937e6750969b18769030e8443be7b8f442955d83a",
}
"""Digests of the wordings that sampling stages used before these prompts became part of their keys."""


def verifying_digests(judge: JudgeSettings) -> dict[str, str]:
    """Digests of the prompts that verify answers while samples are scored, for the key of a stage that may ask its
    judge. Empty for a judge that is not a model. The first wordings are left out, so that keys of earlier versions stay
    valid."""
    if judge.kind not in MODELS:
        return {}
    return {name: DIGESTS[name] for name, first in _FIRST.items() if DIGESTS[name] != first}
