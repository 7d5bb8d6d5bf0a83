"""How the data factory grows: problems in, a data set out, by the true path with an engine that answers at once.

    python benchmarks/sft_data.py [--samples 800000] [--output docs/measured/sft_data.md] [--json]

Each size is a process of its own: sampling job (shards, journal, rewards in their processes), filters with exact and
near duplicates and contamination, mix, card. The answers are sums worked out in words, half of them flawed in one of
the ways that the filters know. Memory is the peak of the process and its children together. With --json the last line
is one object: {"samples", "seconds", "samples_per_s", "peak_rss_gb", ...} of the largest size.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from arguments import output_file, write_output
from machine import measured_by
from measure import run

from grpo.config.common import Sampling
from grpo.data.completions import TextCompletion, TextCompletions
from grpo.data.records import Problem, write_rows

HERE = Path(__file__).parent
PER_PROBLEM = 8
HELD_OUT = 1000
WORDS = ("first", "then", "next", "so", "we", "add", "take", "away", "what", "is", "left", "over", "carry", "the")


class Instant:
    """Answers at once, from the problem and the seed alone."""

    identity = "instant"

    def write(
        self, problems: Sequence[Problem], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, TextCompletions]]:
        for index, (problem, seed) in enumerate(zip(problems, seeds, strict=True)):
            chance = random.Random(seed)
            yield index, TextCompletions([self._text(problem, chance) for _ in range(count)], prompt_tokens=16)

    def _text(self, problem: Problem, chance: random.Random) -> TextCompletion:
        answer = problem.answer if chance.random() < 0.6 else str(chance.randrange(1000))
        steps = " ".join(chance.choices(WORDS, k=40)) + f" which makes {answer}"
        flaw = chance.random()
        if flaw < 0.05:
            steps += "\n```python\nprint(1)\n```"
        elif flaw < 0.1:
            steps = " ".join([steps[:20]] * 12)
        if flaw > 0.95:
            return TextCompletion(f"<think>\n{steps}", 64, finished=False)
        return TextCompletion(f"<think>\n{steps}\n</think>\n<answer>{answer}</answer>", 60, finished=True)

    def close(self) -> None:
        pass


def instant() -> Instant:
    return Instant()


def problems(count: int, first: int) -> Iterator[Problem]:
    chance = random.Random(first)
    for number in range(first, first + count):
        a, b, c = (chance.randrange(1000) for _ in range(3))
        place = chance.choice(("A farm", "A shop", "A school"))
        text = f"{place} number {number} has {a} + {b} - {c} things: how many?"
        message = {"role": "user", "content": text}
        source = f"sums/{number % 4}"
        yield Problem(f"p{number}", [message], str(a + b - c), "number", "reasoning", "en", source)


def make(samples: int, folder: Path, shard_problems: int | None = None) -> dict[str, Any]:
    """The stage on problems for so many samples, in this process and what it starts."""
    os.environ["R1FLOW_HOME"] = str(folder)
    from flows.home import home, prepare_environment, store

    prepare_environment()
    from flows.prefect_server import prefect_server
    from flows.recipe.data_sections import SFTData
    from flows.stage_flows import sft_data
    from flows.stages.sft_data import STAGE
    from tasks.store.manifest import artifact_key

    def publish(stage: str, fill: Any) -> None:
        config = {"benchmark": samples}
        with store().attempt(stage, artifact_key(stage, 1, config, {})) as attempt:
            fill(attempt.out)
            attempt.publish(stage_version=1, config=config)

    def fill(out: Path) -> None:
        write_rows(out / "train.parquet", [*problems(samples // PER_PROBLEM, 0)], Problem)
        write_rows(out / "held_out.parquet", [*problems(HELD_OUT, 10**8)], Problem)

    publish("problems", fill)
    publish("reasoning_rl", lambda out: (out / "no-weights").touch())
    config = SFTData.model_validate(
        {
            "problems": samples,
            "samples_per_problem": PER_PROBLEM,
            "keep_per_problem": 4,
            "sampling": {"max_new_tokens": 64},
            "engine": {"kind": "function", "function": "sft_data:instant"},
            "judged": [],
            "mix": {"validation_share": 0.01},
            **({"shard_problems": shard_problems} if shard_problems else {}),
        }
    )
    with prefect_server(home() / "logs"):
        began = time.perf_counter()
        state = sft_data(config, {}, 0, return_state=True)
        seconds = time.perf_counter() - began
    made: dict[str, Any] = state.result()
    assert made["counts"]["reasoning_sampled"] == samples, made["counts"]
    assert STAGE.name == made["name"]
    speed = {"samples": samples, "seconds": seconds, "samples_per_s": samples / seconds}
    return {**speed, "counts": made["counts"], "digest": made["digest"]}


def measured(samples: int, work: Path) -> dict[str, Any]:
    """A size in a process of its own, with the peak of its memory."""
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE), str(HERE.parent)])
    command = [sys.executable, str(HERE / "sft_data.py"), "--one", str(samples), "--work", str(work / str(samples))]
    found = run(command, work / f"{samples}.log", {"PYTHONPATH": paths})
    result = found | {"peak_rss_gb": found["peak_mb"] / 1024}
    print(
        f"{samples:,} samples: {result['seconds']:.1f} s, {result['samples_per_s']:,.0f} a second, "
        f"{result['peak_rss_gb']:.2f} GB",
        file=sys.stderr,
        flush=True,
    )
    return result


def sample_count(text: str) -> int:
    """Type of an argument: so many samples of whole problems, in each of the sizes."""
    count = int(text)
    if count < PER_PROBLEM or any(size % PER_PROBLEM for size in sizes_up_to(count)):
        raise argparse.ArgumentTypeError(f"{count}: give a multiple of {100 * PER_PROBLEM}")
    return count


def sizes_up_to(samples: int) -> list[int]:
    return [size for size in (samples // 100, samples // 10, samples) if size]


def markdown(sizes: list[dict[str, Any]]) -> str:
    largest = sizes[-1]
    lines = [
        "# The data factory at 8 thousand to 800 thousand samples",
        "",
        measured_by(f"python benchmarks/sft_data.py --samples {largest['samples']}"),
        "",
        "| samples | seconds | samples/s | us a sample | peak memory, GB |",
        "|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {s['samples']:,} | {s['seconds']:.1f} | {s['samples_per_s']:,.0f} | {1e6 / s['samples_per_s']:.0f} | "
        f"{s['peak_rss_gb']:.2f} |"
        for s in sizes
    ]
    lines += ["", f"What became of the {largest['samples']:,}:", "", "| outcome | samples |", "|---|--:|"]
    lines += [f"| {name.removeprefix('reasoning_')} | {count:,} |" for name, count in largest["counts"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=sample_count, default=800_000)
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shard-problems", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(make(args.one, args.work, args.shard_problems)))
        return
    with tempfile.TemporaryDirectory() as work:
        sizes = [measured(n, Path(work)) for n in sizes_up_to(args.samples)]
    text = markdown(sizes)
    print(text)
    if args.output:
        write_output(args.output, text)
    if args.json:
        keys = ("samples", "seconds", "samples_per_s", "peak_rss_gb")
        print(json.dumps({k: sizes[-1][k] for k in keys} | {"sizes": [{k: s[k] for k in keys} for s in sizes]}))


if __name__ == "__main__":
    main()
