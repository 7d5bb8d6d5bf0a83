"""A secret in any field of a recipe is refused before anything records it. The fields come from the schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from flows import stage_flows
from flows.recipe.load import load_recipe
from flows.recipe.schema import Recipe
from flows.recipe.sections import Problems
from flows.stage_contract.stage import RunContext
from grpo.errors import InputError
from grpo.secret_values import is_secret_name
from tasks.store.store import Store

PLANTS = {
    "url": "https://someone:PLANTED@host/v1",
    "parameter": "https://host/v1?api_key=PLANTED",
    "key": "sk-PLANTED0123456789abcdef",
    "bearer": "Bearer PLANTED0123456789",
}


def models_in(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """Models that a field's annotation names, with the step of a path that leads to them: none, an index, a name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
    for inner in get_args(annotation):
        step = {list: ".0", tuple: ".0", dict: ".some"}.get(getattr(annotation, "__origin__", None), "")
        yield from ((model, step + more) for model, more in models_in(inner))


def fields(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """The path of every field of a recipe, those of all kinds of a union included."""
    for name, field in model.model_fields.items():
        yield path + name
        for inner, step in models_in(field.annotation):
            yield from fields(inner, f"{path}{name}{step}.")


FIELDS = sorted(set(fields(Recipe)))


def test_the_walk_sees_the_fields() -> None:
    known = {"name", "problems.sources.0.path", "reasoning_rl.optimizer.kind", "evaluate.sampling.top_p"}
    known |= {"reward_models.judge.base_url", "sft_data.judge.request", "sft_data.engine.url", "sft_data.engine.body"}
    known |= {"distill.students.0.base.pretrain.hidden", "gates.0.name", "cold_start_from_zero.rewriter.engine.options"}
    assert known - {*FIELDS} == set() and len(FIELDS) > 500


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_a_secret_in_any_field_is_refused(plant: str, tmp_path: Any) -> None:
    for path in FIELDS:
        recipe = tmp_path / "planted.toml"
        recipe.write_text(_toml(path, repr(plant)))
        with pytest.raises(InputError) as refused:
            load_recipe(str(recipe))
        said = str(refused.value)
        assert f"{path}: this" in said and "environment variable" in said, (path, said)
        assert "PLANTED" not in said and "\n" not in said


def test_a_secret_below_any_table_is_refused(tmp_path: Any) -> None:
    for path in FIELDS:
        for name in ("api_key", "X-Api-Key", "hf_token", "Authorization", "password"):
            recipe = tmp_path / "planted.toml"
            recipe.write_text(_toml(path, f"{{ headers = {{ {name} = 'PLANTED' }} }}"))
            with pytest.raises(InputError, match=f"{path}.headers.{name}: looks like a secret") as refused:
                load_recipe(str(recipe))
            assert "PLANTED" not in str(refused.value)


def _toml(path: str, value: str) -> str:
    """A list's index becomes a table's name: the check comes before the types."""
    return ".".join(f'"{name}"' for name in path.split(".")) + f" = {value}\n"


def test_overrides_are_refused_too() -> None:
    for override in (
        "reward_models.judge.base_url=https://someone:PLANTED@host/v1",
        "reward_models.judge.request.api_key=PLANTED",
        "reward_models.judge.request={headers={Authorization='PLANTED'}}",
        "nowhere.at.all.password=PLANTED",
        "name.api_key=PLANTED",
    ):
        with pytest.raises(InputError) as refused:
            load_recipe("tiny", [override])
        assert "PLANTED" not in str(refused.value)


def test_no_field_of_ours_has_the_name_of_a_secret() -> None:
    assert [path for path in FIELDS if is_secret_name(path.rpartition(".")[2])] == []


def test_a_stage_on_its_own_refuses_as_a_recipe_does(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    config = Problems.model_validate({"sources": [{"kind": "file", "path": "/data/sk-PLANTED0123456789abcdef"}]})
    with pytest.raises(InputError, match=r"stage 'problems': sources.0.path: this looks like a key") as refused:
        stage_flows.problems.fn(config, {}, 0, RunContext())
    assert "PLANTED" not in str(refused.value)
    assert not Store(tmp_path).find("problems") and not [*tmp_path.iterdir()]
