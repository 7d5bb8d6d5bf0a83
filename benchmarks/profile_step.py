"""Where the seconds of a GRPO step go, by kind of operation: torch's profiler over one step of our trainer.

    python benchmarks/profile_step.py [--setting small] [--setting demo] [--output docs/measured/profile.md] [--json]

The settings are those of benchmarks/grpo_vs_trl.py. The step is the second of a run; the update is told from what
comes before it (sampling, rewards, the reference's pass). Seconds are what operations took by themselves; the rest of
the wall time is Python, and waiting. Loops of `grpo.model.cpu.kernels` are counted as operations.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arguments import at_least, output_file, write_output

KINDS = {
    "matrix products": ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_mkl_linear"),
    "attention": ("_scaled_dot_product", "decode_attention"),
    "moving and copying": (
        *("index", "index_select", "index_add_", "index_fill_", "index_put_", "_index_put_impl_", "cat", "copy_"),
        *("gather", "scatter_add_", "embedding", "constant_pad_nd", "fill_", "zero_", "_mkl_reorder_linear_weight"),
        "sum_rows",
    ),
    "optimizer": ("_fused_adamw_", "_foreach_norm", "_foreach_mul_"),
    "softmax and sums over the vocabulary": (
        *("exp_", "amax", "sub_", "cumsum", "topk", "sort", "searchsorted", "log", "sample_tokens"),
    ),
}
LOOPS = (
    *("decode_attention", "sum_rows", "sample_tokens"),
    # These count as the rest.
    *("rms_norm", "rms_norm_backward", "add_rms_norm", "rotary", "swiglu", "swiglu_fused", "swiglu_backward"),
)
"""Functions of `grpo.model.cpu.kernels` that the profiler shall show."""
SETTINGS = ("small", "long", "demo")
REST = "norms, gates, additions"
BEFORE, UPDATE = "before the update", "update"


@dataclass
class Profile:
    """Of a part of the step: its wall time, and seconds by kind of operation."""

    wall: float
    kinds: Counter[str]


def kind_of(operation: str) -> str:
    name = operation.rpartition("::")[2]
    found = (kind for kind, names in KINDS.items() if any(name == n or name.startswith(n + "_") for n in names))
    return next(found, REST)


def profiled(function: Any) -> tuple[Any, Profile]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        began = time.perf_counter()
        result = function()
        wall = time.perf_counter() - began
    kinds: Counter[str] = Counter()
    for event in seen.key_averages():
        if "::" in event.key:
            kinds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    return result, Profile(wall, kinds)


def profile_step(name: str, build: Path, work: Path) -> dict[str, Profile]:
    """The second step of the setting, its update apart."""
    from grpo_step import ours
    from grpo_vs_trl import make_case

    import grpo.rl.trainer
    import grpo.rl.update

    args = argparse.Namespace(work=work, build=build, trl_rows=None, full=False, steps=1, micro_batch_tokens=None)
    case = replace(make_case(name, args), warm_up=1, steps=1)
    found: dict[str, Profile] = {}
    name_loops()
    watch(grpo.rl.trainer.Trainer, "_roll_out", BEFORE, found)
    watch(grpo.rl.update.Update, "__call__", UPDATE, found)
    ours(case)
    return found


def name_loops() -> None:
    """Names the loops for the profiler, in `kernels` and in every module that has imported one of them by its name."""
    import grpo.generation.draw_tokens
    import grpo.model.decode.step_rows  # noqa: F401
    from grpo.model.cpu import kernels

    for loop in LOOPS:
        function = getattr(kernels, loop)
        seen = named(f"kernels::{loop}", function)
        for name, module in [*sys.modules.items()]:
            if name.startswith("grpo.") and vars(module).get(loop) is function:
                setattr(module, loop, seen)


def named(name: str, function: Any) -> Any:
    """`function` under a name that the profiler shows."""
    from torch.profiler import record_function

    def seen(*args: Any, **options: Any) -> Any:
        with record_function(name):
            return function(*args, **options)

    return seen


def watch(owner: Any, method: str, part: str, found: dict[str, Profile]) -> None:
    """Profile the second call."""
    watched, calls = getattr(owner, method), Counter[str]()

    def seen(*args: Any, **options: Any) -> Any:
        calls[part] += 1
        if calls[part] != 2:
            return watched(*args, **options)
        result, found[part] = profiled(lambda: watched(*args, **options))
        return result

    setattr(owner, method, seen)


def markdown(found: dict[str, dict[str, Profile]], arguments: str) -> str:
    from machine import measured_by

    lines = [
        "# Where a step's seconds go",
        "",
        measured_by(f"python benchmarks/profile_step.py{arguments}"),
        "Settings as in [grpo_vs_trl.md](grpo_vs_trl.md). The profiler itself takes time, so small operations look",
        "somewhat larger than they are.",
    ]
    for name, parts in found.items():
        lines += ["", f"## {name}", "", f"| seconds | {' | '.join(parts)} |", "|---" + "|--:" * len(parts) + "|"]
        for kind in [*KINDS, REST]:
            lines.append(f"| {kind} | " + " | ".join(_cell(p.kinds[kind], p.wall) for p in parts.values()) + " |")
        rest = [_cell(max(0.0, p.wall - p.kinds.total()), p.wall) for p in parts.values()]
        lines.append(f"| Python and waiting | {' | '.join(rest)} |")
        lines.append(f"| all | {' | '.join(f'{p.wall:.2f}' for p in parts.values())} |")
    return "\n".join(lines) + "\n"


def _cell(seconds: float, wall: float) -> str:
    return f"{seconds:.3f} ({seconds / wall:.0%})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--setting", action="append", choices=["small", "long", "demo"], help="small and demo by default"
    )
    parser.add_argument("--threads", type=at_least(1), default=os.cpu_count())
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if args.one:
        parts = profile_step(args.one, args.build, args.work)
        print(json.dumps({part: {"wall": p.wall, "kinds": p.kinds} for part, p in parts.items()}))
        return 0
    from inputs import need_model
    from measure import run

    if set(args.setting or ["small"]) != {"demo"}:
        need_model(args.build)
    paths = {"PYTHONPATH": os.pathsep.join(str(folder) for folder in Path(__file__).parents[:2])}
    found = {}
    with tempfile.TemporaryDirectory() as work:
        for name in args.setting or ["small", "demo"]:
            # A process for each: what is watched stays watched.
            command = [sys.executable, __file__, "--one", name, "--work", work, "--build", str(args.build.resolve())]
            parts = run(command, Path(work) / name, paths)
            kept = {part: parts[part] for part in (BEFORE, UPDATE)}
            found[name] = {part: Profile(p["wall"], Counter(p["kinds"])) for part, p in kept.items()}
    arguments = "".join(f" --setting {name}" for name in args.setting or ())
    text = markdown(found, arguments)
    print(text)
    if args.output:
        write_output(args.output, text)
    if args.json:
        print(json.dumps({n: {part: [p.wall, p.kinds] for part, p in parts.items()} for n, parts in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
