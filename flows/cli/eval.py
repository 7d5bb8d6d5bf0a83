"""The command `r1 eval`: evaluates any model on test sets, without a recipe."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.terminal import width
from flows.home import home
from grpo.errors import InputError
from tasks.paths import expanded

if TYPE_CHECKING:
    from tasks.evaluation.sets.run import ModelEvaluation
    from tasks.evaluation.sets.settings import EvaluationSet

_SET = re.compile(r"(?P<name>[^:=]+)(?::(?P<like>[^=]+))?(?:=(?P<path>.+))?")


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("eval", help="a model on test sets, without a recipe")
    command.add_argument("model", help="a Hugging Face folder, a hub name, a checkpoint as `r1 chat` takes it")
    command.add_argument(
        "--sets",
        nargs="+",
        required=True,
        metavar="SET",
        help="NAME of a known set (gsm8k, math500, aime2024, aime2025, aime2026, gpqa_diamond, livecodebench, ifeval), "
        "NAME=PATH for a file, a folder or a hub name of its rows, NEW:NAME=PATH for another set with its columns",
    )
    command.add_argument("--samples", type=int, default=4, metavar="N", help="samples a problem (default: 4)")
    command.add_argument("--k", type=int, metavar="K", help="k of pass@k and cons@k (default: all samples)")
    command.add_argument("--problems", type=int, metavar="N", help="the first problems of each set (default: all)")
    command.add_argument(
        "--prompt-style",
        default="instruction",
        metavar="STYLE",
        help="instruction (default): the question, and how to answer; question: it alone; or a text with {question}",
    )
    command.add_argument(
        "--answer-style", choices=("auto", "tags", "boxed"), default="auto", help="where answers stand (default: auto)"
    )
    command.add_argument("--template", choices=("chat", "r1_zero"), help="default: chat, of our base models r1_zero")
    command.add_argument("--temperature", type=float, default=0.6, help="default: 0.6")
    command.add_argument("--top-p", type=float, default=0.95, help="default: 0.95")
    command.add_argument("--max-new-tokens", type=int, default=4096, metavar="N", help="default: 4096")
    command.add_argument("--batch-size", type=int, default=64, metavar="N", help="sequences side by side (default: 64)")
    command.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--export-lm-eval",
        type=Path,
        metavar="DIR",
        help="write the sets as tasks of lm-evaluation-harness to a new folder, print its commands, and ask nothing",
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON, the last line of stdout")


def run(args: argparse.Namespace) -> int:
    """Evaluates a model. Returns the exit code."""
    from tasks.evaluation.sets.run import evaluate_model, identity, read_sets
    from tasks.trainer.outcome import StageFailed

    evaluation, sets = settings(args)
    problems = read_sets(sets, args.seed)
    if args.export_lm_eval is not None:
        return _export(evaluation, problems, expanded(args.export_lm_eval))
    key = identity(evaluation, sets, problems)
    folder = home() / "evaluations" / key[:16]
    try:
        table = evaluate_model(evaluation, sets, problems, folder, _progress())
    except StageFailed as failed:
        print(f"failed: eval: {failed}", file=sys.stderr)
        return 1
    _show(table, folder)
    if args.json:
        print(json.dumps({"model": args.model, "digest": evaluation.policy, "folder": str(folder), "sets": table}))
    return 0


def _export(evaluation: ModelEvaluation, problems: dict[str, Any], folder: Path) -> int:
    from tasks.evaluation.sets.lm_eval import commands, export_tasks

    tasks = export_tasks(problems, evaluation.sampling, evaluation.samples_per_problem, folder)
    print(f"{len(tasks)} tasks are in {folder}; pip install 'lm-eval[hf]', then one of", file=sys.stderr)
    print("\n".join(commands(evaluation.model, tasks, folder)))
    return 0


def settings(args: argparse.Namespace) -> tuple[ModelEvaluation, list[EvaluationSet]]:
    """The evaluation and the test sets that the arguments name.

    Raises:
        InputError: an argument is wrong.
    """
    from pydantic import ValidationError

    from flows.cli.models import find_model
    from flows.stage_contract.references import external
    from tasks.evaluation.sets.run import ModelEvaluation
    from tasks.evaluation.sets.settings import check_names

    sets = [_set(text, args) for text in args.sets]
    try:
        check_names(sets)
    except ValueError as error:
        raise InputError(f"--sets: {error}") from None
    if args.k is not None and args.k > args.samples:
        raise InputError(f"--k {args.k}: is above --samples {args.samples}; lower it, or raise --samples")
    model, template = find_model(args.model)
    try:
        evaluation = ModelEvaluation.model_validate(
            {
                "model": model,
                "policy": external(model).ref.digest,
                "template": args.template or ("r1_zero" if template else "chat"),
                "zero_template": template.read_text() if template else None,
                "sampling": {
                    "temperature": args.temperature,
                    "top_p": args.top_p,
                    "max_new_tokens": args.max_new_tokens,
                    "batch_size": args.batch_size,
                },
                "samples_per_problem": args.samples,
                "hardware": {"device": args.device, "dtype": args.dtype},
                "seed": args.seed,
            }
        )
    except ValidationError as error:
        raise InputError(_one_line(error)) from None
    return evaluation, sets


def _set(text: str, args: argparse.Namespace) -> EvaluationSet:
    from pydantic import ValidationError

    from tasks.evaluation.sets.settings import EvaluationSet

    match = _SET.fullmatch(text)
    if match is None:
        raise InputError(f"--sets {text}: write NAME, NAME=PATH or NEW:NAME=PATH")
    expanded(match["path"] or "")  # an error in its ~ is noticed here
    asks = {"problems": args.problems, "samples_per_problem": args.samples, "k": args.k}
    styles = {"prompt_style": args.prompt_style, "answer_style": args.answer_style}
    try:
        return EvaluationSet.model_validate({**match.groupdict(), **asks, **styles})
    except ValidationError as error:
        line = _one_line(error)
        raise InputError(line if line.startswith("--") else f"--sets {text}: {line}") from None


def _one_line(error: Any) -> str:
    first = error.errors(include_url=False)[0]
    option = _OPTIONS.get(str(first["loc"][-1]), "") if first["loc"] else ""
    return (f"{option}: " if option else "") + first["msg"].removeprefix("Value error, ")


_OPTIONS = {
    "problems": "--problems",
    "samples_per_problem": "--samples",
    "k": "--k",
    "prompt_style": "--prompt-style",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "max_new_tokens": "--max-new-tokens",
    "batch_size": "--batch-size",
    "seed": "--seed",
}


def _progress() -> Any:
    from flows.progress import Progress

    progress = Progress.current()
    progress.started("eval")
    # Only the last: earlier ones may be of the attempt that the job resumes.
    return lambda records: [progress.update("eval", "", record) for record in records[-1:]]


def _show(table: dict[str, dict[str, Any]], folder: Path) -> None:
    from tasks.report.closing import WIDTH, grid

    lines = grid(table, min(WIDTH, width(sys.stderr) or WIDTH), counts=True)
    print("", *lines, "", f"samples: {folder}", sep="\n", file=sys.stderr)
