"""One engine of benchmarks/rollouts.py in a process of its own: python benchmarks/rollout_engines.py ENGINE CASE.json

ENGINE is `ours`, `generate` (transformers) or `vllm`; the last line is a JSON object. Each engine loads its own
libraries only; vLLM runs in an environment that has no other.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from extras import need_vllm
from measure import high_water_mb

Prompts = list[list[int]]
Limits = list[list[int]]
"""Length of each completion: [prompts][group]."""
Engine = Callable[[Prompts, Limits], Limits]
"""Samples one rollout; returns the lengths that came out."""


@dataclass(frozen=True)
class Case:
    model: str  # a folder whose completions never end by themselves
    rollouts: list[Prompts]
    limits: list[Limits]  # of each rollout
    seed: int

    @property
    def rows(self) -> int:
        return sum(map(len, self.limits[0]))

    @property
    def longest(self) -> int:
        return max(max(group) for sampler in self.limits for group in sampler)

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))
        return path


def load_ours(case: Case) -> Engine:
    from grpo.config.common import Hardware, Sampling
    from grpo.generation import sampler
    from grpo.model.loading import load_policy

    model = load_policy(case.model, Hardware(device="cpu"))
    settings = Sampling(temperature=1.0, max_new_tokens=case.longest, batch_size=case.rows)
    rows_of = sampler._Rows

    def engine(prompts: Prompts, limits: Limits) -> Limits:
        class Limited(rows_of):  # type: ignore[misc, valid-type]
            """A completion ends at its own length, and at no mark."""

            def ended(self, eos_id: int) -> list[int]:
                ends = [limits[prompt][number] for prompt, number in self.owners]
                return [row for row, count in enumerate(self.counts.flatten().tolist()) if count == ends[row]]

        sampler._Rows = Limited  # type: ignore[misc]
        seeds = [sampler.seed_of(case.seed, number) for number in range(len(prompts))]
        groups = sampler.sample(model, prompts, len(limits[0]), settings, eos_id=-1, seeds=seeds)
        return [[len(completion.tokens) for completion in group] for group in groups]

    return engine


def load_generate(case: Case) -> Engine:
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32).eval()
    torch.manual_seed(case.seed)

    class AtLimit(StoppingCriteria):
        def __init__(self, prompt: int, limits: list[int]):
            self.ends = prompt + torch.tensor(limits)

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return input_ids.shape[1] >= self.ends

    def engine(prompts: Prompts, limits: Limits) -> Limits:
        group = len(limits[0])
        ids = torch.tensor(prompts).repeat_interleave(group, 0)
        flat = [limit for of_prompt in limits for limit in of_prompt]
        sampled = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=case.longest,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([AtLimit(ids.shape[1], flat)]),
        )
        assert sampled.shape[1] - ids.shape[1] == max(flat)
        return limits  # a row that has reached its limit stays in the batch, and what it draws there counts for nothing

    return engine


def load_vllm(case: Case) -> Engine:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=case.model,
        dtype="float32",
        max_model_len=len(case.rollouts[0][0]) + case.longest,
        max_num_seqs=case.rows,
        enable_prefix_caching=True,
        seed=case.seed,
    )

    def engine(prompts: Prompts, limits: Limits) -> Limits:
        llm.reset_prefix_cache()  # another policy each step: nothing of the last rollout holds
        asked = [{"prompt_token_ids": p} for p, group in zip(prompts, limits, strict=True) for _ in group]
        common = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}  # no text, as the others
        settings = [SamplingParams(max_tokens=n, **common) for group in limits for n in group]
        lengths = iter([len(o.outputs[0].token_ids) for o in llm.generate(asked, settings, use_tqdm=False)])
        return [[next(lengths) for _ in group] for group in limits]

    return engine


ENGINES = {"ours": load_ours, "generate": load_generate, "vllm": load_vllm}


def measure(case: Case, engine: Engine) -> dict[str, Any]:
    """Seconds and tokens of each rollout, after a short one to warm up."""
    engine(case.rollouts[0], [[8] * len(group) for group in case.limits[0]])
    rollouts = []
    for prompts, limits in zip(case.rollouts, case.limits, strict=True):
        began = time.perf_counter()
        lengths = engine(prompts, limits)
        seconds = time.perf_counter() - began
        if lengths != limits:
            raise RuntimeError(f"completions have lengths {lengths}, not those asked for: {limits}")
        rollouts.append({"seconds": seconds, "tokens": sum(map(sum, limits))})
    return {"rollouts": rollouts, "high_water_mb": high_water_mb()}


def main(name: str, case_file: str) -> None:
    if name == "vllm":
        need_vllm()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    case = Case(**json.loads(Path(case_file).read_text()))
    print(json.dumps(measure(case, ENGINES[name](case))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
