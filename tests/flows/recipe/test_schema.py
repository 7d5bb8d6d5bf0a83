"""Recipes: what ships is valid, and what is wrong is said in one line."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from flows.recipe.load import load_recipe, shipped
from flows.recipe.pipeline_names import PIPELINE_NAMES
from flows.recipe.schema import Recipe
from flows.stage_graphs import GRAPHS
from grpo.data.template import BOXED_ZERO_TEMPLATE
from grpo.errors import InputError


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_are_valid(name: str) -> None:
    assert load_recipe(name).name == name


def test_what_ships() -> None:
    assert shipped() == ["qwen2.5-1.5b", "qwen3-0.6b", "r1-distill-qwen-7b", "r1-paper", "real", "smollm2-135m", "tiny"]


def test_every_field_is_described() -> None:
    def check(schema: dict, path: str) -> None:
        for name, field in schema.get("properties", {}).items():
            nested = any(key in str(field) for key in ("$ref", "const"))
            assert nested or field.get("description"), f"{path}.{name}"

    schema = Recipe.model_json_schema()
    for name, definition in schema["$defs"].items():
        check(definition, name)


def test_the_papers_numbers() -> None:
    paper = load_recipe("r1-paper")
    rl = paper.reasoning_rl
    assert (rl.prompts_per_step, rl.group_size, rl.minibatches) == (32, 16, 16)  # 512 a step, 8,192 a rollout
    assert (rl.optimizer.learning_rate, rl.kl_coef, rl.clip_eps_high) == (3e-6, 0.001, 10)
    assert (rl.sampling.temperature, rl.reference_refresh_steps) == (1.0, 400)
    assert paper.r1_zero is not None and paper.r1_zero.steps == 10_400
    align = paper.alignment_rl
    assert (align.steps, align.general_last_steps, align.sampling.temperature) == (1700, 400, 0.7)
    assert (paper.sft.batch_size, paper.sft.optimizer.learning_rate) == (128, 5e-5)
    assert paper.reward_models.helpful.batch_size == 256
    # R1-Zero's template asks for answer tags; from the cold start on a summary holds the answer in a box.
    assert paper.problems.answer_style == "boxed" and "<answer>" in paper.base.zero_template


def test_the_default_answer_style_leaves_records_as_they_were() -> None:
    tiny = load_recipe("tiny", ["base.zero_template=boxed"])
    assert "answer_style" not in tiny.problems.model_dump() | tiny.problems.sources[0].model_dump()
    assert load_recipe("tiny", ["problems.answer_style=auto"]).problems.model_dump()["answer_style"] == "auto"
    assert tiny.base.zero_template == BOXED_ZERO_TEMPLATE


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("reasoning_rl.group_size=1", "reasoning_rl.group_size"),
        ("reasoning_rl.grup_size=8", "did you mean 'group_size'?"),
        ("reasonin_rl.steps=8", "did you mean 'reasoning_rl'?"),
        ("reasoning_rl.sampling.temperature=0", "reasoning_rl.sampling.temperature"),
        ("reasoning_rl.steps=many", "reasoning_rl.steps"),
        ("reasoning_rl.kl_coef=true", "reasoning_rl.kl_coef: Input should be a valid number (got True)"),
        ("reasoning_rl.steps=true", "reasoning_rl.steps: Input should be a valid integer (got True)"),
        ("reasoning_rl.rewards={accuracy={weight=true}}", "accuracy.weight: Input should be a valid number"),
        ("evaluate.sampling.top_p='0.9'", "evaluate.sampling.top_p: Input should be a valid number"),
        ("reasoning_rl.steps", "write section.field=value"),
        ("name.x=1", "no field"),
        ("problems.sources.9.count=1", "must be a number below 2"),
        ("problems.sources.0.count=0", "count"),
        ("base.model=./x", "either model"),
        ("alignment_rl.general_last_steps=9999", "exceeds steps"),
        ("rlhf_ppo.method=grpo", "rlhf_ppo.method is 'grpo'; it must be 'ppo'"),
        ("distill.students=[]", "distill.students"),
        ("distill.students.1.name=small", "two students are called 'small'"),
        ("distill.students.0.name=dev2", "'dev2' is a checkpoint of the recipe"),
        ("distill.students.0.name=r1_2", "'r1_2' is a checkpoint of the recipe"),
        ("alignment.rounds=0", "alignment.rounds"),
        ("alignment.replay_share=1", "alignment.replay_share"),
    ],
)
def test_wrong_overrides_are_one_line(override: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        load_recipe("tiny", [override])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_whole_number_serves_where_a_fraction_is_asked() -> None:
    recipe = load_recipe("tiny", ["reasoning_rl.kl_coef=1", "reasoning_rl.rewards={accuracy=2}"])
    assert (recipe.reasoning_rl.kl_coef, recipe.reasoning_rl.rewards["accuracy"].weight) == (1.0, 2.0)


def test_overrides_take_toml_values() -> None:
    recipe = load_recipe("tiny", ["reasoning_rl.steps=7", "report={samples=1}", "sft.max_steps=3"], seed=5)
    assert (recipe.reasoning_rl.steps, recipe.report.samples, recipe.sft.max_steps, recipe.seed) == (7, 1, 3, 5)


def test_unknown_recipe() -> None:
    with pytest.raises(InputError, match="did you mean 'tiny'"):
        load_recipe("tny")
    with pytest.raises(InputError, match="no such recipe file"):
        load_recipe("mine.toml")


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("name = [")
    with pytest.raises(InputError, match="not valid TOML"):
        load_recipe(str(path))
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(InputError, match="not UTF-8"):
        load_recipe(str(path))


def test_a_misspelt_section_is_named_before_what_is_missing_without_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    shipped_text = (resources.files("flows") / "recipes" / "tiny.toml").read_text(encoding="utf-8")
    path.write_text(shipped_text.replace("[cold_start_sft]", "[cold_startsft]"))
    with pytest.raises(InputError, match=r"cold_startsft: unknown field; did you mean 'cold_start_sft'\?$"):
        load_recipe(str(path))


def test_the_command_line_offers_every_pipeline() -> None:
    assert tuple(GRAPHS) == PIPELINE_NAMES


ODD = {
    "deep lists": ("a = " + "[" * 100_000, "nested too deeply"),
    "deep tables": ("a = " + "{a=" * 100_000, "nested too deeply"),
    "a deep name": (".".join("a" * 5_000) + " = 1", "nested too deeply"),
    "5,000 digits": ("seed = " + "9" * 5_000, "not valid TOML"),
    "hexadecimal": ("seed = 0x" + "f" * 100_000, "digits are too many"),
    "31 digits": ("seed = 1" + "0" * 30, "seed: 31 digits are too many; the largest number here is 2^53"),
    "no number": ("[evaluate]\nconfidence = nan", "evaluate.confidence: this is not a number (nan)"),
    "infinite": ("[evaluate]\nconfidence = inf", "evaluate.confidence: this is not a finite number (inf)"),
    "no TOML": ("a = = 1", "not valid TOML"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_one_line(name: str, tmp_path: Path) -> None:
    text, said = ODD[name]
    (tmp_path / "odd.toml").write_text(text)
    with pytest.raises(InputError) as error:
        load_recipe(str(tmp_path / "odd.toml"))
    assert said in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=1\nname = 'other'", "--set seed: there is more than one value"),
        ("seed=1\n[sft]\nepochs = 2", "--set seed: there is more than one value"),
        ("seed=" + "9" * 5_000, "--set seed: Exceeds the limit"),
        ("seed=" + "[" * 100_000, "--set seed: lists or tables are nested too deeply"),
        (".".join("a" * 5_000) + "=1", "nested too deeply"),
        ("seed=1" + "0" * 30, "seed: 31 digits are too many"),
        ("r1_zero.clip_eps_high=inf", "r1_zero.clip_eps_high: this is not a finite number (inf)"),
        ("reasoning_rl.clip_eps_high=-1e999", "clip_eps_high: this is not a finite number (-inf)"),
        ("problems.sources." + "1" * 5_000 + "=1", "must be a number below"),
        ("reasoning_rl.group_size=100_000_000_000", "group_size: Input should be less than or equal to 65536"),
    ],
)
def test_odd_overrides_are_one_line(override: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        load_recipe("tiny", [override])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_an_override_may_span_lines() -> None:
    recipe = load_recipe("tiny", ["gates=[\n  {name='a', after='sft', review=5},\n]", "description=two\nlines"])
    assert [gate.name for gate in recipe.gates] == ["a"] and recipe.description == "two\nlines"
