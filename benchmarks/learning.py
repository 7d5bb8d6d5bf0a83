"""Does the recipe learn? Runs `tiny` for several seeds and prints the checkpoints and what must hold between them.

python benchmarks/learning.py [--seeds 0 1 2] [--json] [--output docs/learning.md]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import machine

ORDER = ("base", "dev1", "dev2", "dev3", "r1")


def run(seed: int, recipe: str) -> dict[str, Any]:
    began = time.monotonic()
    command = [sys.executable, "-m", "flows.cli", "run", recipe, "--seed", str(seed), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {**json.loads(done.stdout.splitlines()[-1]), "seed": seed, "wall_s": time.monotonic() - began}


def claims(table: dict[str, dict[str, Any]]) -> dict[str, tuple[float, bool]]:
    """What must hold: claim -> (the number, whether it holds). Points are percentage points of pass@1."""

    def points(better: str, worse: str) -> float:
        return 100 * (table[better]["pass@1"] - table[worse]["pass@1"])

    gap = table["r1"]["alignment_ci95"][0] - table["dev3"]["alignment_ci95"][1]
    return {
        "base formats under 20%": (100 * table["base"]["format"], table["base"]["format"] < 0.2),
        "dev1 formats at least 90%": (100 * table["dev1"]["format"], table["dev1"]["format"] >= 0.9),
        "dev2 over dev1, at least 15 points": (points("dev2", "dev1"), points("dev2", "dev1") >= 15),
        "dev3 over dev1, at least 10 points": (points("dev3", "dev1"), points("dev3", "dev1") >= 10),
        "r1 under dev2, at most 5 points": (points("dev2", "r1"), points("dev2", "r1") <= 5),
        "r1's alignment over dev3's, intervals apart": (gap, gap > 0),
    }


def markdown(runs: list[dict[str, Any]]) -> str:
    lines = [
        "# Does it learn?",
        "",
        f"`python benchmarks/learning.py --seeds {' '.join(str(r['seed']) for r in runs)}` on {machine()}.",
        "pass@1 is the mean of 4 samples at temperature 0.6 on 256 held-out problems, with a 95% bootstrap interval",
        "over problems; alignment is the mean score of both reward models on held-out general prompts; the win rate",
        "over dev3 is the rule judge's, which the reward models only imitate.",
        "",
        "| seed | checkpoint | pass@1 | interval | cons@k | format | language | tokens | alignment | interval | wins |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in runs:
        for name in ORDER:
            m = result["checkpoints"][name]
            low, high = m["pass@1_ci95"]
            a_low, a_high = m["alignment_ci95"]
            lines.append(
                f"| {result['seed']} | {name} | {m['pass@1']:.1%} | {low:.1%}-{high:.1%} | {m['cons@k']:.1%} | "
                f"{m['format']:.1%} | {m['language']:.1%} | {m['mean_tokens']:.0f} | {m['alignment']:.2f} | "
                f"{a_low:.2f}-{a_high:.2f} | {m['win_rate_dev3']:.1%} |"
            )
    lines += ["", "| claim | " + " | ".join(f"seed {r['seed']}" for r in runs) + " |", "|---" * (len(runs) + 1) + "|"]
    checked = [claims(result["checkpoints"]) for result in runs]
    for claim in checked[0]:
        cells = [f"{c[claim][0]:.1f} {'holds' if c[claim][1] else 'FAILS'}" for c in checked]
        lines.append(f"| {claim} | " + " | ".join(cells) + " |")
    times = [f"seed {r['seed']}: {r['wall_s']:.0f} s" for r in runs]
    lines += ["", "Wall time of each run, everything included: " + ", ".join(times) + ".", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    runs = [run(seed, given.recipe) for seed in given.seeds]
    text = markdown(runs)
    if given.output:
        given.output.write_text(text)
    print(text)
    holds = all(ok for result in runs for _, ok in claims(result["checkpoints"]).values())
    if given.json:
        print(json.dumps({"seeds": given.seeds, "holds": holds, "wall_s": [r["wall_s"] for r in runs]}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
