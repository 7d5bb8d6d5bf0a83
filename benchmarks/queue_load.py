"""Many recipe runs queued at once on an installation with Postgres: is each done once and recorded once, and how fast?

    python -m benchmarks.queue_load [--runs 200] [--write docs/measured/load.md]

`r1 up --postgres` as users start it, in a home of its own. The runs are queued through Prefect's API as its form does:
the stage `problems` of `tiny`, made smaller, each with a seed of its own. When none is left, Prefect, MLflow and the
store are compared with what was queued, and `r1 verify` looks too. Ends with 1 where something is lost, double or
unfinished.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from benchmarks.arguments import at_least, output_file
from benchmarks.extras import need
from benchmarks.load_page import write_section
from benchmarks.machine import measured_by
from tests.support.installation import Installation, postgres_installation

SERVERS = ("prefect", "mlflow", "postgres")
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
LOOK_S = 30.0
"""Seconds between two looks, which are work for the servers, too."""
PAGE = 200
"""Most flow runs that Prefect lists in one answer."""


@dataclass
class Watch:
    """What is seen every LOOK_S seconds: states of the queued runs, memory of the servers, latencies of both APIs."""

    r1flow: Installation
    ids: list[str]
    began: float = field(default_factory=time.monotonic)
    rows: list[dict[str, Any]] = field(default_factory=list)
    latencies: dict[str, list[float]] = field(default_factory=dict)

    def look(self) -> bool:
        """Adds a row. Returns whether all queued runs have ended."""
        states = Counter(run["state"]["type"] for run in flow_runs(self.r1flow, self.ids))
        self._time("Prefect: one run", lambda: self.r1flow.run(self.ids[0]))
        self._time("Prefect: the runs page", lambda: self.r1flow.ask("POST", "/flow_runs/filter", limit=50))
        self._time("MLflow: 50 runs", lambda: recipe_runs(self.r1flow, 50))
        done = sum(states[state] for state in ENDED)
        self.rows.append(
            {
                "minutes": (time.monotonic() - self.began) / 60,
                "waiting": len(self.ids) - done - states["RUNNING"] - states["PENDING"],
                "under_way": states["RUNNING"] + states["PENDING"],
                "ended": done,
                **{f"{name}_mb": memory_mb(self.r1flow.pid(name)) for name in SERVERS},
            }
        )
        print(json.dumps(self.rows[-1]), flush=True)
        return done == len(self.ids)

    def _time(self, what: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        self.latencies.setdefault(what, []).append(time.perf_counter() - began)


def flow_runs(r1flow: Installation, ids: list[str]) -> list[dict[str, Any]]:
    """The flow runs with these ids."""
    found: list[dict[str, Any]] = []
    for start in range(0, len(ids), PAGE):
        found += r1flow.runs(id={"any_": ids[start : start + PAGE]})
    return found


def recipe_runs(r1flow: Installation, limit: int = 10_000) -> list[dict[str, Any]]:
    """MLflow's runs of the recipe: id, status and tags."""
    url = f"http://127.0.0.1:{r1flow.mlflow_port}/api/2.0/mlflow"
    experiment = httpx.get(f"{url}/experiments/get-by-name", params={"experiment_name": "tiny"}, timeout=600)
    if experiment.status_code == 404:  # none has begun
        return []
    ids, runs, token = [experiment.raise_for_status().json()["experiment"]["experiment_id"]], [], None
    while limit > len(runs):
        body = {"experiment_ids": ids, "max_results": min(1000, limit), **({"page_token": token} if token else {})}
        answer = httpx.post(f"{url}/runs/search", json=body, timeout=600).raise_for_status().json()
        runs += answer.get("runs", [])
        if not (token := answer.get("next_page_token")):
            break
    return [
        {"id": run["info"]["run_id"], "status": run["info"]["status"]}
        | {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}
        for run in runs
    ]


def memory_mb(pid: int) -> float:
    """Private memory of a process and its descendants. Pages that they share count once for each in RSS: not here."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            total += process.memory_full_info().uss
        except psutil.Error:  # it has ended
            continue
    return total / 1e6


def flaws(r1flow: Installation, ids: list[str], seeds: dict[str, int]) -> list[str]:
    """What is lost, double or unfinished, one line each. `seeds`: of each queued run."""
    found = []
    for run in flow_runs(r1flow, ids):
        if run["state"]["type"] != "COMPLETED":
            found.append(f"Prefect: run {run['id']} is {run['state']['name']}: {run['state']['message']}"[:400])
    records = recipe_runs(r1flow)
    parents = Counter(record["r1flow.flow_run"] for record in records if "r1flow.flow_run" in record)
    found += [f"MLflow: {parents[id]} runs of flow run {id}" for id in ids if parents[id] != 1]
    stages = Counter(record["mlflow.parentRunId"] for record in records if "mlflow.parentRunId" in record)
    names = {record["id"]: record.get("r1flow.flow_run", "") for record in records}
    found += [f"MLflow: {count} stage runs below that of {names[id]}" for id, count in stages.items() if count != 1]
    found += [f"MLflow: {len(stages)} runs have a stage, of {len(ids)}"] if len(stages) != len(ids) else []
    wrong = [record for record in records if record["status"] != "FINISHED"]
    found += [f"MLflow: run {r['id']} is {r['status']}: {r.get('r1flow.error', '')}" for r in wrong]
    manifests = [json.loads(path.read_text()) for path in r1flow.home.glob("artifacts/problems/*/*/manifest.json")]
    made = Counter(int(manifest["config"]["seed"]) for manifest in manifests)
    found += [f"store: {made[seed]} artifacts of seed {seed}" for seed in seeds.values() if made[seed] != 1]
    found += [f"store: {path.name} is left in work/" for path in r1flow.home.glob("work/*")]
    live = [run for run in r1flow.runs(state={"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}})]
    found += [f"Prefect: {run['name']} is still {run['state']['name']}" for run in live]
    verified = r1flow("verify")
    if verified.returncode:
        found += [f"r1 verify: {line}" for line in (verified.stdout + verified.stderr).splitlines()[-20:]]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=at_least(1), default=200)
    parser.add_argument("--write", type=output_file, metavar="FILE", help="write the section into this page")
    args = parser.parse_args()
    need("psycopg")
    with postgres_installation() as r1flow:
        began = time.monotonic()
        r1flow.up()
        print(f"up after {time.monotonic() - began:.0f} s", flush=True)
        try:
            began = time.monotonic()
            seeds = {r1flow.start(seed=seed, only="problems"): seed for seed in range(args.runs)}
            queued_s = time.monotonic() - began
            watch = Watch(r1flow, list(seeds))
            while not watch.look():
                time.sleep(LOOK_S)
            found = flaws(r1flow, list(seeds), seeds)
            warned = warnings(r1flow)
        finally:
            r1flow.down()
    print("\n".join(found) or "nothing is lost, double or unfinished", flush=True)
    print(json.dumps(warned, indent=1), flush=True)
    text = page(args.runs, queued_s, watch, found)
    print(text)
    if args.write:
        write_section(args.write, text)
    return 1 if found else 0


def warnings(r1flow: Installation) -> dict[str, int]:
    """Lines of the logs that speak of trouble, without their times, and how often each came."""
    signs = ("error", "fails", "timed out", "timeout", "refused", "traceback", "crashed", "exception")
    lines: Counter[str] = Counter()
    for path in r1flow.home.glob("logs/*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if any(sign in line.lower() for sign in signs):
                lines[f"{path.stem}: {line.partition('|')[2].strip() or line}"[:200]] += 1
    return dict(lines.most_common(30))


def page(runs: int, queued_s: float, watch: Watch, found: list[str]) -> str:
    """The figures as a section of a page."""
    rows = watch.rows
    shown = [rows[round(i * (len(rows) - 1) / 11)] for i in range(12)] if len(rows) > 12 else rows
    minutes = rows[-1]["minutes"]
    lines = [
        f"## {runs} recipe runs in the queue",
        "",
        measured_by(f"python -m benchmarks.queue_load --runs {runs}"),
        "",
        "`r1 up --postgres`: one server each of Prefect, MLflow and Postgres, 16 recipes and 2 stages at once. Each",
        "run is a recipe and its stage `problems`, two processes.",
        "",
        f"Queued in {queued_s:.0f} s ({queued_s / runs * 1000:.0f} ms a run). All had ended after {minutes:.1f}",
        f"minutes: {runs / minutes:.1f} runs a minute. Lost, double or unfinished: {len(found)}. Looked at: each run",
        "Completed in Prefect, one FINISHED run of its recipe and one of its stage in MLflow, one artifact, nothing",
        "RUNNING, `r1 verify` clean.",
        "",
        "Memory of the servers, in MB, is what their processes do not share with others.",
        "",
        "| minutes | waiting | under way | ended | " + " | ".join(SERVERS) + " |",
        "|--:" * (4 + len(SERVERS)) + "|",
    ]
    for row in shown:
        counts = [f"{row[name]}" for name in ("waiting", "under_way", "ended")]
        memory = [f"{row[f'{name}_mb']:.0f}" for name in SERVERS]
        lines.append("| " + " | ".join([f"{row['minutes']:.1f}", *counts, *memory]) + " |")
    lines += ["", "| asked meanwhile | median | 95% | longest |", "|---|--:|--:|--:|"]
    for what, seconds in watch.latencies.items():
        ordered = sorted(seconds)
        high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        lines.append(f"| {what} | {statistics.median(ordered):.2f} s | {high:.2f} s | {ordered[-1]:.2f} s |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
