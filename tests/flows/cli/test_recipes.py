"""`r1 recipes` and `r1 init`: every shipped recipe can be copied, says the same, and explains its fields."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main as cli
from flows.recipe.load import load_recipe, shipped, shipped_text
from flows.recipe.suggestions import paths_of, suggestion


def command(*arguments: str) -> int:
    given = cli.parser().parse_args(arguments)
    return cli.COMMANDS[given.command](given)


def test_the_shipped_recipes_are_listed_within_100_columns(capsys: Any) -> None:
    assert command("recipes", "--json") == 0
    listed = {of["name"]: of["description"] for of in json.loads(capsys.readouterr().out)["recipes"]}
    assert list(listed) == shipped() and listed["tiny"] == load_recipe("tiny").description
    assert command("recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100 and {line.split()[0] for line in lines} >= set(listed)


@pytest.mark.parametrize("name", shipped())
def test_a_copy_is_the_same_recipe_under_its_own_name(name: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "my-recipe.toml"
    assert command("init", str(path), "--from", name) == 0
    assert tomllib.loads(path.read_text()) == tomllib.loads(shipped_text(name)) | {"name": "my-recipe"}
    copy, original = load_recipe(str(path)), load_recipe(name)
    assert copy == original.model_copy(update={"name": "my-recipe"})
    lines = path.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("kl_coef"))
    described = " ".join(line.removeprefix("# ") for line in lines[first - 4 : first])
    assert type(copy.reasoning_rl).model_fields["kl_coef"].description in described
    assert sum(line.startswith("# Steps between checkpoints") for line in lines) == 1
    assert max(len(line) for line in lines if line not in shipped_text(name).splitlines()) <= 100


def test_the_copys_text_is_that_of_the_original_with_comments(tmp_path: Path) -> None:
    command("init", str(tmp_path / "tiny.toml"))
    rest = iter((tmp_path / "tiny.toml").read_text().splitlines())
    assert all(line in rest for line in shipped_text("tiny").splitlines())  # all lines, in their order


@pytest.mark.parametrize(
    ("file", "origin", "said"),
    [
        ("there.toml", "tiny", "there.toml: is there already; give a new name"),
        ("mine.txt", "tiny", "that ends in .toml"),
        ("my recipe.toml", "tiny", "give a name of letters"),
        ("mine.toml", "tinny", "did you mean 'tiny'?"),
        ("no/mine.toml", "tiny", "No such file or directory; give a file in a folder that can be written"),
    ],
)
def test_nothing_is_overwritten(file: str, origin: str, said: str, tmp_path: Path) -> None:
    from grpo.errors import InputError

    (tmp_path / "there.toml").write_text("mine")
    with pytest.raises(InputError, match=said.replace("?", r"\?")):
        command("init", str(tmp_path / file), "--from", origin)
    assert [path.name for path in tmp_path.iterdir()] == ["there.toml"]
    assert (tmp_path / "there.toml").read_text() == "mine"


def test_where_a_bare_name_may_belong() -> None:
    sections = ("reasoning_rl", "alignment_rl", "r1_zero", "rlhf_ppo")
    assert paths_of("kl_coef") == [f"{section}.kl_coef" for section in sections]
    assert paths_of("judgments_per_pair") == ["reward_models.judgments_per_pair"]
    assert paths_of("students") == ["distill.students"] and paths_of("nothing_at_all") == []
    assert suggestion(("judgments_per_pair",)) == "did you mean 'reward_models.judgments_per_pair'?"
    assert suggestion(("sft", "epoch")) == "did you mean 'epochs'?"
    assert suggestion(("problems", "sources", 0, "file", "paht")) == "did you mean 'path'?"
