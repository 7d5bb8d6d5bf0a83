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
        description="rule: a checklist, no model; reference: similarity of a response to the prompt's reference, no "
        "model, for evaluations that must not use the judge that gave rewards; local: a Hugging Face folder; openai: "
        "a compatible endpoint.",
    )
    verifier: Literal["math", "exact"] = Field(
        default="math", description="rule: how answers are compared with the reference."
    )
    quality_min: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Minimum score of a good response. rule: the rules' share of met conditions; reference: chrF.",
    )
    path: Path | None = Field(default=None, description="local: folder of the model and its tokenizer.")
    device: str = Field(default="auto", description="local: auto (cuda if available), cpu, cuda, cuda:1.")
    batch_size: int = Field(default=8, ge=1, le=4096, description="local: prompts per generation batch.")
    base_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s@]+(/|$)",
        description="openai: endpoint URL including /v1, e.g. http://node7:8000/v1.",
    )
    model: str | None = Field(default=None, description="openai: model name at the endpoint.")
    api_key_env: str | None = Field(
        default=None, description="openai: environment variable with the API key. None: no key is sent."
    )
    request: dict[str, Any] = Field(
        default={},
        description="openai: further fields of each request, such as {response_format = {type = 'json_object'}}; null "
        "removes a field.",
    )
    timeout_s: float = Field(
        default=120, gt=0, le=3600, description="openai: timeout of one attempt, reply included, seconds."
    )
    retries: int = Field(
        default=5,
        ge=0,
        le=100,
        description="openai: retries of a failing request before it is left undecided, as long as the endpoint answers "
        "others. 429 and 503 do not count as failures.",
    )
    backoff_s: float = Field(
        default=1.0,
        gt=0,
        le=60,
        description="openai: maximum seconds before the first retry, half of them random; doubles each time, up to 60.",
    )
    away_max_s: float = Field(
        default=600,
        gt=0,
        le=86400,
        description="openai: seconds without any good reply after which the stage stops, to be resumed later; checked "
        "when an attempt ends.",
    )
    concurrency: int = Field(default=8, ge=1, le=1024, description="openai: requests in flight at once.")
    requests_per_minute: float | None = Field(
        default=None, gt=0, description="openai: maximum requests per minute from this process. None: no limit."
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
        description="local, openai: makes replies above temperature 0 reproducible, if an endpoint honors `seed`. "
        "None: no seed is sent; local uses 0.",
    )
    max_tokens: int = Field(default=1024, ge=1, le=65536, description="local, openai: maximum tokens per reply.")
    ask_again: bool = Field(
        default=True,
        description="local, openai: show an unparseable reply to the model once, with what is wrong.",
    )
    votes: int = Field(
        default=1,
        ge=1,
        le=99,
        description="local, openai: judgments per answer or response, an odd number; without a majority it is "
        "undecided. Above 1 needs a temperature above 0.",
    )
    compare_votes: int = Field(
        default=1,
        ge=1,
        le=98,
        description="local, openai: judgments per pair, averaged: 1, or an even number, half with the order swapped, "
        "which also measures position bias. Above 2 needs a temperature above 0.",
    )
    agreement_min: float = Field(
        default=0.8,
        ge=0,
        le=1,
        description="local, openai: minimum agreement with the rules, as a share of verified answers the judge "
        "decided.",
    )
    on_disagreement: Literal["warn", "stop"] = Field(
        default="warn", description="local, openai: what to do below agreement_min."
    )
    calibration: int = Field(
        default=200, ge=0, description="local, openai: verified answers for measuring agreement. 0: none."
    )
    audit_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        exclude_if=lambda value: value == 0,
        description="local, openai: share of rule-decided answers that the judge also decides during scoring, to "
        "measure their agreement; changes no reward. 0: none.",
    )
    decides_unsure: bool = Field(
        default=False,
        exclude_if=lambda value: not value,
        description="local, openai: whether the judge decides if a rule rejects an answer but cannot parse the "
        "reference, such as a sentence under 'math'. All other rule verdicts stand.",
    )
    budget_requests: int | None = Field(
        default=None,
        ge=1,
        exclude_if=lambda value: value is None,
        description="local, openai: maximum model replies per stage; then it stops with a one-line message, and "
        "resumes after the last reply when rerun with more. Cached replies are free. None: no limit.",
    )
    budget_tokens: int | None = Field(
        default=None,
        ge=1,
        exclude_if=lambda value: value is None,
        description="local, openai: maximum prompt and reply tokens per stage, as counted by the engine; requests in "
        "flight may exceed it. None: no limit.",
    )

    @property
    def is_model(self) -> bool:
        """Whether the judge is a language model, which can be asked any question."""
        return self.kind in _MODELS

    def files(self) -> dict[str, Path]:
        """The folder of its model, if it has one: an input of the stage that asks it."""
        return {"judge_folder": self.path} if self.path is not None else {}

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


_MODELS = ("local", "openai")
"""Kinds of judges that are language models."""
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
