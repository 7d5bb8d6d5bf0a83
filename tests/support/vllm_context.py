"""Starts vLLM with a small cache and no max_model_len, and writes as JSON how long a sequence it takes.

python tests/support/vllm_context.py MODEL OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from grpo.config.common import Sampling
from grpo.config.engines import VLLM
from grpo.errors import InputError
from grpo.generation.vllm.local import LocalVLLM

CACHE_GB = 0.125


def main() -> None:
    model, out = sys.argv[1:]
    engine = LocalVLLM(model, VLLM(kind="local", kv_cache_gb=CACHE_GB, enforce_eager=True), eos_id=1)
    groups = dict(engine.sample([[3, 4, 5]], 2, Sampling(max_new_tokens=8), [0]))
    seen = {"cache_bytes": int(CACHE_GB * 2**30), "longest": engine.longest}
    seen["lengths"] = [len(completion.tokens) for completion in groups[0]]
    try:
        next(engine.sample([[3]], 1, Sampling(max_new_tokens=4_000_000), [0]))
    except InputError as error:
        seen["refused"] = str(error)
    Path(out).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
