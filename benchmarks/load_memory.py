"""Memory of a process while several load a model that they share, whole and by shards, and while one copies a model.

    python -m benchmarks.load_memory [--processes 2 4] [--layers 24] [--write docs/measured/loading.md]

A Llama with random weights is saved in bfloat16 and loaded in float32. Each cell is the process that needs most memory
of its own at its peak, beyond what it held before; pages of files, which the system can drop, do not count. Ends with 1
where a process that loads shards holds more than 1.3 / N of the model and a layer, or one that copies more than five
layers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.arguments import at_least, output_file, write_output
from benchmarks.machine import measured_by
from benchmarks.tiny_models import build
from tests.support import parallel_jobs, shard_jobs

HIDDEN, WIDTH, HEADS, VOCABULARY = 1024, 2816, 16, 4096
LAYER = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * WIDTH + 2 * HIDDEN)
"""Bytes of a layer in float32."""
MB = 1e6


WAYS = {
    "whole": "whole",
    "shards": "policy or reference",
    "adapters": "policy with adapters",
    "reward model": "reward model",
    "value model": "value model",
}
"""Ways of `shard_jobs.cost_of_loading`, and their names on the page."""


def save(folder: Path, layers: int) -> int:
    """Writes the model. Returns its bytes in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def peak(processes: int, cost: Callable[..., dict[str, float]], *arguments: Path | str) -> tuple[float, float]:
    """The largest peak of a process in bytes, and the longest time in seconds."""
    team = parallel_jobs.Team(processes)
    try:
        found = team(cost, *map(str, arguments))
    finally:
        team.dismiss()
    return max(cost["bytes"] for cost in found), max(cost["seconds"] for cost in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=at_least(1), nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=at_least(1), default=24)
    parser.add_argument("--write", type=output_file, metavar="PAGE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="load-memory-") as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        build("llama", small)
        whole = save(large, args.layers)
        rows, wrong = [], []
        for count in args.processes:
            loading = shard_jobs.cost_of_loading
            allowed = 1.3 * whole / count + LAYER
            for way, what in WAYS.items():
                size, seconds = peak(count, loading, small, large, way)
                limit = "" if way == "whole" else f"{allowed / MB:,.0f}"
                rows.append(f"| {count} | {what} | {size / MB:,.0f} | {size / whole:.2f} | {seconds:.0f} | {limit} |")
                print(rows[-1], flush=True)
                wrong += [count] if way != "whole" and size > allowed else []
        copied = peak(1, shard_jobs.cost_of_copying, small, large, Path(folder) / "copy")
        wrong += [1] if copied[0] > 5 * LAYER else []
    text = page(" ".join(map(str, args.processes)), args.layers, whole, rows, copied)
    print(text)
    if args.write:
        write_output(args.write, text)
    return 1 if wrong else 0


def page(processes: str, layers: int, whole: int, rows: list[str], copied: tuple[float, float]) -> str:
    command = f"python -m benchmarks.load_memory --processes {processes} --layers {layers}"
    return f"""# Memory while a model is loaded

{measured_by(command)}

A Llama of {layers} layers, {whole / MB:,.0f} MB in float32 ({LAYER / MB:.0f} MB a layer), is read from bfloat16 by
processes that share it. MB that the process with the highest peak holds of its own, their share of the whole, and
seconds. *Whole*: each process loads the model and then keeps its shards. Otherwise it reads its shards alone
([`grpo/model/sharded/`](../../grpo/model/sharded)). Allowed: 1.3 / N of the whole and a layer.

| processes | model | MB | of the whole | s | allowed, MB |
|--:|---|--:|--:|--:|--:|
{chr(10).join(rows)}

Copied, as by the stage `base`, it takes {copied[0] / MB:,.0f} MB and {copied[1]:.0f} s: the weights keep the type of
their files and stay pages of them.
"""


if __name__ == "__main__":
    sys.exit(main())
