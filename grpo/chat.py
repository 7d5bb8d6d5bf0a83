"""Chat with a checkpoint in the terminal: ``python -m grpo.chat MODEL [--template r1_zero]``."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo.config.common import Hardware, Sampling
from grpo.data.completions import all_ends, completion_texts
from grpo.data.records import Message
from grpo.data.template import opened_reasoning, prompt_tokens
from grpo.errors import InputError
from grpo.generation.sampler import sample, seed_of
from grpo.model.loading import load_policy, load_tokenizer
from grpo.model_folder import check_vocabulary, generation_settings


def main(arguments: list[str]) -> int:
    """Chats on stdin and stdout until the end of input. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m grpo.chat", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--template", choices=["chat", "r1_zero"], default="chat")
    parser.add_argument("--zero-template", type=Path)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    try:
        settings, zero = _sampling(args), _text(args.zero_template)
        tokenizer, model = load_tokenizer(args.model), load_policy(args.model, Hardware())
        check_vocabulary(model, tokenizer, args.model)
        talk(args, settings, zero, tokenizer, model)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError):
        print(file=sys.stderr)
    return 0


def _sampling(args: argparse.Namespace) -> Sampling:
    try:
        return Sampling(temperature=args.temperature, top_p=args.top_p, max_new_tokens=args.max_new_tokens)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise InputError(f"--{option} {first['input']}: {first['msg']}") from None


def _text(path: Path | None) -> str | None:
    try:
        return path.read_text() if path else None
    except OSError as error:
        raise InputError(f"--zero-template {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"--zero-template {path}: not UTF-8 text") from None


def talk(args: argparse.Namespace, settings: Sampling, zero: str | None, tokenizer: Any, model: Any) -> None:
    """Reads prompts until the end of input; an empty line starts a new conversation. `zero`: the plain-text template,
    if it is not the default."""
    interactive = sys.stdin.isatty()
    messages: list[Message] = []
    if interactive:
        print("An empty line begins a new conversation; Ctrl-D ends.", file=sys.stderr)
    for turn in itertools.count():
        line = input("> " if interactive else "").strip()
        if not line:
            messages = []
            continue
        # The plain-text template of a base model takes one question; only a chat template has turns.
        messages = [*(messages if args.template == "chat" else []), {"role": "user", "content": line}]
        prompt = prompt_tokens(tokenizer, messages, args.template, zero)
        completion = sample(
            model,
            [prompt],
            1,
            settings,
            eos_id=all_ends(tokenizer, generation_settings(args.model)),
            seeds=[seed_of(args.seed, turn)],
        )[0][0]
        text = (opened_reasoning(tokenizer, prompt) + completion_texts(tokenizer, [completion])[0]).strip()
        print(text, flush=True)
        messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
