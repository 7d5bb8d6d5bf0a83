"""The examples of CONTRIBUTING.md work as they stand there."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from prefect.server.schemas.actions import validate_base_job_template
from pydantic import BaseModel
from transformers import SeedOssConfig, SeedOssForCausalLM

from flows import stage_flows
from flows.home import LOGGERS
from flows.installation import resources
from flows.recipe import sections
from flows.stage_contract import stage as contract
from flows.stage_contract.runner import run_stage
from flows.stages import problems
from grpo.algorithms import objectives
from grpo.algorithms.tokens import Normalizers, Tokens
from grpo.config import judge as judge_settings
from grpo.config.rl import RL
from grpo.data.completions import Completion
from grpo.data.records import Problem, write_rows
from grpo.data.template import parse
from grpo.model.decoder import Decoder
from grpo.model.fused import blocks
from grpo.model.fused.decode_step import can_decode
from grpo.model.fused.layers import fuse
from grpo.model.packed.attention import NAME
from grpo.rewards import functions, registry
from grpo.rl import batch, metrics
from tasks.judges import rule
from tests.support import small_models

ROOT = Path(__file__).parents[1]
PROBLEM = Problem("hens", [{"role": "user", "content": "How many hens?"}], "277", "number", "reasoning", "en", "test")


def example(heading: str, language: str = "python", number: int = 0) -> str:
    """A code block of a section of CONTRIBUTING.md: of those in its language, the one with this number."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    block = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", section, re.DOTALL | re.MULTILINE)[number]
    return block[1] if heading == "A new recipe field" else textwrap.dedent(block[1])


def edited(module: ModuleType, *edits: tuple[str, str]) -> ModuleType:
    """A copy of a module with some of its text replaced, as a change to its file would do."""
    source = Path(str(module.__file__)).read_text()
    for old, new in edits:
        assert source.count(old) == 1, f"{module.__name__} has {old!r} {source.count(old)} times"
        source = source.replace(old, new)
    spec = importlib.util.spec_from_loader(f"{module.__name__}_edited", loader=None)
    assert spec
    copy = importlib.util.module_from_spec(spec)
    copy.__file__ = module.__file__
    sys.modules[spec.name] = copy  # where pydantic looks annotations up
    exec(compile(source, str(module.__file__), "exec"), vars(copy))
    return copy


def rl_settings(**fields: Any) -> RL:
    return RL.model_validate(
        {"steps": 1, "sampling": {"max_new_tokens": 8}, "optimizer": {"learning_rate": 1e-6}, **fields}
    )


def test_the_new_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REWARDS", dict(registry.REWARDS))
    exec(example("A new reward"), vars(functions) | vars(registry))
    term = rl_settings(rewards={"one_word": {"weight": 0.5, "bonus": 2.0}}).rewards["one_word"]
    for answer, score in (("277", 2.0), ("277 hens", 0.0)):
        text = f"<think>subtract</think><answer>{answer}</answer>"
        response = functions.Response(text, parse(text), tokens=9, finished=True, max_tokens=20)
        assert registry.score_one("one_word", term.options, PROBLEM, response) == score
    assert registry.total({"one_word": 2.0}, {"one_word": term.weight}) == 1.0


def test_the_new_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectives, "OBJECTIVES", dict(objectives.OBJECTIVES))
    exec(example("A new objective"), vars(objectives) | {"OBJECTIVES": objectives.OBJECTIVES})
    objective = objectives.Objective(
        rl_settings(objective="squared_penalty").objective,
        clip_eps_low=0.2,
        clip_eps_high=0.25,
        kl_coef=0,
        kl_estimator="k3",
        kl_stale_correction=False,
    )
    ones = torch.ones(1, 1)
    tokens = Tokens(
        logprobs=ones * math.log(1.5), old_logprobs=ones * 0, ref_logprobs=None, advantages=ones * 2, mask=ones
    )
    loss, _ = objective(tokens, Normalizers(sequences=1, tokens=1, budget=1))
    # 1.5 * 2 - 0.5^2 / (2 * 0.25) = 3 - 0.5, to be maximised.
    assert loss.item() == pytest.approx(-2.5)


def test_a_name_that_is_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="choose from grpo, "):
        rl_settings(objective="ppo2")


def test_the_new_metric() -> None:
    names = dict(vars(metrics))
    exec(example("A new metric"), names)

    def group(*completions: list[int]) -> Any:
        completed = [Completion(tokens, [0.0] * len(tokens), True) for tokens in completions]
        rewards = torch.zeros(len(completed))
        return batch.CompletionGroup(PROBLEM, [1], completed, [], [], rewards, None, None, None, None)

    # Two of two differ, one of two: (1 + 1/2) / 2.
    assert names["distinct_share"]([group([5, 6], [5]), group([5, 6], [5, 6])]) == {"distinct_share": 0.75}


def test_the_new_recipe_field() -> None:
    line = example("A new recipe field")
    copy = edited(sections, ("class Report(Section):\n", f"class Report(Section):\n{line}"))
    assert copy.Report().longest == 4000 and "Characters" in copy.Report.model_fields["longest"].description
    with pytest.raises(ValueError, match="greater than or equal to 80"):
        copy.Report(longest=1)
    stage = contract.Stage("report", 1, (), lambda context: contract.Outcome())
    keys = {
        contract.key_of(stage, report, 0, {})
        for report in (sections.Report(), copy.Report(), copy.Report(longest=4000), copy.Report(longest=80))
    }
    assert len(keys) == 3  # before, after, another value


def test_a_setting_of_how_fast_is_no_part_of_the_key() -> None:
    class Settings(BaseModel):
        longest: int = 80
        workers: int = 4

    assert contract.hashed_values(Settings()) == {"longest": 80}


def test_the_new_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    file = tmp_path / "prompt_lengths.py"
    file.write_text(example("A new stage"))
    spec = importlib.util.spec_from_file_location("prompt_lengths", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "prompt_lengths", module)
    spec.loader.exec_module(module)

    def write(context: contract.Context) -> contract.Outcome:
        write_rows(context.out / problems.TRAIN, [PROBLEM], Problem)
        return contract.Outcome()

    source = contract.Stage("problems", 1, (), write)
    run_stage(source, sections.Report(), {}, 0, contract.RunContext())
    added = vars(stage_flows) | {"PromptLengths": module.PromptLengths, "PROMPT_LENGTHS": module.STAGE}
    exec(example("A new stage", number=1), added)
    config, flow = module.PromptLengths(longest=2), added["prompt_lengths"]
    state, again = flow.fn(config), flow.fn(config)
    assert state.data["counts"] == {"prompts": 1, "too_long": 1}  # "How many hens?" has three words
    assert (state.data["status"], again.data["status"]) == ("ran", "reused")
    (words,) = (tmp_path / "home").glob("artifacts/prompt_lengths/*/*/words.json")
    assert json.loads(words.read_text()) == [3]
    step = contract.Step(module.STAGE)
    assert (step.flow_name, step.inputs) == (flow.name, {"problems": "problems"})


def test_the_new_stages_deployment() -> None:
    text = (ROOT / "deployments" / "prefect.yaml").read_text()
    assert text.count("\n  - <<: *light\n") >= 1  # as in the file
    line = textwrap.indent(example("A new stage", "yaml"), "  ")
    added = yaml.safe_load(f"{text}\n{line}")["deployments"][-1]
    assert added["entrypoint"] == "flows.stage_flows.prompt_lengths"
    assert added["work_pool"]["name"] == "r1-tasks" and added["name"] == "prompt_lengths"


def test_the_new_judge() -> None:
    names = dict(vars(rule))
    exec(example("A new judge"), names)
    copy = edited(
        judge_settings,
        ('"rule", "reference", "local", "openai"]', '"rule", "reference", "local", "openai", "brief"]'),
        ("_NEEDED = {", '_NEEDED = {"brief": (), '),
        ("_USED = {", '_USED = {"brief": set(), '),
    )
    chosen = copy.JudgeSettings(kind="brief")
    assert not chosen.is_model
    with pytest.raises(ValueError, match="quality_min is no setting of judge 'brief'"):
        copy.JudgeSettings(kind="brief", quality_min=0.1)
    with pytest.raises(ValueError, match="Input should be 'rule'"):
        judge_settings.JudgeSettings(kind="brief")
    judge = names["BriefJudge"](chosen)
    assert [judge.compare(PROBLEM, *pair) for pair in (("a", "bb"), ("bb", "a"), ("a", "b"))] == [1.0, -1.0, 0.0]
    assert judge.good(PROBLEM, "277") and judge.correct("?", "277", "277") == "undecided"


@torch.no_grad()
def test_the_new_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = SeedOssForCausalLM(SeedOssConfig(**small_models.SHAPE, head_dim=8)).eval()
    of_transformers = model(torch.tensor([[5, 6, 7]])).logits[0, -1:]
    model.set_attn_implementation(NAME)
    fuse(model)
    blocks.fuse_blocks(model)
    assert not blocks.has_fused_blocks(model.model)
    unfused = Decoder(model).add_groups([[5, 6, 7]], 1)
    monkeypatch.setattr(blocks, "BACKBONES", dict(blocks.BACKBONES))
    exec(example("A new model architecture"), vars(blocks) | {"BACKBONES": blocks.BACKBONES})
    blocks.fuse_blocks(model)
    assert blocks.has_fused_blocks(model.model)
    assert can_decode(model.model, model.lm_head)
    for logits in (unfused, Decoder(model).add_groups([[5, 6, 7]], 1)):
        torch.testing.assert_close(logits, of_transformers, atol=1e-4, rtol=1e-4)


def test_the_new_work_pool_type(tmp_path: Path) -> None:
    folder = tmp_path / "deployments"
    shutil.copytree(resources.FOLDER, folder)
    (folder / "pools" / "ecs.yaml").write_text(example("A new work-pool type", "yaml"))
    pools = {r.name: r.fields for r in resources.desired("ecs", folder=folder) if r.kind == "pool"}
    assert pools.keys() == {r.name for r in resources.desired("process") if r.kind == "pool"}
    assert {fields["type"] for fields in pools.values()} == {"ecs"}
    templates = {name: fields["base_job_template"] for name, fields in pools.items()}
    gpus = {name: template["variables"]["properties"]["gpus"]["default"] for name, template in templates.items()}
    assert gpus == {"r1-cpu": 0, "r1-tasks": 0, "r1-gpu": 1}
    for template in templates.values():  # Prefect refuses a template whose job names a variable that is not there
        validate_base_job_template(template)
        env = template["job_configuration"]["env"]
        assert env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"  # else runs count as lost after 90 s
        assert env["PREFECT_LOGGING_EXTRA_LOGGERS"] == LOGGERS
    token = {"HF_TOKEN": "{{ prefect.blocks.secret.hf-token }}"}
    with_token = resources.desired("ecs", folder=folder, credentials=token)
    pool = next(r for r in with_token if r.kind == "pool").fields["base_job_template"]
    assert token.items() <= pool["variables"]["properties"]["env"]["default"].items()
