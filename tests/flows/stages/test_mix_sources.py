"""Given SFT rows in the stage sft_data, by the command: the data set, its card, and what a changed file makes anew."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.recipe.data_sections import SFTData
from flows.recipe.load import load_recipe
from flows.stage_contract.stage import Context, RunContext, hashed_config
from flows.stages import problems as problems_stage
from flows.stages import sft_data
from flows.stages.problems import HELD_OUT
from flows.stages.problems import TRAIN as TRAIN_PROBLEMS
from flows.stages.sft_data import STAGE
from grpo.config.common import Optimizer
from grpo.config.supervised import Pretrain
from grpo.data.conversations import demonstrations
from grpo.data.records import Problem, read_samples, write_rows
from tasks.sft_data.given.shards import take
from tasks.sft_data.mix import TRAIN
from tasks.store.manifest import artifact_key
from tasks.store.store import Store
from tests.flows.stages.test_sft_data import SETTINGS, publish, sums
from tests.support.stage_progress import progress_of


def write(path: Path, rows: int) -> Path:
    lines = [json.dumps({"prompt": f"Say {i}", "completion": f"I say {i}."}) for i in range(rows)]
    path.write_text("\n".join(lines))
    return path


def test_paths_are_no_part_of_the_key_and_hub_names_are() -> None:
    sources = [{"name": "local", "path": "here/talk.jsonl"}, {"name": "hub", "dataset": "somebody/talk"}]
    config = load_recipe("tiny").sft_data.model_dump() | {"mix": {"sources": sources}}
    made = SFTData.model_validate(config)
    assert STAGE.files(made) == {"mix_local": Path("here/talk.jsonl"), "mix_hub": "somebody/talk"}
    hashed = hashed_config(STAGE, made, 0)["mix"]["sources"]
    assert [source["path"] or source["dataset"] for source in hashed] == ["input:mix_local", "input:mix_hub"]


def test_the_papers_counts_are_those_of_its_recipe() -> None:
    """R1 v2, table of the SFT data: 395,285 + 211,129 + 10,124 + 10,395 = 626,933 reasoning ("600k") and 177,812
    general ("200k"), 804,745 in all ("800k"); and what is sampled and given is enough for it."""
    recipe = load_recipe("r1-paper")
    data = recipe.sft_data
    wanted = data.mix.wanted()
    general = {name: wanted.pop(name) or 0 for name in ("general", "v3-general")}
    assert wanted == {"maths": 395_285, "code": 211_129, "stem": 10_124, "logic": 10_395}
    assert sum(filter(None, wanted.values())) == 626_933 and sum(general.values()) == 177_812
    assert data.mix.total == 626_933 + 177_812 == 804_745
    train = 1 - recipe.problems.held_out_share
    prompts = {"maths": 26_000, "code": 17_000, "stem": 22_000, "logic": 15_000}  # R1's RL data
    for name, count in prompts.items():
        assert count * train * min(data.keep_per_problem, data.enough_right or 0) >= (wanted[name] or 0), name
    assert sum(prompts.values()) == data.problems
    assert data.general * train * data.keep_per_problem >= general["general"]


def test_rows_of_a_test_set_and_of_held_out_problems_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo.training.pretrain import train_tokenizer

    def run_numbered(function: Any, name: str, run_names: Any, at_once: int, on_progress: Any) -> list[Any]:
        return [function(number) for number in range(len(run_names))]  # without Prefect's tasks

    monkeypatch.setattr(sft_data, "run_numbered", run_numbered)
    problems = tmp_path / "problems"
    (problems / problems_stage.TEST_SETS).mkdir(parents=True)
    write_rows(problems / HELD_OUT, sums("held out", 1), Problem)
    write_rows(problems_stage.test_set_file(problems, "own"), sums("own", 1, first=1), Problem)
    prompts = ["For held out: what is 0 + 1?", "For own: what is 1 + 1?", "For nobody: what is 2 + 1?"]
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": "One."}) + "\n" for prompt in prompts))
    policy = tmp_path / "policy"
    train_tokenizer(
        ["For nobody, one."] * 50, Pretrain(vocabulary=320, steps=1, optimizer=Optimizer(learning_rate=1e-3))
    ).save_pretrained(policy)
    config = load_recipe("tiny", [f'sft_data.mix.sources=[{{name="talk",path="{path}"}}]']).sft_data
    inputs: Any = {"problems": SimpleNamespace(path=problems), sft_data.POLICY: SimpleNamespace(path=policy)}
    attempt: Any = SimpleNamespace(state=tmp_path)
    unused: Any = None
    context = Context(STAGE, config, 0, inputs, attempt, RunContext(), unused, "", progress_of("sft_data"))
    (source,) = config.mix.sources
    ((selected,), _) = sft_data._select(context, take(source, tmp_path / "given", 9).shards, tmp_path)
    assert [sample.reason for sample in read_samples(selected)] == ["contaminated", "contaminated", ""]


@pytest.mark.slow
def test_given_rows_join_the_data_set_and_a_changed_file_makes_it_anew(tmp_path: Path, r1: Any) -> None:
    from grpo.training.pretrain import train_tokenizer

    command = type(r1)(tmp_path)
    publish(tmp_path, "reasoning_rl")
    folder = tmp_path / "policy"
    train_tokenizer(
        ["I say 1 and 2 and 3."] * 50, Pretrain(vocabulary=320, steps=1, optimizer=Optimizer(learning_rate=1e-3))
    ).save_pretrained(folder)
    problems, path = publish(tmp_path, "problems", "a"), tmp_path / "talk.jsonl"
    sources = f'sft_data.mix.sources=[{{name="talk",path="{path}",licence="cc0"}}]'

    def run() -> tuple[str, Any]:
        sets = [part for value in [*SETTINGS, sources] for part in ("--set", value)]
        inputs = ["--input", f"problems={problems}", "--input", f"reasoning_rl={folder}"]
        done = command("run", "tiny", "--only", "sft_data", *sets, *inputs, "--json")
        assert done.returncode == 0, done.stderr[-3000:]
        (stage,) = json.loads(done.stdout.splitlines()[-1])["stages"]
        return stage["status"], Store(tmp_path).resolve(stage["key"])

    write(path, 45)
    status, made = run()
    assert (status, made.counts["given_talk_taken"], made.counts["general_kept"]) == ("ran", 45, 45)
    said = [row["completion"] for row in demonstrations(made.path / TRAIN)]
    assert {f"I say {i}." for i in range(45)} <= set(said) and any("<think>" in text for text in said)
    assert "| talk | 45 | 45 | cc0 |" in (made.path / "README.md").read_text()
    assert run()[0] == "reused"
    write(path, 46)
    status, made = run()
    assert (status, made.counts["given_talk_taken"]) == ("ran", 46)
    path.write_text('{"text": "x"}')
    sets = [part for value in [*SETTINGS, sources] for part in ("--set", value)]
    done = command("run", "tiny", "--only", "sft_data", *sets, "--input", f"problems={problems}")
    assert done.returncode == 2 and "columns are text; a row needs messages" in done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_teacher_answers_the_general_prompts(tmp_path: Path, r1: Any) -> None:
    command = type(r1)(tmp_path)
    policy = publish(tmp_path, "reasoning_rl")
    chats = [
        Problem(f"c{i}", [{"role": "user", "content": f"Talk about {i}."}], "", "none", "general", "en", "chat")
        for i in range(20)
    ]
    with Store(tmp_path).attempt("problems", artifact_key("problems", 1, {"of": "both"}, {})) as attempt:
        write_rows(attempt.out / TRAIN_PROBLEMS, [*sums("a", 20), *chats], Problem)
        write_rows(attempt.out / HELD_OUT, sums("held out", 10, 1000), Problem)
        problems = attempt.publish(stage_version=1, config={"of": "both"}).key
    teacher = 'sft_data.teacher={engine={kind="function",function="tests.support.user_engines:adder"},'
    teacher += "sampling={temperature=1.0,max_new_tokens=50}}"
    sets = [*SETTINGS, "sft_data.general=20", "sft_data.judged=[]", teacher]
    inputs = ["--input", f"problems={problems}", "--input", f"reasoning_rl={policy}"]
    done = command("run", "tiny", "--only", "sft_data", *(p for v in sets for p in ("--set", v)), *inputs, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    (stage,) = json.loads(done.stdout.splitlines()[-1])["stages"]
    made = Store(tmp_path).resolve(stage["key"])
    rows = pq.read_table(made.path / TRAIN).to_pylist()
    by = {row["domain"]: row["policy"] for row in rows}
    assert by["general"] == "tests.support.user_engines:adder" and len(by["reasoning"]) == 64
    # What is learnt from has the prompt alone, without what the teacher was told.
    assert {row["prompt"][0]["content"] for row in rows if row["domain"] == "general"} <= {c.text for c in chats}
