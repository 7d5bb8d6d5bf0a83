"""Tasks for lm-evaluation-harness: their fields, what their patterns find, and sets that they cannot hold."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli.main import main
from tests.support.test_set_files import write_set


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the command sets variables of servers and libraries
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")


def export(tmp_path: Path, *sets: str, more: tuple[str, ...] = ()) -> int:
    named = [f"{name}={write_set(tmp_path, name)}" for name in sets]
    folder = ["--export-lm-eval", str(tmp_path / "tasks")]
    return main(["eval", str(tmp_path / "model"), "--sets", *named, *folder, *more])


def test_a_task_has_the_prompts_and_references_of_the_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(tmp_path, "gsm8k", "math500", more=("--samples", "8", "--max-new-tokens", "100")) == 0
    folder = tmp_path / "tasks"
    assert sorted(path.name for path in folder.iterdir()) == [
        "gsm8k.jsonl",
        "math500.jsonl",
        "r1_gsm8k.yaml",
        "r1_math500.yaml",
    ]
    rows = [json.loads(line) for line in (folder / "gsm8k.jsonl").read_text().splitlines()]
    assert rows[0] == {
        "question": "Ann has 3 pens and buys 4 more. How many has she?\n\n"
        "Please reason step by step, and put your final answer within \\boxed{}.",
        "answer": "7",
    }
    task = yaml.safe_load((folder / "r1_gsm8k.yaml").read_text())
    assert (task["task"], task["dataset_path"], task["test_split"]) == ("r1_gsm8k", "json", "test")
    assert task["dataset_kwargs"] == {"data_files": {"test": str(folder / "gsm8k.jsonl")}}
    assert (task["doc_to_text"], task["doc_to_target"], task["repeats"]) == ("question", "answer", 8)
    assert task["generation_kwargs"] == {
        "until": [],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "max_gen_toks": 100,
    }
    assert [part["name"] for part in task["filter_list"]] == ["first", "maj@8"]
    hf, endpoint = capsys.readouterr().out.splitlines()
    assert "--tasks r1_gsm8k,r1_math500" in hf and f"--include_path {folder}" in hf
    assert hf.startswith(f"lm_eval --model hf --model_args pretrained={tmp_path / 'model'} ")
    assert "local-chat-completions" in endpoint and "base_url=http://localhost:8000/v1/chat/completions" in endpoint
    assert not (tmp_path / "home" / "evaluations").exists()


def last(pattern: str, text: str) -> str | None:
    """What the harness's filter `regex` takes with group_select -1."""
    found = re.compile(pattern).findall(text)
    match: Any = found[-1] if found else None
    return next(part for part in match if part) if isinstance(match, tuple) else match


@pytest.mark.parametrize(
    ("style", "text", "answer"),
    [
        ("auto", r"First \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("auto", r"\boxed{\sqrt{\frac{1}{2}}}", r"\sqrt{\frac{1}{2}}"),
        ("auto", "<think>\\boxed{3}</think><answer>\n4\n</answer>", "4"),
        ("boxed", "<answer>4</answer>", None),
        ("tags", "<answer> 4 </answer>, not \\boxed{3}", "4"),
    ],
)
def test_the_last_marked_answer_is_taken(tmp_path: Path, style: str, text: str, answer: str | None) -> None:
    assert export(tmp_path, "math500", more=("--answer-style", style, "--samples", "1")) == 0
    task = yaml.safe_load((tmp_path / "tasks" / "r1_math500.yaml").read_text())
    ((extract, first),) = [part["filter"] for part in task["filter_list"]]
    assert (extract["function"], extract["group_select"], first["function"]) == ("regex", -1, "take_first")
    assert last(extract["regex_pattern"], text) == answer


def compared(task: dict[str, Any], text: str) -> str:
    """What the harness compares of an answer or a reference."""
    for pattern in task["metric_list"][0]["regexes_to_ignore"]:
        text = re.sub(pattern, "", text)
    return text.lower()


@pytest.mark.parametrize("style", ["auto", "boxed", "tags"])
def test_zeros_that_begin_a_number_do_not_count(tmp_path: Path, style: str) -> None:
    rows = [{"problem": f"Number {n}?", "answer": answer} for n, answer in enumerate(["033", "25", "0", "0.5", "-07"])]
    (tmp_path / "aime.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["eval", str(tmp_path / "model"), "--sets", f"aime2024={tmp_path / 'aime.jsonl'}"]
    assert main([*arguments, "--answer-style", style, "--export-lm-eval", str(tmp_path / "tasks")]) == 0
    task = yaml.safe_load((tmp_path / "tasks" / "r1_aime2024.yaml").read_text())
    written = (tmp_path / "tasks" / "aime2024.jsonl").read_text().splitlines()
    references = [json.loads(line)["answer"] for line in written]
    assert references == ["33", "25", "0", "0.5", "-7"]
    pattern = task["filter_list"][0]["filter"][0]["regex_pattern"]
    mark = "<answer>{}</answer>" if style == "tags" else r"\boxed{{{}}}"
    answers = {"33": "33", "033": "33", "$033$": "33", "025": "25", "0": "0", "000": "0", "00.5": "0.5", "-07": "-7"}
    assert {text: compared(task, last(pattern, mark.format(text)) or "") for text in answers} == answers
    assert last(pattern, mark.format("033")) == "33"  # before the votes
    assert last(pattern, mark.format("01/02")) == "01/02"
    assert compared(task, "1.05") == "1.05" and compared(task, "x05") == "x05"


def test_text_keeps_its_zeros(tmp_path: Path) -> None:
    assert export(tmp_path, "gpqa_diamond") == 0
    task = yaml.safe_load((tmp_path / "tasks" / "r1_gpqa_diamond.yaml").read_text())
    assert compared(task, "007") == "007"
    assert last(task["filter_list"][0]["filter"][0]["regex_pattern"], r"\boxed{007}") == "007"


@pytest.mark.parametrize(("name", "verifier"), [("ifeval", "none"), ("livecodebench", "code")])
def test_what_no_comparison_of_texts_can_check_is_refused(
    tmp_path: Path, name: str, verifier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(tmp_path, "gsm8k", name) == 2
    said = capsys.readouterr().err.strip()
    assert f"answers of {name!r} have verifier {verifier!r}" in said and "\n" not in said
    assert not (tmp_path / "tasks").exists()


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine").touch()
    assert export(tmp_path, "gsm8k") == 2
    assert "exists and is not an empty folder; name a new one" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "tasks").iterdir()] == ["mine"]
