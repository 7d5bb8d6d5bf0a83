"""The command r1; `r1 --help` lists what it can do."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flows import compare, deploy, estimate_options, export, registry, report_command, up, why
from flows.home import home, prepare_environment, store, tracking
from grpo.errors import InputError


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="r1", description="The DeepSeek-R1 recipe: run, plan, look, talk.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = _with_choice(commands.add_parser("run", help="run a recipe; what exists is reused"))
    run.add_argument("--force", action="append", default=[], metavar="STAGE", help="make it again (repeatable)")
    run.add_argument("--json", action="store_true", help="print the result as one JSON object, the last line of stdout")
    run.add_argument(
        "--approve", action="append", default=[], metavar="GATE", help="let this gate pass if it would ask (repeatable)"
    )
    run.add_argument(
        "--dispatch", action="store_true", help="run the stages on their work pools; see docs/operations.md"
    )
    plan = _with_choice(commands.add_parser("plan", help="what a run would do, and why"))
    plan.add_argument("--force", action="append", default=[], metavar="STAGE")
    plan.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    estimate_options.add(plan)
    commands.add_parser("stages", help="what exists")
    show = commands.add_parser("show", help="one artifact: what it is and where it came from")
    show.add_argument("key", help="the beginning of a key or digest, latest:STAGE, or RUN:STAGE")
    why.add(commands)
    data = commands.add_parser("data", help="a data set: what was kept, what was dropped and why, samples")
    data.add_argument("reference", metavar="DIGEST", help="the beginning of a key or digest, or sft_data: the newest")
    data.add_argument("--reason", metavar="NAME", help="only samples of this outcome, in full: kept, or a filter")
    data.add_argument("--samples", type=int, default=1, metavar="N", help="samples shown of each outcome (default: 1)")
    data.add_argument("--json", action="store_true", help="print all of it as one JSON object")
    compare.add(commands)
    report_command.add(commands)
    chat = commands.add_parser("chat", help="talk to a checkpoint")
    chat.add_argument("model", help="a stage, a key, champion, NAME@RECIPE, or a Hugging Face folder")
    chat.add_argument("--temperature", type=float, default=0.6)
    chat.add_argument("--max-new-tokens", type=int, default=256)
    registry.add(commands)
    export.add(commands)
    ui = commands.add_parser("ui", help="Prefect and MLflow on this machine, until Ctrl-C")
    ui.add_argument("--prefect-port", type=int, default=4200)
    ui.add_argument("--mlflow-port", type=int, default=5000)
    deploy.add(commands)
    up.add(commands)
    return top


def _with_choice(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    command.add_argument("recipe", help="a shipped recipe or a path that ends in .toml")
    flows = ["r1", "r1_zero", "distill", "rlhf_ppo"]
    command.add_argument(
        "--flow",
        choices=flows,
        default="r1",
        type=lambda name: name.replace("-", "_"),
        help="which graph (default: r1); rlhf-ppo is rlhf_ppo",
    )
    command.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", dest="overrides")
    command.add_argument("--seed", type=int, help="replaces the recipe's seed")
    command.add_argument(
        "--from", dest="start", metavar="STAGE", help="begin here; earlier stages are taken as they are"
    )
    command.add_argument("--only", metavar="STAGE", help="this stage alone; its inputs are taken as they are")
    command.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="STAGE=REF",
        help="take this artifact: a key, a digest, latest, RUN:STAGE of a run in MLflow, or a path (begins with . / ~)",
    )
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    try:
        prepare_environment()
        return COMMANDS[given.command](given)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command continues from the last checkpoint", file=sys.stderr)
        return 130


def run(given: argparse.Namespace) -> int:
    from flows.server import prefect_server
    from tasks.meeting import Meeting

    meeting = Meeting.of_environment(home())
    if meeting is not None and meeting.rank > 0:
        from tasks.join import join

        return join(meeting)
    # A server takes as long to start as what the run needs to load, and one that is not needed after all ends at once.
    with prefect_server(lambda: _checked(given)) as recipe, meeting.lead() if meeting else nullcontext():
        return _run(given, recipe)


def _checked(given: argparse.Namespace) -> Any:
    """The recipe, after all that can be wrong with it was looked at; and what a run needs is loaded."""
    from flows import r1  # noqa: F401
    from flows.graphs import GRAPHS
    from flows.plan import plan as make_plan
    from flows.recipe import load_recipe
    from flows.server import keeps_runs

    recipe = load_recipe(given.recipe, given.overrides, given.seed)
    make_plan(GRAPHS[given.flow](recipe), recipe, _choice(given))
    if given.dispatch and not keeps_runs():
        raise InputError(
            "--dispatch needs a Prefect server with workers: start one with `r1 up`, or set PREFECT_API_URL"
        )
    tracking().open()
    return recipe


def _run(given: argparse.Namespace, recipe: Any) -> int:
    from flows.gates import GateStopped
    from flows.r1 import FLOWS, RecipeFailed

    choice = _choice(given)
    try:
        result: dict[str, Any] = FLOWS[given.flow](
            recipe=given.recipe,
            overrides=given.overrides,
            seed=given.seed,
            start=given.start,
            only=given.only,
            force=given.force,
            inputs=dict(choice.inputs),
            approve=given.approve,
            dispatch=given.dispatch,
        )
    except RecipeFailed as failed:
        if given.json:
            print(json.dumps(failed.result))
        if isinstance(failed.cause, GateStopped):
            return _stopped(failed.cause, given.arguments)
        kind = "error" if isinstance(failed.cause, InputError) else "failed"
        print(f"{kind}: {failed.stage}: {_one_line(failed.cause)}", file=sys.stderr)
        return 2 if isinstance(failed.cause, InputError) else 1
    _print_table(result)
    print(f"report: {result['report']}", file=sys.stderr)
    print(f"MLflow experiment {recipe.name!r}, run {result['run_id']}; everything lies in {home()}", file=sys.stderr)
    if given.json:
        print(json.dumps(result))
    return 0


def _stopped(gate: Any, arguments: Sequence[str]) -> int:
    if gate.can_be_approved:
        print(f"to go on: {shlex.join(['r1', *arguments, '--approve', gate.gate])}", file=sys.stderr)
    print(f"stopped: {_one_line(gate)}", file=sys.stderr)
    return 1


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _print_table(result: dict[str, Any]) -> None:
    if not result["checkpoints"]:
        return
    from tasks.report import closing_frame

    print(file=sys.stderr)
    print(closing_frame(result["checkpoints"]).fillna("").to_string(), file=sys.stderr)
    print(file=sys.stderr)


def _choice(given: argparse.Namespace) -> Any:
    from flows.r1 import Choice

    inputs = {}
    for pair in given.input:
        name, equals, reference = pair.partition("=")
        if not equals:
            raise InputError(f"--input {pair}: write STAGE=REF")
        inputs[name] = reference
    return Choice(given.start, given.only, given.force, inputs, getattr(given, "approve", ()))


def plan(given: argparse.Namespace) -> int:
    from flows.graphs import GRAPHS
    from flows.plan import plan as make_plan
    from flows.progress import duration
    from flows.recipe import load_recipe

    recipe = load_recipe(given.recipe, given.overrides, given.seed)
    graph = GRAPHS[given.flow](recipe)
    planned = make_plan(graph, recipe, _choice(given))
    estimated: dict[str, Any] | None = None
    if given.estimate or given.calibrate:
        from flows import estimate

        estimated = estimate.make(given, graph, recipe)
    if given.json:
        result = {"recipe": recipe.name, "stages": [vars(p) for p in planned]}
        print(json.dumps(result | ({"estimate": estimated} if estimated else {})))
        return 0
    print(f"{recipe.name}: {recipe.description}")
    for p in planned:
        took = f"(last took {duration(p.took)})" if p.status == "run" and p.took is not None else ""
        print(f"  {p.name:<16} {p.status:<6} {p.why} {took}".rstrip())
    if estimated:
        estimate.show(estimated, [p.name for p in planned if p.status == "run"])
    return 0


def stages(given: argparse.Namespace) -> int:
    from tasks.stale import stale

    known, reasons = store().list(), stale(store())
    if not known:
        print(f"nothing in {home()} yet; `r1 run tiny` makes the first artifacts", file=sys.stderr)
        return 0
    for m in known:
        size = sum(entry["size"] for entry in m.files.values()) / 1e6
        seed = m.config.get("seed", "-")
        line = f"{m.created[:19]}  {m.stage:<16} {m.key[:12]}  seed {seed:<4} {size:8.1f} MB {m.seconds:7.0f} s"
        print(f"{line}  stale: {reasons[m.key]}" if m.key in reasons else line)
    return 0


def show(given: argparse.Namespace) -> int:
    from flows.references import artifact
    from tasks.stale import stale

    manifest = artifact(given.key)
    known = {m.digest: m for m in store().list()}
    print(json.dumps({**manifest.to_dict(), "path": str(manifest.path)}, indent=2))
    print("\nMade from:")

    def lineage(m: Any, depth: int, seen: set[str]) -> None:
        for name, ref in m.inputs.items():
            again = " (above)" if ref.digest in seen else ""
            print(f"{'  ' * depth}{name}: {ref.path or (ref.key or '')[:12]}{again}")
            if ref.digest in known and not again:
                seen.add(ref.digest)
                lineage(known[ref.digest], depth + 1, seen)

    lineage(manifest, 1, set())
    if why_stale := stale(store()).get(manifest.key):
        print(f"\nStale: {why_stale}")
    return 0


def data(given: argparse.Namespace) -> int:
    from rich.console import Console

    from tasks import data_view

    if given.samples < 0:
        raise InputError(f"--samples {given.samples}: give 0 or more")
    view = data_view.look(data_view.find(store(), given.reference), given.reason, given.samples)
    if given.json:
        print(data_view.to_json(view))
    else:
        data_view.show(view, Console(), whole=given.reason is not None)
    return 0


def chat(given: argparse.Namespace) -> int:
    from flows.base import ZERO_TEMPLATE_FILE
    from flows.evaluate import CHECKPOINTS, checkpoints, stage_of
    from flows.references import artifact

    if Path(given.model).is_dir():
        path, stage = Path(given.model), None
    else:
        stage = stage_of(given.model)
        manifest = artifact(f"latest:{stage}" if checkpoints([stage]) else given.model)
        path, stage = manifest.path, manifest.stage
        if not checkpoints([stage]):
            known = ", ".join([*CHECKPOINTS, "student_NAME"])
            raise InputError(f"{given.model}: stage {stage!r} makes no checkpoint; these do: {known}")
    command = [sys.executable, "-m", "grpo.chat", str(path), "--temperature", str(given.temperature)]
    command += ["--max-new-tokens", str(given.max_new_tokens)]
    if stage in ("base", "r1_zero"):
        template = path if stage == "base" else store().resolve(manifest.inputs["base"].key or "").path
        command += ["--template", "r1_zero", "--zero-template", str(template / ZERO_TEMPLATE_FILE)]
    elif stage is None and (path / ZERO_TEMPLATE_FILE).is_file():
        command += ["--template", "r1_zero", "--zero-template", str(path / ZERO_TEMPLATE_FILE)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": _import_path()}).returncode


def _import_path() -> str:
    import grpo

    return os.pathsep.join(filter(None, [str(Path(grpo.__file__).parents[1]), os.environ.get("PYTHONPATH")]))


def ui(given: argparse.Namespace) -> int:
    from flows.ui import serve

    return serve(given.prefect_port, given.mlflow_port)


COMMANDS = {
    "run": run,
    "plan": plan,
    "stages": stages,
    "show": show,
    "why": why.run,
    "data": data,
    "compare": compare.run,
    "report": report_command.run,
    "chat": chat,
    "promote": registry.run,
    "export": export.run,
    "ui": ui,
    "deploy": deploy.run,
    "up": up.run,
    "down": up.down,
}


if __name__ == "__main__":
    sys.exit(main())
