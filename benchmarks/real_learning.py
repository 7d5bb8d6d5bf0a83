"""Does a real pretrained model learn on two CPU cores? Runs the recipe `real` once per seed and writes its page.

    python benchmarks/real_learning.py [--seeds 1007 1011 1012] [--records FOLDER] [--output docs/measured/real.md]

Without --seeds: those of the rule in real_claims.toml. A seed takes more than an hour on two quiet cores, and has a
home of its own under --work. A run that was stopped goes on where it was; a finished seed is a file in --records (by
default --work), which counts as long as the recipe's version is the same. `--show` runs nothing and writes the page of
what is there. The page's part "What was tried" is written by people and kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from arguments import output_file, write_output
from claims import Claims
from learning_cells import ROOT, code_commit
from machine import machine
from real_model import fetch_model
from real_page import CURVES, draw, page, tried

sys.path.insert(0, str(ROOT))

from recipe_version import r1_version

from grpo.data.records import read_problems, read_samples
from tasks.evaluation.metrics import problem_scores, with_intervals
from tasks.evaluation.records import SAMPLES
from tasks.store.store import Store
from tasks.store.whole_file import write_whole

RECIPE = "real"
CLAIMS = Path(__file__).with_name("real_claims.toml")
CHECKPOINTS = ("base", "dev1", "dev2", "dev3", "r1")


def run(seed: int, work: Path, overrides: list[str]) -> dict[str, Any]:
    """Runs the recipe in the seed's home, where finished stages are reused. Returns the seed's record.

    Raises:
        SystemExit: the run failed; its last line of stderr was printed.
    """
    home = work / f"seed-{seed}"
    environment = {**os.environ, "R1FLOW_HOME": str(home)}
    command = [sys.executable, "-m", "flows.cli", "run", RECIPE, "--seed", str(seed), "--json"]
    sets = [part for value in overrides for part in ("--set", value)]
    done = subprocess.run([*command, *sets], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise SystemExit(f"seed {seed}: the run failed; the same command goes on from there")
    result = json.loads(done.stdout.splitlines()[-1])
    store = Store(home)
    stages = {stage["name"]: store.find(stage["key"]) for stage in result["stages"]}
    return {
        "seed": seed,
        "commit": code_commit(),
        "machine": machine(),
        "result": {name: result[name] for name in ("stages", "checkpoints")},
        "seconds": {name: made.seconds for name, made in stages.items() if made},
        "reward_models": dict(stages["reward_models"].metrics),
        "families": by_family(stages["problems"].path, stages["evaluate"].path),
        "curves": curves(home),
    }


def by_family(problems: Path, evaluation: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Checkpoint -> family -> pass@1 and pass@k of the held-out problems of that family, with intervals."""
    held_out = {p.id: p for p in read_problems(problems / "held_out.parquet") if p.domain == "reasoning"}
    families = sorted({p.source for p in held_out.values()})
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in CHECKPOINTS:
        samples = [s for s in read_samples(evaluation / SAMPLES / name) if s.problem_id in held_out]
        for family in families:
            of = problem_scores([s for s in samples if held_out[s.problem_id].source == family], held_out)
            metrics = with_intervals({key: of[key] for key in ("pass@1", "pass@k")}, 0.95)
            found.setdefault(name, {})[family.removeprefix("reasoning_gym/")] = metrics
    return found


def curves(home: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Stage -> metric -> step -> value, of the RL stages, from the MLflow record of the home's latest run. A process of
    its own reads it: MLflow keeps to the first home that a process opens, and hands it on to children."""
    command = [sys.executable, __file__, "--curves"]
    environment = {**os.environ, "R1FLOW_HOME": str(home)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def read_curves() -> dict[str, dict[str, dict[int, float]]]:
    """`curves` of the home of this process."""
    from flows import runs

    latest = runs.load("latest")
    found = {}
    for stage in ("reasoning_rl", "alignment_rl"):
        frame = latest.curves(stage)
        found[stage] = {name: frame[name].dropna().to_dict() for name in CURVES if name in frame}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    claims = Claims.read(CLAIMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=claims.seeds.seeds())
    parser.add_argument("--work", type=Path, default=Path("build/real"), help="homes of the seeds")
    parser.add_argument("--records", type=Path, help="results of the seeds, a file each; else --work")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="for a try; not for the page")
    parser.add_argument("--model", type=Path, help="a folder; else that of benchmarks/real_model.py")
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--curves", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.curves:
        print(json.dumps(read_curves()))
        return 0
    if (args.set or args.model) and args.output:
        parser.error("the page is of the recipe and the model as they ship; leave --set, --model or --output out")
    if args.records and args.records.is_file():
        parser.error(f"--records: {args.records} is a file; give a folder")
    work = args.work.absolute()
    folder = (args.records or work).absolute()
    if not args.show:
        for place in (work, folder):
            place.mkdir(parents=True, exist_ok=True)
    mark = {"version": r1_version(RECIPE), "overrides": args.set}
    mark |= {"model": str(args.model.absolute())} if args.model else {}
    records: list[dict[str, Any]] = []
    for seed in args.seeds:
        path = folder / f"seed-{seed}.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        if {name: known[name] for name in ("version", "overrides", "model") if name in known} != mark:
            if args.show:
                continue
            model = (args.model or fetch_model(work)).absolute()
            known = mark | run(seed, work, [f"base.model={model}", *args.set])
            write_whole(path, json.dumps(known, indent=1) + "\n")
        records.append(json.loads(json.dumps(known)))
    if not records:
        parser.error("no seed has been run with this version of the recipe")
    text = page(claims, records, args.seeds, tried(args.output))
    print(text)
    if args.output:
        write_output(args.output, text)
        draw(records, args.output.parent / "images" / "real.png")
    values = [claim.holds(claim.value(record["result"])) for record in records for claim in claims.claims]
    return 0 if all(values) and len(records) == len(args.seeds) else 1


if __name__ == "__main__":
    sys.exit(main())
