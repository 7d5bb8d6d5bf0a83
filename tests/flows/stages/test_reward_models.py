"""The stage on preferences from files: what enters its key, and an ensemble as it is really trained."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from flows.recipe.load import load_recipe
from flows.recipe.sections import RewardModels
from flows.stage_contract.stage import find_key
from flows.stages.reward_models import STAGE
from grpo.config.common import Hardware, Optimizer
from grpo.config.supervised import Pretrain
from grpo.data.held_out import read_held_out
from grpo.data.records import Problem, write_rows
from grpo.errors import InputError
from grpo.scoring.reward_model import RewardModelScorer
from grpo.training.pretrain import train_tokenizer

TRAINING = {
    "epochs": 12,
    "batch_size": 16,
    "optimizer": {"learning_rate": 0.01, "final_learning_rate_share": 0.1},
    "hardware": {"device": "cpu"},
}
RUN = """
import json, sys
from flows.home import home, prepare_environment
prepare_environment()
from flows.recipe.sections import RewardModels
from flows.stage_flows import reward_models
from flows.prefect_server import prefect_server
config, inputs = json.load(sys.stdin)
with prefect_server(home() / "logs"):
    print(json.dumps(reward_models(RewardModels.model_validate(config), inputs, return_state=True).result()))
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Pairs and labels in which 'yes' is better, and safer, than 'no'; a small model with random weights; problems,
    of which one that checkpoints are evaluated on is among the prompts."""
    folder = tmp_path_factory.mktemp("given")
    prompts = [f"Say {i} and {i * 7 % 11}" for i in range(80)]
    pairs = [
        {"prompt": prompt, "chosen": f"yes {i % 7}", "rejected": f"no {i % 5}"} for i, prompt in enumerate(prompts)
    ]
    lines = [json.dumps(pair) for pair in pairs]
    (folder / "pairs.jsonl").write_text("\n".join([*lines, "{", lines[0]]) + "\n")  # a bad record, and one twice
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "response", "label"])
        writer.writerows([p, *(("yes", "safe") if i % 2 else ("no", "unsafe"))] for i, p in enumerate(prompts))
    (folder / "problems").mkdir()
    asked = Problem("p", [{"role": "user", "content": prompts[3]}], "", "none", "general", "en", "test")
    write_rows(folder / "problems" / "held_out.parquet", [asked], Problem)
    tokenizer = train_tokenizer(
        [f"{p} yes no" for p in prompts],
        Pretrain(vocabulary=320, steps=1, context=64, optimizer=Optimizer(learning_rate=1e-3)),
    )
    torch.manual_seed(0)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids)).save_pretrained(folder / "sft")
    tokenizer.save_pretrained(folder / "sft")
    config = {
        "prompts": 0,
        "files": [{"path": str(folder / "pairs.jsonl"), "on_bad_record": "skip"}, {"path": str(folder / "labels.csv")}],
        "held_out_share": 0.25,
        "helpful": {**TRAINING, "ensemble": 2, "margin": 0.5, "centring": 0.01},
        "safe": TRAINING,
    }
    inputs = {"problems": str(folder / "problems"), "sft": str(folder / "sft")}
    return {"folder": folder, "config": config, "inputs": inputs}


def test_files_enter_the_key_by_what_is_in_them(given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))

    def key(folder: Path) -> str:
        files = [{**file, "path": folder / Path(file["path"]).name} for file in given["config"]["files"]]
        config = RewardModels.model_validate({**given["config"], "files": files})
        return find_key(STAGE, config, given["inputs"], 0)[1]

    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("pairs.jsonl", "labels.csv"):
        (moved / name).write_bytes((given["folder"] / name).read_bytes())
    assert key(moved) == key(given["folder"])
    with (moved / "labels.csv").open("a") as file:
        file.write("Say more,yes,safe\n")
    assert key(moved) != key(given["folder"])


@pytest.mark.slow
def test_an_ensemble_from_files_alone(given: Any, tmp_path: Path, r1: Any) -> None:
    command = type(r1)(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps([given["config"], given["inputs"]]),
        env=command.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout.splitlines()[-1])
    counts, metrics = made["counts"], made["metrics"]
    assert {name: counts[f"file0_{name}"] for name in ("rows", "bad_records", "pairs")} == {
        **{"rows": 82, "bad_records": 1, "pairs": 81}
    }
    assert (counts["helpful_duplicates"], counts["file1_labels"]) == (1, 80)
    assert (counts["helpful_leaked"], counts["safe_leaked"]) == (1, 1)
    assert metrics["helpful_held_out_accuracy"] >= 0.9 and metrics["safe_held_out_accuracy"] >= 0.9
    assert metrics["helpful_held_out_accuracy_low"] <= metrics["helpful_held_out_accuracy"]

    (out,) = tmp_path.glob("artifacts/reward_models/*/1")
    assert "line 81: not JSON" in (out / "bad_records.jsonl").read_text()
    assert sorted(path.name for path in (out / "plots").iterdir()) == [
        f"{name}_{kind}.png" for name in ("helpful", "safe") for kind in ("calibration", "scores")
    ]
    assert {path.name for path in tmp_path.rglob("*.png")} == {path.name for path in (out / "plots").iterdir()}
    assert len([*tmp_path.rglob("helpful_scores.png")]) == 2  # in the store and in MLflow

    members = [out / "helpful" / f"member-0{number}" for number in (0, 1)]
    first, second = (load_file(member / "model.safetensors") for member in members)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    rows = read_held_out(out / "helpful")
    assert 10 <= len(rows) <= 30 and max(row["uncertainty"] for row in rows) > 0
    asked = [row["messages"] for row in rows], [row["chosen"] for row in rows]
    scores = RewardModelScorer(str(out / "helpful"), Hardware(device="cpu"))(*asked)
    assert scores == pytest.approx([row["chosen_score"] for row in rows], abs=1e-4)
    of_members = [[row["chosen_score"] for row in read_held_out(member)] for member in members]
    assert scores == pytest.approx([(a + b) / 2 for a, b in zip(*of_members, strict=True)], abs=1e-4)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("reward_models.prompts=0", "prompts is 0 and there are no files"),
        ("reward_models.safe.margin=1", "margin and centring are for pairs"),
        ("reward_models.files=[{path='a.jsonl', kind='file'}]", "unknown field"),
        ("alignment_rl.uncertainty_penalty=1", "set reward_models.helpful.ensemble to 2 or more"),
        ("reasoning_rl.uncertainty_penalty=1", "rewards name neither 'helpful' nor 'safe'"),
    ],
)
def test_what_does_not_go_together_is_said(override: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe("tiny", [override])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_goes_together() -> None:
    changes = ["reward_models.prompts=0", "reward_models.files=[{path='a.jsonl'}]", "reward_models.helpful.ensemble=2"]
    recipe = load_recipe("tiny", [*changes, "alignment_rl.uncertainty_penalty=0.5"])
    assert recipe.reward_models.files[0].on_bad_record == "stop"
    assert recipe.alignment_rl.uncertainty_penalty == 0.5
