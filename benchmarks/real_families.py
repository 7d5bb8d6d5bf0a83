"""What a pretrained model knows of reasoning-gym's families before it is trained: pass@1 and pass@k of each candidate.

    python benchmarks/real_families.py [--only gcd lcm] [--problems 24] [--samples 8] [--output FILE]

The model and its prompt are those of the base checkpoint of the recipe `real`. Families that it solves sometimes, with
pass@k well above pass@1, are those that reinforcement learning can teach it: a group of completions has both rewards.
Every family is a folder under --work, and one that is finished is not sampled again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from arguments import output_file, write_output
from machine import machine
from real_model import fetch_model

from flows.recipe.load import load_recipe
from grpo.config.common import Hardware, Sampling
from grpo.data.records import read_samples
from tasks.evaluation.records import SAMPLES
from tasks.evaluation.sets.run import ModelEvaluation, evaluate_model, read_sets
from tasks.evaluation.sets.settings import EvaluationSet
from tasks.problems.sources import ReasoningGymSource

CANDIDATES: dict[str, dict[str, Any]] = {
    "chain_sum": {"parameters": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}},
    "chain_sum 1 digit": {"parameters": {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}},
    "basic_arithmetic": {"parameters": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}},
    "products": {"parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}},
    "simple_equations": {"parameters": {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 10}},
    "gcd": {"parameters": {"min_value": 2, "max_value": 60}},
    "lcm": {"parameters": {"min_value": 2, "max_value": 15}},
    "fraction_simplification": {"parameters": {"max_value": 20, "max_factor": 9, "styles": ["plain"]}},
    "prime_factorization": {"parameters": {"min_value": 4, "max_value": 60}},
    "count_primes": {"parameters": {"max_n": 40}},
    "count_bits": {"parameters": {"max_n": 63}},
    "leg_counting": {"parameters": {"min_animals": 1, "max_animals": 2, "max_instances": 3}},
    "simple_geometry": {"parameters": {"min_sides": 3, "max_sides": 3}},
    "number_sequence": {"parameters": {"max_complexity": 1, "min_value": 0, "max_value": 20}},
    "time_intervals": {"parameters": {"task_types": ["time"]}},
    "letter_counting": {"parameters": {"min_words": 1, "max_words": 3}},
    "spell_backward": {"parameters": {"min_word_len": 3, "max_word_len": 5}},
    "word_sequence_reversal": {
        "parameters": {"min_words": 3, "max_words": 4},
        "prompt": "Reverse this list of words: {question}",
    },
    "word_sorting": {
        "parameters": {"min_words": 3, "max_words": 4, "min_word_length": 3, "max_word_length": 7},
    },
    "number_filtering": {
        "parameters": {"min_numbers": 3, "max_numbers": 5, "max_decimals": 0, "min_value": 0, "max_value": 60}
    },
    "family_relationships": {"parameters": {"min_family_size": 4, "max_family_size": 5}},
    "needle_haystack": {"parameters": {"min_num_statements": 6, "max_num_statements": 8}},
    "palindrome_generation": {"parameters": {"min_length": 3, "max_length": 5}},
    "calendar_arithmetic": {"parameters": {"tasks": ["weekday_offset"]}},
    "aiw": {"parameters": {"task_type_weights": [1.0, 0.0, 0.0]}},
}
"""Name of a row -> settings of its source; the family is the name's first word."""


def candidate(name: str, problems: int) -> EvaluationSet:
    """The row as a test set of `problems` problems."""
    source = ReasoningGymSource(family=name.split()[0], count=2 * problems, **CANDIDATES[name])
    return EvaluationSet(name=name.replace(" ", "-"), source=source, problems=problems)


def measure(name: str, args: argparse.Namespace, model: Path, template: str) -> dict[str, Any]:
    """The row's metrics: those of a test set, and `stated`, the share of completions whose last result is right however
    it is written."""
    sampling = Sampling(temperature=args.temperature, max_new_tokens=args.max_new_tokens, batch_size=128)
    of = ModelEvaluation(
        model=str(model),
        policy="base",
        template="r1_zero",
        zero_template=template,
        sampling=sampling,
        samples_per_problem=args.samples,
        hardware=Hardware(device="cpu", dtype=args.dtype),
    )
    asked = candidate(name, args.problems)
    problems = read_sets([asked], args.seed)
    digest = hashlib.sha256(
        json.dumps([template, sampling.model_dump(), args.samples, args.seed, args.dtype, CANDIDATES[name]]).encode()
    )
    folder = args.work / f"{asked.name}-{args.problems}-{digest.hexdigest()[:8]}"
    table = evaluate_model(of, [asked], problems, folder, lambda metrics: None)[asked.name]
    samples = read_samples(folder / SAMPLES / asked.name)
    return table | {"completion": samples[0].completion, "folder": folder.name}


def row(name: str, of: dict[str, Any]) -> str:
    """A line of the Markdown table; shares in percent."""
    low, high = of["pass@1_ci95"]
    shares = [f"{100 * of['pass@1']:.1f} ({100 * low:.1f}-{100 * high:.1f})", f"{100 * of['pass@k']:.1f}"]
    rest = [f"{100 * of['format']:.1f}", f"{of['mean_tokens']:.0f}", f"{100 * of['cut_off']:.1f}"]
    return f"| {name} | {' | '.join([*shares, *rest])} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*CANDIDATES], choices=[*CANDIDATES], metavar="NAME")
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("build/real_families"))
    parser.add_argument("--model", type=Path, help="a folder; else that of benchmarks/real_model.py")
    parser.add_argument("--output", type=output_file)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    model = (args.model or fetch_model(args.work)).absolute()
    template = load_recipe("real").base.zero_template
    lines = [
        f"{args.problems} problems a family, {args.samples} samples each at temperature {args.temperature:g}, on",
        f"{machine()}.",
        "",
        f"| family | pass@1, 95% interval | pass@{args.samples} | format | tokens | cut off |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in args.only:
        of = measure(name, args, model, template)
        lines.append(row(name, of))
        print(lines[-1], flush=True)
        print(repr(of["completion"]), file=sys.stderr, flush=True)
    if args.output:
        write_output(args.output, "\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
