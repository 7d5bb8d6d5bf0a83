"""Exports test sets as tasks of EleutherAI's lm-evaluation-harness, for numbers comparable to published ones.

For each set, a folder has NAME.jsonl with the columns question and answer, and r1_NAME.yaml, the task. The prompts are
the same as in `r1 eval`. The harness compares text: what it finds in the last box, or between answer tags, with the
reference. Our verifiers know that 1/2 is 0.5, so their numbers tend to be higher.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo.config.common import Sampling
from grpo.data.records import Problem
from grpo.data.template import AnswerStyle, form_of
from grpo.errors import InputError
from tasks.evaluation.sets.metrics import UNVOTED

PREFIX = "r1_"
"""Prefix of the task names, to avoid names that the harness already knows."""
_BOX = r"\\boxed\{ZEROS((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
_TAGS = r"<answer>\s*ZEROS(.*?)\s*</answer>"
_ANSWER: dict[AnswerStyle, str] = {"boxed": _BOX, "tags": f"(?s){_TAGS}", "auto": f"(?s)(?:{_BOX}|{_TAGS})"}
"""Patterns for the marked answer; the last match counts. Braces in a box may be nested two levels deep. ZEROS stands
for the zeros that begin a number, which are left out where numbers are compared."""
_ZEROS = r"(?:0+(?=\d+(?:\.\d+)?\s*(?:\}|</answer>)))?"
_IGNORED = [",", r"\$", r"\.$", r"\s", r"^\(|\)$"]
"""Patterns removed from both texts before they are compared: thousands separators, dollar signs, a final full stop,
spaces, and enclosing parentheses."""
_LEADING_ZEROS = r"(?:^|(?<=^-))0+(?=\d+(?:\.\d+)?$)"
"""The zeros that begin a text that is a number: AIME's 033 is 33."""
_NUMBERS = {"math", "number"}
"""Verifiers that compare values. For all others 033 is not 33."""


def export_tasks(
    problems: Mapping[str, Sequence[Problem]], sampling: Sampling, samples: int, folder: Path
) -> list[str]:
    """Writes one task per set to `folder` and returns the task names. `samples`: per problem; with more than 1, there
    is a majority vote in addition to the first sample.

    Raises:
        InputError: the folder is not empty, or a set has answers that text comparison cannot check.
    """
    tasks = {name: _task(name, of_set, sampling, samples, folder) for name, of_set in problems.items()}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: exists and is not an empty folder; name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    for name, task in tasks.items():
        rows = [{"question": p.messages[0]["content"], "answer": _reference(p)} for p in problems[name]]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), "utf-8")
        (folder / f"{PREFIX}{name}.yaml").write_text(yaml.safe_dump(task, sort_keys=False, width=10**6), "utf-8")
    return [PREFIX + name for name in tasks]


def commands(model: str, tasks: Sequence[str], folder: Path) -> list[str]:
    """Commands that run the tasks: in the harness's own process, and against an endpoint such as `vllm serve MODEL`."""
    common = f"--tasks {','.join(tasks)} --include_path {shlex.quote(str(folder))} --apply_chat_template"
    endpoint = f"model={model},base_url=http://localhost:8000/v1/chat/completions,num_concurrent=64"
    return [
        f"lm_eval --model hf --model_args {shlex.quote(f'pretrained={model}')} {common}",
        f"lm_eval --model local-chat-completions --model_args {shlex.quote(endpoint)} {common}",
    ]


def _reference(problem: Problem) -> str:
    return re.sub(_LEADING_ZEROS, "", problem.answer) if problem.verifier in _NUMBERS else problem.answer


def _task(name: str, problems: Sequence[Problem], sampling: Sampling, samples: int, folder: Path) -> dict[str, Any]:
    for problem in problems:
        if problem.verifier in UNVOTED:
            raise InputError(
                f"--export-lm-eval: answers of {name!r} have verifier {problem.verifier!r}, which is no comparison of "
                "texts; lm-eval has tasks of its own for programs and instructions"
            )
        if len(problem.messages) != 1:
            raise InputError(f"--export-lm-eval: problem {problem.id} of {name!r} has several messages, a task has one")
    styles = {form_of(problem).style for problem in problems}
    if len(styles) != 1:
        raise InputError(f"--export-lm-eval: {name!r} has answers in several styles; give --answer-style")
    numbers = all(problem.verifier in _NUMBERS for problem in problems)
    pattern = _ANSWER[styles.pop()].replace("ZEROS", _ZEROS if numbers else "")
    extract = {"function": "regex", "regex_pattern": pattern, "group_select": -1}
    first = {"name": "first", "filter": [extract, {"function": "take_first"}]}
    votes = [{**extract}, {"function": "majority_vote"}, {"function": "take_first"}]
    return {
        "task": PREFIX + name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder.resolve() / f"{name}.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "question",
        "doc_to_target": "answer",
        "num_fewshot": 0,
        "repeats": samples,
        "generation_kwargs": {
            "until": [],
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_gen_toks": sampling.max_new_tokens,
        },
        "filter_list": [first, *([{"name": f"maj@{samples}", "filter": votes}] if samples > 1 else [])],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "regexes_to_ignore": [*_IGNORED, *([_LEADING_ZEROS] if numbers else [])],
            }
        ],
        "metadata": {"version": 1.0},
    }
