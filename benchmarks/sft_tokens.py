"""SFT of a large data set up to its first step: seconds, and the most memory that the trainer held.

    python benchmarks/sft_tokens.py [--samples 800000] [--tokens 1000] [--output docs/measured/sft_tokens.md]

Writes so many conversations as parquet, of random digits that are a token each, and runs `python -m grpo.train` on them
for one step with a model of two small layers, so that what is measured is the data. Then it runs the same job again
without its checkpoint: the tokens are there already. Peak memory is the resident set of the trainer (VmHWM), pages
of the mapped token files and of libraries included. It takes 14 bytes of disk a token.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from arguments import at_least, output_file, write_output
from machine import measured_by
from trainer_memory import trainer_mb
from transformers import LlamaConfig, LlamaForCausalLM

from grpo.config.supervised import Pretrain
from grpo.data.conversations import response_column
from grpo.training.pretrain import train_tokenizer

PROMPT = [{"role": "user", "content": "Write digits."}]
ROWS = 20_000
"""Of a parquet file, as the data factory writes them."""


def write_model(folder: Path) -> None:
    """A tokenizer in which a digit with the space before it is a token, and a small random model."""
    settings = Pretrain(steps=1, vocabulary=300, optimizer={"learning_rate": 0.1})
    tokenizer = train_tokenizer([" 0 1 2 3 4 5 6 7 8 9"] * 10 + ["User: Write digits."], settings)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_data(folder: Path, samples: int, tokens: int) -> None:
    """Parquet files of conversations whose completions are `tokens` random digits."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number, start in enumerate(range(0, samples, ROWS)):
        count = min(ROWS, samples - start)
        text = np.full((count, tokens, 2), ord(" "), np.uint8)
        text[:, :, 1] = rng.integers(ord("0"), ord("9") + 1, (count, tokens))
        completions = pa.array([row.tobytes().decode() for row in text])
        table = pa.table({"prompt": pa.array([PROMPT] * count), "completion": response_column(completions)})
        pq.write_table(table, folder / f"part-{number:05d}.parquet")


def train(work: Path, tokens: int) -> dict[str, Any]:
    """One step. Seconds from the start of the process to its end, and its peak resident set in GB."""
    job = {
        "kind": "sft",
        "settings": {
            "batch_size": 8,
            "max_steps": 1,
            "max_tokens": 2 * tokens,
            "optimizer": {"learning_rate": 1e-4},
            "hardware": {"device": "cpu"},
        },
        "model": str(work / "model"),
        "data": str(work / "data"),
        "seed": 0,
        "out": str(work / "out"),
        "state": str(work / "state"),
        "metrics": str(work / "metrics.jsonl"),
        "result": str(work / "result.json"),
    }
    (work / "job.json").write_text(json.dumps(job))
    started = time.perf_counter()
    peak_mb = trainer_mb(work / "job.json")
    seconds = time.perf_counter() - started
    counts = json.loads((work / "result.json").read_text())["counts"]
    return {"seconds": seconds, "peak_gb": peak_mb * 2**20 / 1e9, **counts}


def markdown(samples: int, tokens: int, first: dict[str, Any], again: dict[str, Any], disk_gb: float) -> str:
    """The page."""
    rate = samples * tokens / first["seconds"] / 1e6
    return f"""# SFT of {samples:,} samples up to the first step

{measured_by(f"python benchmarks/sft_tokens.py --samples {samples} --tokens {tokens}")}
{samples:,} samples of about {tokens:,} tokens, tokenised into memory-mapped shards, and one step of SFT on them with a
model of two small layers.

| | seconds to the end of the first step | peak resident memory, GB |
|---|--:|--:|
| tokenised and trained | {first["seconds"]:.0f} | {first["peak_gb"]:.2f} |
| again, tokens there already | {again["seconds"]:.0f} | {again["peak_gb"]:.2f} |

That is {rate:.2f} million tokens a second; the shards take {disk_gb:.2f} GB on disk. Resident memory includes the
libraries of the trainer and those pages of the shards that it read.
"""


def main() -> None:
    """Measures, prints, writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=at_least(1), default=800_000)
    parser.add_argument("--tokens", type=at_least(1), default=1000)
    parser.add_argument("--output", type=output_file)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_model(work / "model")
        write_data(work / "data", given.samples, given.tokens)
        first = train(work, given.tokens)
        tokens = work / "state" / "tokens"
        disk_gb = sum(path.stat().st_size for path in tokens.iterdir()) / 1e9
        shutil.rmtree(work / "out")
        again = train(work, given.tokens)
        page = markdown(given.samples, given.tokens, first, again, disk_gb)
    print(page)
    if given.output:
        write_output(given.output, page)
    print(json.dumps({"first": first, "again": again, "disk_gb": disk_gb}))


if __name__ == "__main__":
    main()
