"""Seconds that every reward, verifier and constraint takes, by the length of a text that was written to slow it down.

python benchmarks/reward_time.py [--lengths 10000 100000 1000000] [--limit 20]
    [--output docs/measured/reward_time.md]

The slowest of the texts in benchmarks/adversarial.py counts, in CPU seconds: all of them at the first length, and the
slowest twelve of each at the next. What is above --limit at one length is not measured at the next. Of reasoning-gym's
families the slowest counts at each length. The picture goes to images/reward_time.png beside the page.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adversarial import TEXTS, problem, targets
from arguments import at_least, output_file, shown, write_output
from machine import measured_by

from grpo.rewards.language import load
from grpo.rewards.reasoning_gym import pack_entry
from grpo.rewards.verifiers import verify

Times = dict[str, dict[int, tuple[float, str]]]
"""Target -> length -> seconds of the slowest text, and its name."""


def seconds(target: Callable[[str], Any], text: str) -> float:
    began = time.process_time()
    target(text)
    return time.process_time() - began


def families() -> dict[str, Callable[[str], Any]]:
    """The scorer of each reasoning-gym family, for the first problem that it makes."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    def scorer(family: str) -> Callable[[str], Any]:
        [entry] = reasoning_gym.create_dataset(family, seed=0, size=1)
        asked = problem("reasoning_gym", entry["answer"] or "", family=family, entry=pack_entry(entry))
        return lambda text: verify(asked, text)

    return {family: scorer(family) for family in sorted(DATASETS) if family != "composite"}  # that one needs others


def measure(lengths: list[int], limit: float) -> Times:
    times = {name: _row(name, target, lengths, limit) for name, target in targets().items()}
    slowest: dict[int, tuple[float, str]] = {}
    for family, target in families().items():
        for length, (took, text) in _row(family, target, lengths, limit).items():
            slowest[length] = max(slowest.get(length, (0.0, "")), (took, f"{text} ({family})"))
    return times | {"verifier reasoning_gym": slowest}


def _row(name: str, target: Callable[[str], Any], lengths: list[int], limit: float) -> dict[int, tuple[float, str]]:
    target("42")  # imports and tables
    row: dict[int, tuple[float, str]] = {}
    texts = [*TEXTS]
    for length in lengths:
        slowest = sorted(((seconds(target, TEXTS[text](length)), text) for text in texts), reverse=True)[:12]
        row[length], texts = slowest[0], [text for _, text in slowest]
        if row[length][0] > limit:
            break
    print(name, row, flush=True)
    return row


def page(times: Times, lengths: list[int]) -> str:
    lines = [
        "# Time of rewards by the length of an answer",
        "",
        measured_by(f"python benchmarks/reward_time.py{shown(sys.argv[1:], paths=['--output'])}"),
        f"CPU seconds for the slowest of {len(TEXTS)} texts,",
        "such as brackets, spaces, number lists and unclosed tags. Ten times the length takes about ten times as long.",
        "Rewards read the text as reasoning and as summary, so twice as much and more. `math` parses at most 1,000",
        "characters, `reasoning_gym` at most 20,000: a longer answer is wrong.",
        "",
        f"| | {' | '.join(f'{length:,}' for length in lengths)} | slowest text |",
        "|---|" + "---|" * (len(lengths) + 1),
    ]
    for name, row in times.items():
        cells = [f"{row[length][0]:.3f}" if length in row else "" for length in lengths]
        lines.append(f"| {name} | {' | '.join(cells)} | {max(row.values())[1].replace('|', chr(92) + '|')} |")
    return "\n".join([*lines, "", "![Seconds by length](images/reward_time.png)"]) + "\n"


def draw(times: Times, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    last = max(length for row in times.values() for length in row)
    slowest = sorted(times, key=lambda name: -times[name].get(last, (float("inf"), ""))[0])
    for place, name in enumerate(slowest):
        points = [max(value, 1e-5) for value, _ in times[name].values()]
        shown = {"label": name} if place < 8 else {"color": "0.75", "zorder": 0}
        axes.plot([*times[name]], points, "o-", **shown)
    lengths = [*times[slowest[0]]]
    axes.plot(lengths, [2e-6 * length for length in lengths], "k--", label="linear: 2 s for a million")
    axes.set(xscale="log", yscale="log", xlabel="characters", ylabel="CPU seconds, slowest text")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=at_least(1), nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--limit", type=float, default=20.0)
    parser.add_argument("--output", type=output_file)
    options = parser.parse_args()
    load()
    times = measure(options.lengths, options.limit)
    text = page(times, options.lengths)
    print(text)
    if options.output:
        write_output(options.output, text)
        draw(times, options.output.parent / "images" / "reward_time.png")


if __name__ == "__main__":
    main()
