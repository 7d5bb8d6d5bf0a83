"""Settings of a judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class JudgeSettings(BaseModel):
    """Which judge, and its settings; those of another kind keep their defaults."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["rule", "reference", "local", "openai"] = Field(
        default="rule",
        description="rule: a checklist, no model; reference: how near the prompt's reference a response comes, no "
        "model, for an evaluation that must not ask the judge that was rewarded; local: a Hugging Face folder; openai: "
        "a compatible endpoint.",
    )
    verifier: Literal["math", "exact"] = Field(
        default="math", description="rule: how an answer is compared with the reference."
    )
    quality_min: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Least mark of a response that is good. rule: the rules' share of met conditions; reference: chrF.",
    )
    path: Path | None = Field(default=None, description="local: folder of the model and its tokenizer.")
    device: str = Field(default="auto", description="local: auto (cuda where there is one), cpu, cuda, cuda:1.")
    batch_size: int = Field(default=8, ge=1, le=4096, description="local: prompts generated for together.")
    base_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s@]+(/|$)",
        description="openai: endpoint up to and with /v1, e.g. http://node7:8000/v1.",
    )
    model: str | None = Field(default=None, description="openai: name of the model at the endpoint.")
    api_key_env: str | None = Field(
        default=None, description="openai: environment variable that holds the key. None: no key is sent."
    )
    request: dict[str, Any] = Field(
        default={},
        description="openai: more fields of each request, such as {response_format = {type = 'json_object'}}; null "
        "takes a field away.",
    )
    timeout_s: float = Field(
        default=120, gt=0, le=3600, description="openai: longest time for one attempt, reply included, seconds."
    )
    retries: int = Field(
        default=5,
        ge=0,
        le=100,
        description="openai: how often a request that fails is repeated before it is undecided, as long as the "
        "endpoint answers others. 429 and 503 are no failures, but a wish to wait.",
    )
    backoff_s: float = Field(
        default=1.0,
        gt=0,
        le=60,
        description="openai: seconds before the first repetition, half of them by chance; doubles each time, to 60.",
    )
    away_max_s: float = Field(
        default=600,
        gt=0,
        le=86400,
        description="openai: seconds without any good reply after which the stage stops, to be continued later; "
        "noticed when an attempt ends.",
    )
    concurrency: int = Field(default=8, ge=1, le=1024, description="openai: requests under way at once.")
    requests_per_minute: float | None = Field(
        default=None, gt=0, description="openai: most requests a minute from this process. None: no limit."
    )
    temperature: float = Field(
        default=0.0,
        ge=0,
        le=2,
        description="local, openai: sampling temperature; 0 is greedy. Repeated judgments of "
        "one item differ only above 0.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**31,
        description="local, openai: makes replies above temperature 0 repeatable, at an endpoint as far as it heeds "
        "`seed`. None: none is sent; local takes 0.",
    )
    max_tokens: int = Field(default=1024, ge=1, le=65536, description="local, openai: most tokens of a reply.")
    ask_again: bool = Field(
        default=True,
        description="local, openai: a reply that cannot be read is shown to the model, once, with what is wrong.",
    )
    votes: int = Field(
        default=1,
        ge=1,
        le=99,
        description="local, openai: judgments of each answer or response, an odd number; more than half must agree, or "
        "it is undecided. Above 1 it needs a temperature.",
    )
    compare_votes: int = Field(
        default=1,
        ge=1,
        le=98,
        description="local, openai: judgments of each pair, averaged: 1, or an even number, half of them with "
        "the order swapped, which also measures position bias. Above 2 it needs a temperature.",
    )
    agreement_min: float = Field(
        default=0.8,
        ge=0,
        le=1,
        description="local, openai: least agreement with the rules, as share of the verified answers that it decided.",
    )
    on_disagreement: Literal["warn", "stop"] = Field(
        default="warn", description="local, openai: what happens below agreement_min."
    )
    calibration: int = Field(
        default=200, ge=0, description="local, openai: verified answers to measure the agreement on. 0: none."
    )
    audit_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        exclude_if=lambda value: value == 0,
        description="local, openai: share of the answers that a rule decides and that the judge is asked about too "
        "while they are scored, to measure how far both agree; it changes no reward. 0: none.",
    )
    decides_unsure: bool = Field(
        default=False,
        exclude_if=lambda value: not value,
        description="local, openai: whether the judge decides where a rule rejects an answer but cannot read the "
        "reference, such as a sentence under 'math'. What a rule accepts, or rejects knowing the reference, stays.",
    )
    budget_requests: int | None = Field(
        default=None,
        ge=1,
        exclude_if=lambda value: value is None,
        description="local, openai: most replies of the model in one stage; then it stops with one line, and continues "
        "after its last reply when it is run again with more. A reply that is known is free. None: no limit.",
    )
    budget_tokens: int | None = Field(
        default=None,
        ge=1,
        exclude_if=lambda value: value is None,
        description="local, openai: most tokens of prompts and replies in one stage, as the engine counts them; "
        "requests under way may exceed it. None: no limit.",
    )

    @property
    def is_model(self) -> bool:
        """Whether the judge is a language model, which can be asked any question."""
        return self.kind not in ("rule", "reference")

    @model_validator(mode="after")
    def _kind_is_complete(self) -> JudgeSettings:
        for name in _NEEDED[self.kind]:
            if getattr(self, name) is None:
                raise ValueError(f"judge {self.kind!r} needs {name}")
        changed = self.model_dump(exclude_defaults=True).keys()  # a form also sends default values
        if foreign := sorted(changed - _USED[self.kind] - {"kind"}):
            raise ValueError(f"{foreign[0]} is no setting of judge {self.kind!r}; remove it, or change kind")
        return self

    @model_validator(mode="after")
    def _votes_can_differ(self) -> JudgeSettings:
        if self.votes % 2 == 0:
            raise ValueError(f"votes is {self.votes}; take an odd number, so that there is a majority")
        if self.compare_votes > 1 and self.compare_votes % 2:
            raise ValueError(f"compare_votes is {self.compare_votes}; take 1 or an even number, half in each order")
        for name, most in (("votes", 1), ("compare_votes", 2)):
            if self.temperature == 0 and getattr(self, name) > most:
                raise ValueError(f"{name} above {most} asks the same again at temperature 0; set temperature above 0")
        return self


_NEEDED = {"rule": (), "reference": (), "local": ("path",), "openai": ("base_url", "model")}
_OF_MODELS = {
    *("temperature", "seed", "max_tokens", "ask_again", "votes", "compare_votes"),
    *("agreement_min", "on_disagreement", "calibration", "audit_share", "decides_unsure"),
    *("budget_requests", "budget_tokens"),
}
_USED = {
    "rule": {"verifier", "quality_min"},
    "reference": {"quality_min"},
    "local": {"path", "device", "batch_size", *_OF_MODELS},
    "openai": {
        *("base_url", "model", "api_key_env", "request", "timeout_s", "retries", "backoff_s", "away_max_s"),
        *("concurrency", "requests_per_minute", *_OF_MODELS),
    },
}
