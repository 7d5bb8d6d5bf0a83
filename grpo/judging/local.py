"""A judge's model that is a Hugging Face model in this process."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from grpo.config.judge import JudgeSettings
from grpo.data.completions import all_ends, decode
from grpo.data.records import Message
from grpo.data.template import opened_reasoning
from grpo.errors import InputError
from grpo.judging.chat_models import ChatModel, OnReply
from grpo.judging.counts import JudgeCounts
from grpo.judging.questions import without_markers
from grpo.judging.replies import Reply
from grpo.model_folder import check_vocabulary, load_checked


class LocalModel(ChatModel):
    """A model in this process. Thread-safe: it replies to one batch at a time."""

    waits = False

    def __init__(self, settings: JudgeSettings) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        assert settings.path is not None  # JudgeSettings checks
        folder, best = str(settings.path.absolute()), "cuda" if torch.cuda.is_available() else "cpu"
        device = best if settings.device == "auto" else settings.device
        try:
            self.tokenizer = load_checked(
                AutoTokenizer, folder, "tokenizer", local_files_only=True, padding_side="left"
            )
            model: Any = load_checked(
                AutoModelForCausalLM, folder, "language model", local_files_only=True, dtype="auto"
            )
            check_vocabulary(model, self.tokenizer, folder)
            self.model = model.to(device).eval()
        except InputError as error:
            raise InputError(f"judge: {error}") from None
        except RuntimeError as error:  # such a device is not here
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"judge: {settings.path} cannot be loaded on {device}: {first_line}") from None
        self._markers = markers_of(self.tokenizer)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self._stops = all_ends(self.tokenizer, self.model.generation_config)
        self.settings, self.counts = settings, JudgeCounts()
        self._lock = threading.Lock()

    def reply_all(
        self, dialogues: Sequence[list[Message]], draws: Sequence[int], on_reply: OnReply | None = None
    ) -> list[Reply]:
        with self._lock:
            encoded = [self._encode(dialogue) for dialogue in dialogues]
        longest = getattr(self.model.config, "max_position_embeddings", None) or float("inf")
        # A truncated prompt would be judged on part of an answer, so a prompt that is too long gets no reply.
        fitting = [i for i, ids in enumerate(encoded) if len(ids) + self.settings.max_tokens <= longest]
        fitting.sort(key=lambda i: len(encoded[i]))  # similar lengths in a batch need little padding
        replies = [Reply("", missing="prompt_too_long") for _ in dialogues]
        for start in range(0, len(fitting), self.settings.batch_size):
            batch = fitting[start : start + self.settings.batch_size]
            if on_reply:
                for i in batch:
                    on_reply.begin(i)
            with self._lock:  # a reply's random numbers are drawn from the process's generators
                generated = self._generate([encoded[i] for i in batch], [draws[i] for i in batch])
            for i, reply in zip(batch, generated, strict=True):
                replies[i] = reply
                if on_reply:
                    on_reply.end(i, reply)
        return replies

    def close(self) -> None:
        """Does nothing: no request is in progress between calls."""

    def _encode(self, dialogue: list[Message]) -> list[int]:
        """Token ids of the dialogue. Messages hold untrusted text, so the tokenizer's markers in them are broken; those
        of the chat template are kept."""
        plain = [{**message, "content": without_markers(message["content"], self._markers)} for message in dialogue]
        if self.tokenizer.chat_template is None:
            return self.tokenizer("\n\n".join(message["content"] for message in plain))["input_ids"]
        text = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _generate(self, prompts: list[list[int]], draws: list[int]) -> list[Reply]:
        import torch

        batch = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(self.model.device)
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        sampling: dict[str, Any] = {"do_sample": False}
        if self.settings.temperature > 0:
            sampling = {"do_sample": True, "temperature": self.settings.temperature, "top_p": 1.0, "top_k": 0}
        # Greedy decoding draws no random numbers, so the process's generators need no protection.
        forked = torch.random.fork_rng(devices) if self.settings.temperature > 0 else nullcontext()
        with torch.inference_mode(), forked:
            if self.settings.temperature > 0:
                torch.manual_seed(zlib.crc32(repr((self.settings.seed or 0, prompts, draws)).encode()))
            output = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=self.settings.max_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
                **sampling,
            )
        self.counts.add("prompt_tokens", sum(map(len, prompts)))
        rows = output[:, batch["input_ids"].shape[1] :].tolist()
        return [self._reply(ids, prompt) for ids, prompt in zip(rows, prompts, strict=True)]

    def _reply(self, ids: list[int], prompt: list[int]) -> Reply:
        length = next((i for i, token in enumerate(ids) if token in self._stops), len(ids))
        written = min(length + 1, len(ids))
        self.counts.add("completion_tokens", written)
        (text,) = decode(self.tokenizer, [ids[:length]])
        text = opened_reasoning(self.tokenizer, prompt) + text  # so that all of the reasoning is known to be that
        return Reply(text, cut=length == self.settings.max_tokens, tokens=len(prompt) + written)


def markers_of(tokenizer: Any) -> list[str]:
    """Texts that the tokenizer reads as single template tokens: special tokens, and added tokens in brackets."""
    added = tokenizer.added_tokens_decoder.values()
    return sorted({t.content for t in added if t.special or any(c in t.content for c in "<>[]|{}")})
