"""|log p of the sampler - log p of the trainer| in a narrow type, on completions that SmolLM2-135M-Instruct samples.

    python benchmarks/sampler_mismatch.py [--dtype bfloat16] [--seeds 0 1 2] [--build build]
        [--operations cpu|cuda] [--head float32|narrow]

`--operations cuda`: decoding computes attention with the operations that a GPU would run, on CPU tensors. `--head
narrow`: logits are rounded to `--dtype`, as transformers does.

Prints one line per seed: the mean, 99th percentile and largest difference between sampler and trainer, in nats per
token, and the mean difference of each from the same weights computed in float32.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from inputs import need_model, questions, smollm2
from torch import Tensor
from torch.nn.functional import linear

from grpo.config.common import Hardware, Sampling
from grpo.generation.sampler import sample
from grpo.model import lm_head as head
from grpo.model.decode import step_rows
from grpo.model.decode.partial_attention import attention_in_float32
from grpo.model.loading import load_policy, load_tokenizer
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed import token_logprobs

PROMPTS, PER_PROMPT, LENGTH = 4, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--operations", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--head", choices=("float32", "narrow"), default="float32")
    args = parser.parse_args()
    need_model(args.build)
    if args.operations == "cuda":
        step_rows.partial_attention = attention_in_float32
    if args.head == "narrow":
        head.float32_linear = token_logprobs.float32_linear = linear
        head.kept_in_float32 = token_logprobs.kept_in_float32 = lambda weight: weight
    folder = str(smollm2(args.build))
    narrow = load_policy(folder, Hardware(device="cpu", dtype=args.dtype))
    wide = load_policy(folder, Hardware(device="cpu"))
    wide.load_state_dict(narrow.state_dict())  # the same rounded weights
    tokenizer = load_tokenizer(folder)
    with tempfile.TemporaryDirectory() as work:
        texts = questions(PROMPTS * len(args.seeds), Path(work))
    for number, seed in enumerate(args.seeds):
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in texts[number * PROMPTS :][:PROMPTS]
        ]
        report(seed, narrow, wide, prompts, tokenizer.eos_token_id)


@torch.no_grad()
def report(seed: int, narrow: torch.nn.Module, wide: torch.nn.Module, prompts: list[list[int]], end: int) -> None:
    """Prints the line of a seed."""
    seeds = [seed * 1000 + i for i in range(len(prompts))]
    groups = sample(narrow, prompts, PER_PROMPT, Sampling(max_new_tokens=LENGTH), eos_id=end, seeds=seeds)
    rows = [prompt for prompt in prompts for _ in range(PER_PROMPT)]
    completions = [completion for group in groups for completion in group]
    tokens = [completion.tokens for completion in completions]
    sampler = torch.cat([torch.tensor(completion.logprobs) for completion in completions])
    trainer, exact = (flat(completion_logprobs(model, rows, tokens, 1.0), tokens) for model in (narrow, wide))
    difference = (sampler - trainer).abs()
    print(
        f"seed {seed}: {len(difference)} tokens, sampler - trainer: mean {difference.mean():.4f}, "
        f"99% {difference.quantile(0.99):.4f}, largest {difference.max():.4f}; from float32: "
        f"sampler {(sampler - exact).abs().mean():.4f}, trainer {(trainer - exact).abs().mean():.4f}",
        flush=True,
    )


def flat(table: Tensor, rows: list[list[int]]) -> Tensor:
    """The entries of a padded table [B, C] that belong to tokens."""
    return torch.cat([line[: len(row)].float() for line, row in zip(table, rows, strict=True)])


if __name__ == "__main__":
    main()
