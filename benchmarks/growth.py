"""How do time and memory of training grow? One axis at a time, the rest fixed; each point is a process of its own.

    python benchmarks/growth.py [--axis NAME]... [--output docs/measured/growth.md] [--json]

Axes: length of the completions, group size, model size, number of samples, number of processes. Completions never end
by themselves, so that an axis is exact. A GRPO step is taken apart into sampling, measuring (the reference's
log-probabilities) and update; a first step of short completions warms up. With --output a picture of each axis is
written beside it, in images/.

One claim is checked, and the exit code is 1 where it does not hold: where completions get twice as long and a
micro-batch holds as many tokens as before, peak memory grows by less than 1.3 times. With --json the last line is an
object: "memory_growth" of each doubling, "holds", and all points.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from inputs import demo_model, long_prompts, smollm2, without_end
from machine import machine
from measure import run
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from grpo.data.records import Problem, write_rows
from grpo.model.loading import load_tokenizer, save_tokenizer

HERE = Path(__file__).parent
MAX_GROWTH = 1.3
WARM_UP_TOKENS = 16
PARTS = ("sampling", "measuring", "update")
Found = dict[str, Any]

SHAPES = {  # layers, width, feed-forward, heads; the demo's vocabulary
    "2.3M": (5, 192, 528, 3),
    "10M": (8, 320, 880, 5),
    "39M": (12, 512, 1408, 8),
}
MODELS = ("demo", *SHAPES, "135M")


@dataclass(frozen=True)
class Step:
    """A GRPO step: completions of forced length, a penalty to a reference."""

    model: str
    prompts: int
    prompt_tokens: int
    group_size: int
    max_new_tokens: int
    micro_batch_tokens: int
    processes: int = 1
    threads: int | None = None  # of each process; None: the machine's
    steps: int = 2  # timed ones
    more: Found = field(default_factory=dict)  # settings

    @property
    def parts(self) -> list[str]:
        return [part for part in PARTS if part != "measuring" or self.more.get("kl_coef") != 0]

    def job(self, model: Path, folder: Path) -> Found:
        messages = long_prompts(self.prompts, self.prompt_tokens, load_tokenizer(str(model)), folder)
        problems = [Problem(str(i), m, "", "none", "reasoning", "en", "benchmark") for i, m in enumerate(messages)]
        write_rows(folder / "problems.parquet", problems, Problem)
        return {"kind": "rl", "settings": self.settings, "model": str(model), "problems": [folder / "problems.parquet"]}

    @property
    def settings(self) -> Found:
        rows = self.prompts * self.group_size
        return {
            "steps": 1 + self.steps,
            "prompts_per_step": self.prompts,
            "group_size": self.group_size,
            "sampling": {"max_new_tokens": min(WARM_UP_TOKENS, self.max_new_tokens), "batch_size": rows},
            "max_new_tokens_from": {1: self.max_new_tokens},
            "rewards": {"grpo_step:reward": 1},
            "scoring": {"workers": 1},
            "micro_batch_tokens": self.micro_batch_tokens,
            "optimizer": {"learning_rate": 1e-6},
            "save_every": 10**6,
            **self.more,
        }

    def result(self, found: list[Found], folder: Path) -> Found:
        """Seconds and MB of the parts, of the slowest process and of the largest."""
        for part in self.parts:
            assert all(len(of["seconds"].get(part, ())) == 1 + self.steps for of in found), (part, found)
        seconds = {
            p: statistics.mean(max(of["seconds"][p][i + 1] for of in found) for i in range(self.steps))
            for p in self.parts
        }
        records = [json.loads(line) for line in (folder / "metrics").read_text().splitlines()][1:]
        assert all(r["completion_tokens"] == self.max_new_tokens for r in records), "a completion ended by itself"
        step_s = statistics.mean(r["sampling_s"] + r["update_s"] for r in records)
        tokens = self.prompts * self.group_size * self.max_new_tokens
        held = {p: max(max(of["peak_mb"][p][1:]) - of["idle_mb"] for of in found) for p in self.parts}
        return {"seconds": step_s, "parts": seconds, "tokens_per_s": tokens / step_s, "held_mb": held}


@dataclass(frozen=True)
class Samples:
    """A sampling job: 4 completions a problem, scored."""

    model: str
    rows: int
    max_new_tokens: int = 32
    prompt_tokens: int = 32
    processes: int = 1
    threads: int | None = None

    def job(self, model: Path, folder: Path) -> Found:
        messages = long_prompts(64, self.prompt_tokens, load_tokenizer(str(model)), folder)
        problems = [
            Problem(str(i), messages[i % 64], "", "none", "reasoning", "en", "benchmark") for i in range(self.rows // 4)
        ]
        write_rows(folder / "problems.parquet", problems, Problem)
        task = {
            "name": "task",
            "model": str(model),
            "policy": "growth",
            "problems": [folder / "problems.parquet"],
            "samples_per_problem": 4,
            "sampling": {"max_new_tokens": self.max_new_tokens, "batch_size": 256},
            "rewards": ["format"],
        }
        return {"kind": "sample", "tasks": [task], "shard_size": 64, "scoring": {"workers": 1}}

    def result(self, found: list[Found], folder: Path) -> Found:
        return _of_job(found, self.rows * self.max_new_tokens)


@dataclass(frozen=True)
class Demonstrations:
    """Supervised fine-tuning, one epoch."""

    model: str
    rows: int
    max_new_tokens: int = 32  # of a response, about
    prompt_tokens: int = 32
    processes: int = 1
    threads: int | None = None

    def job(self, model: Path, folder: Path) -> Found:
        import pyarrow as pa
        import pyarrow.parquet as pq

        messages = long_prompts(64, self.prompt_tokens, load_tokenizer(str(model)), folder)
        responses = long_prompts(64, self.max_new_tokens, load_tokenizer(str(model)), folder)
        rows = [{"messages": messages[i % 64], "completion": responses[i % 64][0]["content"]} for i in range(self.rows)]
        pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
        settings = {"epochs": 1, "batch_size": 64, "micro_batch_tokens": 2048, "optimizer": {"learning_rate": 1e-6}}
        return {"kind": "sft", "settings": settings, "model": str(model), "data": folder / "data.parquet"}

    def result(self, found: list[Found], folder: Path) -> Found:
        return _of_job(found, self.rows * (self.prompt_tokens + self.max_new_tokens))


def _of_job(found: list[Found], tokens: int) -> Found:
    seconds = max(of["job_s"] for of in found)
    held = {"job": max(of["last_mb"] - of["idle_mb"] for of in found)}
    return {"seconds": seconds, "parts": {"job": seconds}, "tokens_per_s": tokens / seconds, "held_mb": held}


Point = Step | Samples | Demonstrations


@dataclass(frozen=True)
class Axis:
    title: str
    unit: str  # of the axis
    fixed: str
    series: dict[str, dict[float, Point]]  # name: value on the axis: what is run


# Groups, whole or in parts, fill these micro-batches to 93% or more at every length of the first axis.
DEMO_STEP = Step("demo", prompts=8, prompt_tokens=32, group_size=8, max_new_tokens=32, micro_batch_tokens=2176, steps=3)
REAL_STEP = Step("135M", prompts=2, prompt_tokens=64, group_size=8, max_new_tokens=64, micro_batch_tokens=576)
OF_ANY_SIZE = replace(DEMO_STEP, prompts=2, micro_batch_tokens=512, steps=2)


def _along(step: Step, name: str, values: tuple[int, ...], **fixed: Any) -> dict[float, Point]:
    return {value: replace(step, **fixed, **{name: value}) for value in values}


AXES = {
    "length": Axis(
        "Length of the completions",
        "tokens of a completion",
        "demo: 8 prompts of 32 tokens x 8, micro-batches of 2,176 tokens; 135M: 2 prompts of 64 tokens x 8, "
        "micro-batches of 576. There are two or more at every length, full to 93% at least.",
        {
            "demo": _along(DEMO_STEP, "max_new_tokens", (32, 64, 128, 256)),
            "135M": _along(REAL_STEP, "max_new_tokens", (64, 128, 256), steps=1),
        },
    ),
    "group": Axis(
        "Group size",
        "completions of a prompt",
        "demo: 4 prompts of 128 tokens, completions of 32, micro-batches of 2,176; 135M: 1 prompt of 128 tokens, "
        "completions of 32, micro-batches of 576. A group's prompt is computed once.",
        {
            "demo": _along(DEMO_STEP, "group_size", (4, 8, 16, 32, 64), prompts=4, prompt_tokens=128),
            "135M": _along(REAL_STEP, "group_size", (4, 8, 16, 32), prompts=1, prompt_tokens=128, max_new_tokens=32),
        },
    ),
    "model": Axis(
        "Model size",
        "million parameters",
        "2 prompts of 32 tokens x 8 completions of 32, micro-batches of 512 tokens. Random weights and the demo's "
        "vocabulary of about 384, but for 135M: SmolLM2 with its 49,152.",
        {"GRPO": {number: replace(OF_ANY_SIZE, model=name) for number, name in enumerate(MODELS)}},  # values: see main
    ),
    "samples": Axis(
        "Number of samples",
        "samples",
        "The demo's model. Sampling: 4 completions of 32 tokens for each problem, 256 side by side, 256 a shard. SFT: "
        "an epoch, batches of 64 sequences of about 64 tokens. Seconds are the whole job's.",
        {
            "sampling": {rows: Samples("demo", rows) for rows in (512, 2048, 8192)},
            "SFT": {rows: Demonstrations("demo", rows) for rows in (512, 2048, 8192)},
        },
    ),
    "processes": Axis(
        "Number of processes",
        "processes",
        "FSDP2 over gloo on one machine, one thread each; the global batch stays as it is. demo: as for the length, 64 "
        "tokens; 135M: 2 prompts of 64 tokens x 8 completions of 32. Memory by phase is that of the larger process.",
        {
            "demo": _along(DEMO_STEP, "processes", (1, 2), threads=1, max_new_tokens=64),
            "135M": _along(REAL_STEP, "processes", (1, 2), threads=1, max_new_tokens=32, steps=1),
        },
    ),
}


class Models:
    """Folders of models, made when they are first asked for; those that sample never end a completion."""

    def __init__(self, build: Path, work: Path):
        self.build, self.work = build, work
        self.made: dict[str, Path] = {}

    def __call__(self, name: str, *, endless: bool = True) -> Path:
        if name not in self.made:
            makers: dict[str, Callable[[], Path]] = {
                "demo": lambda: demo_model(self.work),
                "135M": lambda: smollm2(self.build),
            }
            self.made[name] = makers.get(name, lambda: self._random(name))()
            without_end(self.made[name], self.work / f"endless-{name}")
        return self.work / f"endless-{name}" if endless else self.made[name]

    def _random(self, name: str) -> Path:
        layers, width, feed_forward, heads = SHAPES[name]
        demo = self("demo", endless=False)
        like = AutoConfig.from_pretrained(demo)
        shape = {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": width // heads,
        }
        torch.manual_seed(0)
        folder = self.work / name
        LlamaForCausalLM(LlamaConfig(**{**like.to_dict(), **shape})).save_pretrained(folder)
        save_tokenizer(load_tokenizer(str(demo)), str(demo), folder)
        return folder

    def millions(self, name: str) -> float:
        config = AutoConfig.from_pretrained(self(name))
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        return sum(p.numel() for p in model.parameters()) / 1e6


def measure(point: Point, model: Path, folder: Path, threads: int, **environment: str) -> Found:
    """Seconds and memory of one point, in processes of its own, with more in their environment."""
    folder.mkdir(parents=True)
    files = {name: folder / name for name in ("out", "state", "metrics", "result")}
    job_file = folder / "job.json"
    job_file.write_text(json.dumps({**point.job(model, folder), **files, "seed": 0}, default=str))
    command = [sys.executable]
    if point.processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(point.processes)]
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE), str(HERE.parent)]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(point.threads or threads)}
    found = run([*command, str(HERE / "growth_step.py"), str(job_file)], folder / "log", environment)
    ranks = [json.loads((folder / f"phases-{rank}.json").read_text()) for rank in range(point.processes)]
    return point.result(ranks, folder) | {"peak_mb": found["peak_mb"], "of": asdict(point)}


def measure_axis(name: str, models: Models, given: argparse.Namespace) -> dict[str, dict[float, Found]]:
    found: dict[str, dict[float, Found]] = {}
    for series, points in AXES[name].series.items():
        found[series] = {}
        for value, point in points.items():
            folder = models.work / f"{name}-{series}-{value}"
            model = models(point.model, endless=not isinstance(point, Demonstrations))
            result = measure(point, model, folder, given.threads)
            if name == "model":
                value = round(models.millions(point.model), 1)
            found[series][value] = result
            say(f"{name}: {series}, {value:,} {AXES[name].unit}: {describe(result)}")
    return found


def describe(result: Found) -> str:
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in result["parts"].items())
    return f"{result['seconds']:.2f} s ({parts}), {result['peak_mb']:,.0f} MB"


def doublings(found: dict[str, dict[float, Found]], of: Callable[[Found], float]) -> dict[str, list[float]]:
    """By how much `of` grows from each point of a series to the next."""
    return {series: [of(b) / of(a) for a, b in itertools.pairwise(points.values())] for series, points in found.items()}


def held(result: Found) -> float:
    return max(result["held_mb"].values())


def markdown(found: dict[str, dict[str, dict[float, Found]]], given: argparse.Namespace, minutes: float) -> str:
    chosen = "".join(f" --axis {name}" for name in given.axis or ()) + options(given)
    intro = f"""
    `python benchmarks/growth.py{chosen}` on {machine()}, float32, AdamW, {given.threads} thread(s) where nothing
    else is said; {minutes:.0f} minutes. Every point is a process of its own. Completions cannot end by themselves, so
    each has exactly the length that is named. Seconds are means over the timed steps, after one of short completions to
    warm up. A step is sampling, measuring (the reference's log-probabilities) and update, and what is done between
    them. Peak: the process with its children (one of them scores), libraries included. Held: the most that the trainer
    held in a phase beyond what it held before it loaded a model.
    """
    lines = ["# How time and memory grow", "", *prose(intro)]
    if "length" in found:
        lines += prose(claim(found["length"]))
    for name, series in found.items():
        lines += _section(AXES[name], series, f"images/growth-{name}.png" if given.output else None)
    return "\n".join(lines)


def options(given: argparse.Namespace) -> str:
    """Of the command, as it was given."""
    threads = f" --threads {given.threads}" if given.threads != os.cpu_count() else ""
    return threads + (f" --output {given.output}" if given.output else "")


def claim(of_length: dict[str, dict[float, Found]]) -> str:
    grown, beyond = doublings(of_length, lambda r: r["peak_mb"]), doublings(of_length, held)
    verdict = "holds" if max(itertools.chain(*grown.values())) < MAX_GROWTH else "DOES NOT HOLD"
    said = "; ".join(
        f"{series} {', '.join(f'{g:.2f}' for g in of)} (held: {', '.join(f'{g:.2f}' for g in beyond[series])})"
        for series, of in grown.items()
    )
    return f"""
    **Peak memory grows by less than {MAX_GROWTH} times when completions get twice as long, with as many tokens a
    micro-batch: {verdict}.** Growth at each doubling: {said}.
    """


def prose(text: str, mark: str = "") -> list[str]:
    """A paragraph in lines of up to 120 characters, or an item of a list; a blank line after a paragraph."""
    lines = textwrap.wrap(
        " ".join(text.split()),
        120,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines if mark else [*lines, ""]


def _section(axis: Axis, series: dict[str, dict[float, Found]], picture: str | None) -> list[str]:
    parts = list(next(iter(next(iter(series.values())).values()))["parts"])
    heads = [axis.unit, "seconds", *(f"{part}, s" for part in parts if part != "job"), "tokens/s", "peak, MB"]
    heads += [f"held, {part}, MB" for part in parts]
    lines = [f"## {axis.title}", "", *prose(axis.fixed)]
    lines += [f"![{axis.title}: seconds and memory]({picture})", ""] if picture else []
    lines += [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, points in series.items():
        for value, result in points.items():
            cells = [name, f"{value:,}", f"{result['seconds']:.2f}"]
            cells += [f"{s:.2f}" for part, s in result["parts"].items() if part != "job"]
            cells += [f"{result['tokens_per_s']:,.0f}", f"{result['peak_mb']:,.0f}"]
            cells += [f"{mb:,.0f}" for mb in result["held_mb"].values()]
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for name, points in series.items():
        lines += prose(_growth(name, axis, points), "- ")
    return [*lines, ""]


def _growth(name: str, axis: Axis, points: dict[float, Found]) -> str:
    (first, start), (last, end) = next(iter(points.items())), list(points.items())[-1]
    times = {p: end["parts"][p] / start["parts"][p] for p in start["parts"] if p != "job"}
    of_parts = f" ({', '.join(f'{part} {grown:.1f}' for part, grown in times.items())})" if times else ""
    return f"""
    {name}, {last / first:.0f} times the {axis.unit.removeprefix("million ")}:
    {end["seconds"] / start["seconds"]:.1f} times the seconds{of_parts}, {end["peak_mb"] / start["peak_mb"]:.2f} times
    the peak, {held(end) / held(start):.2f} times the held memory.
    """


def draw(axis: Axis, series: dict[str, dict[float, Found]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, panels = pyplot.subplots(2, len(series), figsize=(4.5 * len(series), 6.5), squeeze=False, sharex="col")
    for (name, points), (time_panel, memory_panel) in zip(series.items(), panels.T, strict=True):
        values = list(points)
        for part in next(iter(points.values()))["parts"]:
            label = "whole job" if part == "job" else part
            time_panel.plot(values, [r["parts"][part] for r in points.values()], "o-", label=label)
            memory_panel.plot(values, [r["held_mb"][part] for r in points.values()], "o-", label=f"held, {label}")
        memory_panel.plot(values, [r["peak_mb"] for r in points.values()], "k.--", label="peak of the processes")
        time_panel.set(title=name, ylabel="seconds", xscale="log", yscale="log")
        time_panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        time_panel.yaxis.set_major_formatter("{x:g}")
        time_panel.yaxis.set_minor_formatter(NullFormatter())
        memory_panel.set(xlabel=axis.unit, ylabel="MB", ylim=(0, None), xscale="log")
        memory_panel.set_xticks(values, [f"{value:,}" for value in values], minor=False)
        memory_panel.minorticks_off()
        for panel in (time_panel, memory_panel):
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
    figure.suptitle(axis.title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", action="append", choices=AXES, help="may be repeated; all by default")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    began = time.monotonic()
    found: dict[str, dict[str, dict[float, Found]]] = {}
    given.build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="growth-", dir=given.build.resolve()) as work:
        models = Models(given.build, Path(work))
        for name in given.axis or AXES:
            found[name] = measure_axis(name, models, given)
    text = markdown(found, given, (time.monotonic() - began) / 60)
    if given.output:
        for name, series in found.items():
            draw(AXES[name], series, given.output.parent / "images" / f"growth-{name}.png")
        given.output.write_text(text)
    print(text)
    grown = doublings(found.get("length", {}), lambda r: r["peak_mb"])
    holds = all(g < MAX_GROWTH for g in itertools.chain(*grown.values()))
    if given.json:
        checked = {"memory_growth": grown, "holds": holds} if grown else {}
        print(json.dumps(checked | {"axes": found, "machine": machine()}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
