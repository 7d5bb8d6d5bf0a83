"""docs/coverage.md: every file and test that it names exists, and every way to reach a thing is accepted."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from flows.cli.main import parser
from flows.recipe.load import load_recipe
from flows.stage_graphs import GRAPHS

ROOT = Path(__file__).parents[1]
ROW = re.compile(
    r"^\| (?P<paper>[^|]+) \| (?P<what>[^|]+) \| `(?P<file>\S+)` \| `(?P<reach>[^`|]+)` \| `(?P<test>\S+)` \|$"
)


def rows() -> list[re.Match[str]]:
    lines = (ROOT / "docs" / "coverage.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("| ") and not line.startswith(("| paper", "|---"))]
    found = [ROW.match(line) for line in table]
    assert all(found), [line for line, row in zip(table, found, strict=True) if row is None]
    return [row for row in found if row]


def named(row: re.Match[str]) -> str:
    return f"{row['paper']}: {row['what']}"


@pytest.mark.parametrize("row", rows(), ids=named)
def test_file_and_test_exist(row: re.Match[str]) -> None:
    assert (ROOT / row["file"]).is_file()
    path, _, name = row["test"].partition("::")
    assert name in {
        node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("reach", sorted({row["reach"] for row in rows()}))
def test_it_can_be_reached(reach: str) -> None:
    """The command parses, its settings are valid ones, and its stage is in the flow."""
    command = f"r1 run tiny {reach}" if reach.startswith("--") else reach
    program, *arguments = shlex.split(command)
    assert program == "r1"
    args = parser().parse_args(arguments)
    if args.command in ("run", "plan"):
        recipe = load_recipe(args.recipe, args.overrides)
        steps = {step.name for step in GRAPHS[args.flow](recipe)}
        assert args.only is None or args.only in steps


def test_it_has_each_stage_of_the_recipe() -> None:
    files = {row["file"] for row in rows()}
    stages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "flows" / "stages").glob("*.py")}
    covered = {Path(name).stem for name in files & stages}
    made = {step.stage.build.__module__ for name in GRAPHS for step in GRAPHS[name](load_recipe("tiny"))}
    assert {module.rpartition(".")[2] for module in made} - covered <= {"problems", "base_model", "report"}
