"""Test sets in a recipe: held out from training, asked of every checkpoint, with rows of their own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.recipe.load import load_recipe
from flows.recipe.sections import Problems
from flows.stages import problems
from grpo.data.records import read_problems, read_samples
from grpo.errors import InputError
from tasks.evaluation.sets.load import asked, load_set
from tests.support.r1 import R1
from tests.support.stage_progress import progress_of
from tests.support.test_set_files import IFEVAL, write_set

LEAK = "Ann has 3 pens and buys 4 more. How many has she?"
"""A problem of the set GSM8K in tests/support/test_set_files.py, of 11 words."""


def test_training_problems_that_a_test_set_holds_are_dropped_and_counted(tmp_path: Path) -> None:
    own = [
        {"prompt": LEAK, "answer": "7"},
        {"prompt": f"Read this. {LEAK} Say it in words.", "answer": "7"},
        *({"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)),
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    config = Problems.model_validate(
        {
            "sources": [{"kind": "file", "path": tmp_path / "own.jsonl"}],
            "held_out_share": 0.05,
            "answer_style": "boxed",
            "test_sets": [{"name": name, "path": str(write_set(tmp_path, name))} for name in ("gsm8k", "ifeval")],
        }
    )
    out = tmp_path / "out"
    out.mkdir()
    context: Any = SimpleNamespace(config=config, seed=0, out=out, progress=progress_of("problems"))
    outcome = problems.build(context)
    train = [problem.text for problem in read_problems(out / problems.TRAIN)]
    assert not any(LEAK in text for text in train) and len(train) > 30
    counts = {name.removeprefix("test_"): n for name, n in outcome.counts.items() if name.startswith("test_")}
    assert counts == {
        "gsm8k_equal": 1,
        "gsm8k_overlapping": 1,
        "gsm8k_problems": 2,
        "gsm8k_left_out": 0,
        "ifeval_equal": 0,
        "ifeval_overlapping": 0,
        "ifeval_problems": 1,
        "ifeval_left_out": 1,
    }
    (tested,) = read_problems(problems.test_set_file(out, "ifeval"))
    assert tested.text == IFEVAL[0]["prompt"] and tested.metadata["answer_style"] == "boxed"
    assert "cannot be checked" in (out / problems.BAD_RECORDS).read_text()


def test_a_set_of_which_nothing_says_what_is_right_is_refused_before_it_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text('{"prompt": "Capital of France?", "answer": "Paris", "constraints": []}\n')
    general = f'kind="file", path="{path}", domain="general", verifier="exact"'
    reason = "verifiers check domain 'reasoning' only, and this is 'general' without constraints; set the source's"
    with pytest.raises(InputError, match=f"set 'facts': {reason}"):
        load_recipe("tiny", [f'evaluate.sets=[{{name="facts", source={{{general}}}}}]'])
    kept = f'{general}, metadata_columns=["constraints"]'  # its rows are known only when they are read
    (of,) = load_recipe("tiny", [f'evaluate.sets=[{{name="facts", source={{{kept}}}}}]']).evaluate.sets
    with pytest.raises(InputError, match="^test set 'facts': problem [0-9a-f]+: it has no constraints, and verifiers"):
        load_set(of.data, 0)
    with path.open("a") as file:
        file.write(json.dumps({"prompt": "Hi?", "answer": "Hi", "constraints": [{"kind": "words", "max": 3}]}) + "\n")
    (of,) = load_recipe(
        "tiny", [f'evaluate.sets=[{{name="facts", source={{{kept}, on_bad_record="skip"}}}}]']
    ).evaluate.sets
    read = load_set(of.data, 0)
    assert [problem.text for problem in read.problems] == ["Hi?"]
    (problem,) = read.problems
    stored = [dataclasses.replace(problem, metadata={})]  # as earlier versions did
    with pytest.raises(InputError, match=f"^test set 'facts': problem {problem.id}: it has no constraints"):
        asked(of, stored)
    assert (read.counts["read"], read.counts["bad_records"], read.counts["kept"], len(read.bad_records)) == (2, 1, 1, 1)


QUICKER = ("base.pretrain.steps=20", "r1_zero.steps=1", "evaluate.problems=4", "evaluate.general=0")


@pytest.mark.system
def test_every_checkpoint_is_asked_and_has_rows_of_each_set(tmp_path: Path) -> None:
    r1 = R1(tmp_path / "home")
    sets = ", ".join(
        f'{{name = "{name}", path = "{write_set(tmp_path, name)}", problems = 2, {more}}}'
        for name, more in [("gsm8k", "samples_per_problem = 3, k = 2"), ("ifeval", 'prompt_style = "instruction"')]
    )
    quicker = [part for value in (*QUICKER, f"evaluate.sets=[{sets}]") for part in ("--set", value)]
    result = r1.tiny("run", "--flow", "r1_zero", *quicker)
    for name, row in result["checkpoints"].items():
        assert (row["gsm8k/problems"], row["gsm8k/samples"], row["gsm8k/k"]) == (2, 6, 2)
        assert (row["ifeval/problems"], row["ifeval/samples"]) == (1, 4) and "ifeval/cons@k" not in row
        for metric in ("gsm8k/pass@1", "gsm8k/pass@k", "gsm8k/cons@k", "ifeval/pass@1"):
            low, high = row[f"{metric}_ci95"]
            assert 0 <= low <= row[metric] <= high <= 1, (name, metric)
    evaluation = next(stage for stage in result["stages"] if stage["name"] == "evaluate")
    folder = tmp_path / "home" / "artifacts" / "evaluate" / evaluation["key"] / "1"
    assert {s.problem_id for s in read_samples(folder / "samples" / "zero.gsm8k")} == {
        problem.id for problem in read_problems(folder / "sets" / "gsm8k.parquet")
    }
    assert "zero/gsm8k/pass@1_low" in json.loads((folder / "manifest.json").read_text())["metrics"]
    page = Path(result["report"]).read_text()
    assert "Test set gsm8k" in page and "2 problems, 3 samples each, k = 2" in page
