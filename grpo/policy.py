"""Loading models, and the log-probabilities of completions under them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from grpo.config import CopyModelJob, Hardware
from grpo.errors import InputError
from grpo.runlog import write_result

IGNORE = -100


def choose_device(hardware: Hardware) -> torch.device:
    if hardware.device != "auto":
        return torch.device(hardware.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_tokenizer(model: str) -> Any:
    tokenizer = _load(AutoTokenizer, model, "tokenizer")
    if tokenizer.eos_token_id is None:
        raise InputError(f"{model}: the tokenizer has no end-of-sequence token, so completions could not end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(model: str, hardware: Hardware) -> Any:
    """A causal language model on its device, with dropout off (a policy's ratio must not be noise)."""
    policy = _load(AutoModelForCausalLM, model, "language model", dtype=getattr(torch, hardware.dtype))
    if hardware.gradient_checkpointing:
        policy.gradient_checkpointing_enable()
    return policy.to(choose_device(hardware)).eval()


def load_reward_model(model: str, hardware: Hardware) -> Any:
    """A scalar head on a language model's architecture; made anew on a policy's weights where it has none yet."""
    loaded = _load(
        AutoModelForSequenceClassification, model, "reward model", num_labels=1, dtype=getattr(torch, hardware.dtype)
    )
    return loaded.to(choose_device(hardware)).eval()


def save_tokenizer(tokenizer: Any, model: str, out: Path) -> None:
    """Write the tokenizer of `model` beside a checkpoint made from it, byte for byte where `model` is a folder.

    A tokenizer that is loaded and saved again says the same in other bytes; checkpoints of one recipe must be seen to
    share theirs.
    """
    for written in map(Path, tokenizer.save_pretrained(out)):
        original = Path(model).expanduser() / written.name
        if original.is_file():
            shutil.copyfile(original, written)


def copy_model(job: CopyModelJob) -> None:
    """Write a pretrained model and its tokenizer to `job.out`, so that a recipe's artifacts are complete."""
    tokenizer = load_tokenizer(job.model)
    model = load_policy(job.model, job.hardware)
    model.save_pretrained(job.out)
    save_tokenizer(tokenizer, job.model, job.out)
    write_result(job.result, 1, 1, counts={"parameters": sum(p.numel() for p in model.parameters())})


def check_model_folder(model: str) -> None:
    """Name what is wrong with a model's path before anything is loaded."""
    path = Path(model).expanduser()
    looks_local = model.startswith((".", "/", "~")) or path.exists()
    if not looks_local:
        return
    if not path.is_dir():
        raise InputError(f"{model}: no such model folder; give a Hugging Face folder or a hub name")
    if not (path / "config.json").is_file():
        raise InputError(f"{model}: not a model folder (config.json is missing)")
    if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        raise InputError(f"{model}: not a model folder (no *.safetensors or pytorch_model*.bin weights)")


def _load(loader: Any, model: str, what: str, **options: Any) -> Any:
    check_model_folder(model)
    path = Path(model).expanduser()
    try:
        return loader.from_pretrained(str(path) if path.exists() else model, **options)
    except Exception as error:  # a model's files are untrusted: what their loaders raise has no narrower common class
        message = textwrap.shorten(str(error), 300) or type(error).__name__
        raise InputError(f"{model}: cannot load a {what} from here: {message}") from error


def pad(rows: Sequence[Sequence[int]], value: int, left: bool = False) -> Tensor:
    """[B, T] from B rows of different lengths."""
    width = max(len(row) for row in rows)
    fill = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([[*f, *r] if left else [*r, *f] for r, f in zip(rows, fill, strict=True)])


def completion_logprobs(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
) -> Tensor:
    """Log-probability of every completion token given what precedes it.

    Returns [B, C] with C the longest completion; positions past a completion's end hold 0. The vocabulary-wide
    logits exist for completion tokens only: with long prompts they would dominate the memory.
    """
    device = next(model.parameters()).device
    ids = pad([[*p, *c] for p, c in zip(prompts, completions, strict=True)], 0).to(device)
    lengths = torch.tensor([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)], device=device)
    attention = (torch.arange(ids.shape[1], device=device) < lengths[:, None]).long()
    hidden = model.base_model(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
    predictors = torch.tensor(list(_predictors(prompts, completions)), device=device)
    rows, positions, columns = predictors.unbind(1)
    logits = model.get_output_embeddings()(hidden[rows, positions]).float() / temperature
    targets = ids[rows, positions + 1]
    chosen = logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(1)
    width = max(len(c) for c in completions)
    return chosen.new_zeros(len(prompts), width).index_put((rows, columns), chosen)


def _predictors(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, int]]:
    """(row, position whose output predicts the token, column in the completion) for every completion token."""
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for column in range(len(completion)):
            yield row, len(prompt) - 1 + column, column


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices sorted by length and cut so that no batch holds more than `max_tokens` padded tokens (at least one)."""
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        longest = max(longest, lengths[index])
        if not batches or longest * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches
