"""`r1 eval`: any model on test sets, without a recipe."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flows.cli.eval import settings
from flows.cli.main import main, parser
from grpo.data.records import read_samples
from tasks.evaluation.sets.run import identity, read_sets
from tests.support.r1 import R1
from tests.support.test_set_files import write_set


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the command sets variables of servers and libraries
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that is enough of a model for what happens before it is loaded."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    return str(tmp_path / "model")


def test_defaults_are_those_of_the_papers_evaluation(model: str, tmp_path: Path) -> None:
    gsm8k, ours = write_set(tmp_path, "gsm8k"), write_set(tmp_path, "math500")
    evaluation, sets = settings(
        parser().parse_args(["eval", model, "--sets", "aime2024", f"gsm8k={gsm8k}", f"ours:math500={ours}"])
    )
    assert (evaluation.sampling.temperature, evaluation.sampling.top_p) == (0.6, 0.95)
    assert (evaluation.samples_per_problem, evaluation.template) == (4, "chat")
    assert [(of.name, of.like, of.path) for of in sets] == [
        ("aime2024", None, None),
        ("gsm8k", None, str(gsm8k)),
        ("ours", "math500", str(ours)),
    ]


def test_an_evaluation_is_the_same_wherever_its_files_are_and_another_with_other_samples(
    model: str, tmp_path: Path
) -> None:
    keys = []
    for folder, more in (("a", []), ("b", []), ("b", ["--samples", "8"]), ("b", ["--answer-style", "tags"])):
        (tmp_path / folder).mkdir(exist_ok=True)
        path = write_set(tmp_path / folder, "gsm8k")
        evaluation, sets = settings(parser().parse_args(["eval", model, "--sets", f"gsm8k={path}", *more]))
        keys.append(identity(evaluation, sets, read_sets(sets, 0)))
    assert keys[0] == keys[1] and len(set(keys)) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["MODEL", "--sets", "gsm8"], "unknown test set 'gsm8'; did you mean 'gsm8k'?"),
        (["MODEL", "--sets", "gsm8k=nowhere.jsonl"], "test set 'gsm8k': nowhere.jsonl: no such file"),
        (["MODEL", "--sets", "gsm8k=EMPTY"], "the file is empty"),
        (["MODEL", "--sets", "gsm8k=OTHER"], "question"),
        (["MODEL", "--sets", "=x"], "--sets =x: write NAME, NAME=PATH or NEW:NAME=PATH"),
        (["MODEL", "--sets", "gsm8k", "gsm8k"], "two test sets are called 'gsm8k'"),
        (["MODEL", "--sets", "livecodebench"], "give path, a file of its rows"),
        (["MODEL", "--sets", "gsm8k", "--samples", "2", "--k", "3"], "--k 3: is above --samples 2"),
        (["MODEL", "--sets", "gsm8k", "--samples", "0"], "--samples: Input should be greater than or equal to 1"),
        (["MODEL", "--sets", "gsm8k", "--temperature", "0"], "--temperature: Input should be greater than 0"),
        (["MODEL", "--sets", "gsm8k", "--prompt-style", "loud"], "give question, instruction, or a text with"),
        (["./nothing", "--sets", "gsm8k"], "./nothing: no such folder"),
        (["FOLDER", "--sets", "gsm8k"], "not a model folder (config.json is missing)"),
        (["dev9", "--sets", "gsm8k"], "dev9: no checkpoint has this name"),
    ],
)
def test_bad_input_is_one_line(
    model: str, tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "none").mkdir()
    places = {"MODEL": model, "EMPTY": str(tmp_path / "empty.jsonl"), "FOLDER": str(tmp_path / "none")}
    places["OTHER"] = str(write_set(tmp_path, "math500"))
    for word, place in places.items():
        arguments = [argument.replace(word, place) for argument in arguments]
    assert main(["eval", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
    assert not (home / "evaluations").exists()


@pytest.mark.system
def test_a_model_is_asked_and_a_second_call_prints_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.support.vllm_models import tiny_llama

    r1 = R1(tmp_path / "home")
    sets = [f"{name}={write_set(tmp_path, name)}" for name in ("gsm8k", "ifeval")]
    arguments = ["eval", tiny_llama(tmp_path / "model", tied=True), "--sets", *sets, "--samples", "3", "--k", "2"]
    arguments += ["--max-new-tokens", "8", "--device", "cpu", "--json"]
    done = r1(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    gsm8k, ifeval = result["sets"]["gsm8k"], result["sets"]["ifeval"]
    assert (gsm8k["problems"], gsm8k["samples"], gsm8k["k"]) == (2, 6, 2)
    assert (ifeval["problems"], ifeval["samples"]) == (1, 3) and "cons@k" not in ifeval
    samples = list(read_samples(Path(result["folder"]) / "samples" / "gsm8k"))
    assert gsm8k["pass@1"] == sum(sample.rewards["accuracy"] for sample in samples) / 6
    low, high = gsm8k["pass@1_ci95"]
    assert 0 <= low <= gsm8k["pass@1"] <= high <= 1
    assert "\n  interval " in done.stderr and "gsm8k" in done.stderr
    capsys.readouterr()
    assert main(arguments) == 0
    assert capsys.readouterr().out == done.stdout
