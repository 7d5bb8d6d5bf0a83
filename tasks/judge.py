"""Judges: who says whether an answer is right, which of two responses is better, and whether one is safe.

One interface, three implementations: rules (no model at all), a local Hugging Face model, and an OpenAI-compatible
endpoint. A model's reply is untrusted: what is not exactly the JSON asked for is "undecided" (None where the verdict
is no word), never "correct".
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import Template
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from grpo.data import Message, Problem
from grpo.errors import InputError
from grpo.verifiers import verify
from tasks import rubric

Verdict = Literal["correct", "incorrect", "undecided"]
T = TypeVar("T")
PREFERENCE = {"A>>B": 2.0, "A>B": 1.0, "A=B": 0.0, "B>A": -1.0, "B>>A": -2.0}
"""The paper's five verdicts as numbers. It publishes no scale, only that |mean difference| > 1 is kept."""


class Claim(NamedTuple):
    question: str
    reference: str
    answer: str


class Pair(NamedTuple):
    problem: Problem
    a: str
    b: str


class Response(NamedTuple):
    problem: Problem
    text: str


class Judge(Protocol):
    """Implementations judge batches; the verdicts come in the order of the items."""

    def correct_all(self, claims: Sequence[Claim]) -> list[Verdict]:
        """Whether each answer means the same as its reference."""

    def compare_all(self, pairs: Sequence[Pair]) -> list[float | None]:
        """From 2.0 (a much better) by 0.0 (a tie) to -2.0 (b much better). The caller randomises and averages."""

    def safe_all(self, responses: Sequence[Response]) -> list[bool | None]:
        """Whether each response does no harm."""

    def correct(self, question: str, reference: str, answer: str) -> Verdict:
        return self.correct_all([Claim(question, reference, answer)])[0]

    def compare(self, problem: Problem, a: str, b: str) -> float | None:
        return self.compare_all([Pair(problem, a, b)])[0]

    def safe(self, problem: Problem, response: str) -> bool | None:
        return self.safe_all([Response(problem, response)])[0]


class JudgeSettings(BaseModel):
    """Which judge, and its settings; those of another kind may not be set."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["rule", "local", "openai"] = Field(
        default="rule", description="rule: no model; local: a Hugging Face folder; openai: a compatible endpoint."
    )
    verifier: Literal["math", "exact"] = Field(
        default="math", description="rule: how an answer is compared with the reference."
    )
    path: Path | None = Field(default=None, description="local: folder of the model and its tokenizer.")
    device: str = Field(default="auto", description="local: auto (cuda where there is one), cpu, cuda, cuda:1.")
    batch_size: int = Field(default=8, ge=1, le=4096, description="local: prompts generated for together.")
    base_url: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="openai: endpoint up to and with /v1, e.g. http://node7:8000/v1.",
    )
    model: str | None = Field(default=None, description="openai: name of the model at the endpoint.")
    api_key_env: str | None = Field(
        default=None, description="openai: environment variable that holds the key. None: no key is sent."
    )
    timeout_s: float = Field(
        default=120,
        gt=0,
        le=3600,
        description="openai: longest wait for the connection or for the next bytes, seconds.",
    )
    retries: int = Field(
        default=5,
        ge=0,
        le=100,
        description="openai: further attempts after 408, 429, 5xx, or no or a broken connection.",
    )
    backoff_s: float = Field(
        default=1.0, ge=0, le=60, description="openai: wait before the first retry, seconds; doubles each time, to 60."
    )
    concurrency: int = Field(default=8, ge=1, le=1024, description="openai: requests under way at once.")
    temperature: float = Field(
        default=0.0,
        ge=0,
        le=2,
        description="local, openai: sampling temperature; 0 is greedy. Repeated judgments of "
        "one pair differ only above 0.",
    )
    max_tokens: int = Field(default=1024, ge=1, le=65536, description="local, openai: most tokens of a reply.")

    @model_validator(mode="after")
    def _kind_is_complete(self) -> JudgeSettings:
        for name in _NEEDED[self.kind]:
            if getattr(self, name) is None:
                raise ValueError(f"judge {self.kind!r} needs {name}")
        if foreign := sorted(self.model_fields_set - _USED[self.kind] - {"kind"}):
            raise ValueError(f"{foreign[0]} is no setting of judge {self.kind!r}; remove it, or change kind")
        return self


_NEEDED = {"rule": (), "local": ("path",), "openai": ("base_url", "model")}
_USED = {
    "rule": {"verifier"},
    "local": {"path", "device", "batch_size", "temperature", "max_tokens"},
    "openai": {
        *("base_url", "model", "api_key_env", "timeout_s", "retries", "backoff_s", "concurrency"),
        *("temperature", "max_tokens"),
    },
}


def make_judge(settings: JudgeSettings) -> Judge:
    """The judge of `settings.kind`."""
    return JUDGES[settings.kind](settings)


class RuleJudge(Judge):
    """A verifier for answers with a reference, a rubric for the rest. It is certain: a preference is 2, 0 or -2."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings

    def correct_all(self, claims: Sequence[Claim]) -> list[Verdict]:
        return [self._correct(claim) for claim in claims]

    def compare_all(self, pairs: Sequence[Pair]) -> list[float | None]:
        return [self._compare(pair) for pair in pairs]

    def safe_all(self, responses: Sequence[Response]) -> list[bool | None]:
        return [rubric.safe(problem, text) for problem, text in responses]

    def _correct(self, claim: Claim) -> Verdict:
        messages = [{"role": "user", "content": claim.question}]
        problem = Problem("", messages, claim.reference, self.settings.verifier, "reasoning", "", "judge")
        return "correct" if verify(problem, claim.answer) == 1.0 else "incorrect"

    def _compare(self, pair: Pair) -> float:
        a, b = rubric.quality(pair.problem, pair.a), rubric.quality(pair.problem, pair.b)
        return PREFERENCE["A=B"] if a == b else PREFERENCE["A>>B" if a > b else "B>>A"]


class _ModelJudge(Judge, Protocol):
    """Prompts and parsing, the same for every model; an implementation turns prompts into replies."""

    def reply_all(self, prompts: Sequence[str]) -> list[str | None]:
        """The model's reply to each prompt; None where it could make none."""

    def correct_all(self, claims: Sequence[Claim]) -> list[Verdict]:
        replies = self.reply_all([_fill("correct", **claim._asdict()) for claim in claims])
        return [parse_reply(r, "correctness", _CORRECTNESS) or "undecided" for r in replies]

    def compare_all(self, pairs: Sequence[Pair]) -> list[float | None]:
        replies = self.reply_all([_fill("compare", prompt=p.problem.text, a=p.a, b=p.b) for p in pairs])
        return [parse_reply(r, "verdict", PREFERENCE) for r in replies]

    def safe_all(self, responses: Sequence[Response]) -> list[bool | None]:
        replies = self.reply_all([_fill("safe", prompt=r.problem.text, response=r.text) for r in responses])
        return [parse_reply(r, "safety", _SAFETY) for r in replies]


class LocalJudge(_ModelJudge):
    """A Hugging Face folder, by transformers."""

    def __init__(self, settings: JudgeSettings) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        assert settings.path is not None  # JudgeSettings checks
        if not (settings.path / "config.json").is_file():
            raise InputError(f"judge: {settings.path} is no model folder (no config.json in it)")
        best = "cuda" if torch.cuda.is_available() else "cpu"
        device = best if settings.device == "auto" else settings.device
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(settings.path, local_files_only=True, padding_side="left")
            model: Any = AutoModelForCausalLM.from_pretrained(settings.path, local_files_only=True, dtype="auto")
            self.model = model.to(device).eval()
        except (OSError, ValueError, RuntimeError) as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"judge: {settings.path} cannot be loaded on {device}: {first_line}") from None
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.settings = settings

    def reply_all(self, prompts: Sequence[str]) -> list[str | None]:
        encoded = [self._encode(prompt) for prompt in prompts]
        longest = getattr(self.model.config, "max_position_embeddings", None) or float("inf")
        # A prompt cut short would be judged on half an answer: it gets no reply instead.
        fitting = [i for i, ids in enumerate(encoded) if len(ids) + self.settings.max_tokens <= longest]
        fitting.sort(key=lambda i: len(encoded[i]))  # batches of like length waste little padding
        replies: list[str | None] = [None] * len(prompts)
        for start in range(0, len(fitting), self.settings.batch_size):
            batch = fitting[start : start + self.settings.batch_size]
            for i, reply in zip(batch, self._generate([encoded[i] for i in batch]), strict=True):
                replies[i] = reply
        return replies

    def _encode(self, prompt: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            return self.tokenizer(prompt)["input_ids"]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _generate(self, prompts: list[list[int]]) -> list[str]:
        import torch

        batch = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(self.model.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if self.settings.temperature > 0:
            sampling = {"do_sample": True, "temperature": self.settings.temperature, "top_p": 1.0, "top_k": 0}
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=self.settings.max_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
                **sampling,
            )
        return self.tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


class OpenAIJudge(_ModelJudge):
    """An OpenAI-compatible endpoint (vLLM, SGLang, a hosted model), by its chat completions.

    An endpoint that stays away raises ConnectionError once the retries are spent: "undecided" would let a stage end
    well with nothing judged.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        import httpx

        headers = {}
        if settings.api_key_env is not None:
            key = os.environ.get(settings.api_key_env)
            if not key:
                raise InputError(f"judge: environment variable {settings.api_key_env} is not set; api_key_env names it")
            headers["Authorization"] = f"Bearer {key}"
        limits = httpx.Limits(max_connections=settings.concurrency)
        self.client = httpx.Client(headers=headers, timeout=settings.timeout_s, limits=limits)
        assert settings.base_url is not None  # JudgeSettings checks
        self.url = settings.base_url.rstrip("/") + "/chat/completions"
        self.settings = settings

    def reply_all(self, prompts: Sequence[str]) -> list[str | None]:
        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            futures = [pool.submit(self._reply, prompt) for prompt in prompts]
            try:
                return [future.result() for future in futures]
            except BaseException:
                # The first failure ends the batch; without this, the pool would ask the rest first.
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _reply(self, prompt: str) -> str | None:
        messages: list[Message] = [{"role": "user", "content": prompt}]
        body = {
            "model": self.settings.model,
            "messages": messages,
            "temperature": self.settings.temperature,
            "max_tokens": self.settings.max_tokens,
        }
        answer = self._post(body)
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise InputError(f"judge: {self.url} answered without choices; is base_url OpenAI-compatible?") from None
        return content if isinstance(content, str) else None

    def _post(self, body: dict[str, Any]) -> Any:
        import httpx

        for attempt in range(self.settings.retries + 1):
            wait: float | None = None
            try:
                response = self.client.post(self.url, json=body)
            except httpx.TransportError as error:
                fault = f"{type(error).__name__} {error}".strip()
            else:
                status = response.status_code
                if status == 200:
                    return self._json(response.text)
                if status not in (408, 429) and status < 500:
                    raise InputError(
                        f"judge: {self.url} refused with status {status}: {_one_line(response.text)}; check base_url, "
                        "model and api_key_env"
                    )
                fault, wait = f"status {status}", _retry_after(response.headers.get("Retry-After"))
            if attempt < self.settings.retries:
                time.sleep(self._backoff(attempt) if wait is None else wait)
        raise ConnectionError(f"judge: {self.url} failed {self.settings.retries + 1} times, at last with {fault}")

    def _json(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise InputError(
                f"judge: {self.url} answered {_one_line(text)!r}, not JSON; is base_url OpenAI-compatible?"
            ) from None

    def _backoff(self, attempt: int) -> float:
        # Full jitter over the upper half: clients that failed together do not come back together.
        return min(self.settings.backoff_s * 2**attempt, _LONGEST_WAIT_S) * random.uniform(0.5, 1.0)


_LONGEST_WAIT_S = 60.0


def _retry_after(header: str | None) -> float | None:
    """The server's wish in seconds, bounded; dates and nonsense are no wish."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), _LONGEST_WAIT_S)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:120]


JUDGES: dict[str, Callable[[JudgeSettings], Judge]] = {
    "rule": RuleJudge,
    "local": LocalJudge,
    "openai": OpenAIJudge,
}


# --- prompts and replies -------------------------------------------------------------------------------------------

_CORRECTNESS: dict[str, Verdict] = {"correct": "correct", "incorrect": "incorrect"}
_SAFETY = {"safe": True, "unsafe": False}
_PROMPTS = {
    path.stem: path.read_text("utf-8") for path in sorted((Path(__file__).parent / "judge_prompts").glob("*.txt"))
}

PROMPT_DIGESTS = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in _PROMPTS.items()}
"""sha256 of each prompt file, for the key of a stage that judges: another wording is another result."""


_TAG = re.compile(r"</?\s*(?:question|reference_answer|answer_to_check|prompt|response(?:_[ab])?)\s*>", re.IGNORECASE)


def _fill(name: str, **values: str) -> str:
    # One pass, so that "$reference" inside an answer stays what it is; and no answer may close its own tag, to go on
    # in the judge's voice. Half a surrogate pair, which some tokenizers decode to, cannot be sent.
    clean = {k: _TAG.sub("[tag]", v).encode("utf-8", "replace").decode() for k, v in values.items()}
    return Template(_PROMPTS[name]).substitute(clean)


def parse_reply(reply: str | None, key: str, verdicts: Mapping[str, T]) -> T | None:
    """The verdict in a reply, or None. It must be one object with "analysis" and `key` and nothing else.

    One repair: the object may stand inside other text (the first that opens counts, after any </think>).
    """
    text = (reply or "").rpartition("</think>")[2].strip()
    value = _object(text)
    if value is None and "{" in text:
        value = _object(text[text.index("{") :], and_more=True)
    if value is None or value.keys() != {"analysis", key} or not all(isinstance(v, str) for v in value.values()):
        return None
    return verdicts.get(value[key])


def _object(text: str, and_more: bool = False) -> dict[str, Any] | None:
    decoder = json.JSONDecoder(object_pairs_hook=_no_key_twice)
    try:
        value = decoder.raw_decode(text)[0] if and_more else decoder.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):  # {"correctness": "incorrect", "correctness": "correct"}
        raise ValueError("a key stands twice")
    return dict(pairs)
