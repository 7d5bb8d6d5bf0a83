"""The work of both sides of benchmarks/grpo_vs_trl.py: the case, its reward and the figures that they report."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure import high_water_mb

LEARNING_RATE, ADAM_BETA2, MAX_GRAD_NORM = 1e-6, 0.95, 1.0


CLIP = 0.2


@dataclass(frozen=True)
class Case:
    """The work of both sides: every step asks the same prompts."""

    folder: str
    model: str
    prompts: list[list[dict[str, str]]]
    group_size: int
    max_new_tokens: int
    kl_coef: float
    micro_batch_tokens: int  # ours: tokens of a micro-batch
    trl_rows: int  # TRL's: completions of a micro-batch
    warm_up: int
    steps: int  # timed, after the warm-up
    seed: int
    device: str = "cpu"  # on a GPU, bfloat16 arithmetic on float32 weights

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.group_size

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))
        return path


def letters(text: str) -> float:
    """The reward of both sides, share of letters: cheap, and the completions of a group hardly ever agree in it."""
    return sum(map(str.isalpha, text)) / max(1, len(text))


def reward(problem: Any, response: Any) -> float:
    return letters(response.text)


reward.quick = True  # type: ignore[attr-defined]  # a group's completions in one go


def gpu_gb() -> float | None:
    """Most memory that this process has held on a GPU; None without one."""
    import torch

    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_initialized() else None


class DeviceMemory:
    """Most memory in use on a GPU, GB, by all processes and with what they hold in reserve: `torch`'s own count has
    neither CUDA graphs nor what an engine has put to sleep. From the first use of the GPU on; None without one."""

    def __init__(self) -> None:
        self.peak_gb: float | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        import torch

        while torch.cuda.is_available():
            if torch.cuda.is_initialized():
                free, total = torch.cuda.mem_get_info()
                self.peak_gb = max(self.peak_gb or 0.0, (total - free) / 1e9)
            time.sleep(0.05)


def step_record(seconds: float, tokens: float, parts: dict[str, float]) -> dict[str, Any]:
    return {"seconds": seconds, "tokens": tokens, "parts": parts}


def report(case: Case, steps: list[dict[str, Any]], prompt_tokens: int) -> dict[str, Any]:
    return {
        "steps": steps[case.warm_up :],
        "prompt_tokens": prompt_tokens,  # of one step, each prompt once
        "rows": case.rows,
        "high_water_mb": high_water_mb(),
        "gpu_gb": gpu_gb(),
    }
