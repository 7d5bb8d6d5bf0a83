"""Programs without walls: a warning, or, where the recipe says so, a refusal; nothing where there are no programs."""

from __future__ import annotations

import pytest

from grpo.config.scoring import Scoring
from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.sandbox import run as sandbox
from grpo.sandbox.run import Means
from grpo.scoring.sandbox_walls import check_walls
from tasks.evaluation.programs import unwalled_programs
from tasks.evaluation.sets.settings import SetData
from tasks.problems.sources import FileSource


def problem(verifier: str) -> Problem:
    return Problem("1", [{"role": "user", "content": "?"}], "", verifier, "reasoning", "en", "s")


CODE, MATH = problem("code"), problem("math")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without namespaces and filters, whose user is not root."""
    monkeypatch.setattr(sandbox, "_means", lambda: Means(False, False, False, "/usr/bin/python3"))
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: 1000)


def test_programs_without_walls_are_told(bare: None, capsys: pytest.CaptureFixture[str]) -> None:
    check_walls([MATH, CODE], Scoring())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("notice: ") and "they reach the network, they read this user's files" in line


def test_a_recipe_can_refuse_them(bare: None) -> None:
    with pytest.raises(InputError, match="scoring.sandbox is 'walls', but programs"):
        check_walls([MATH, CODE], Scoring(sandbox="walls"))


def test_other_answers_need_no_walls(bare: None, capsys: pytest.CaptureFixture[str]) -> None:
    check_walls([MATH], Scoring(sandbox="walls"))
    assert not capsys.readouterr().err


def test_walls_that_stand_are_not_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sandbox, "_means", lambda: Means(True, True, True, "/usr/bin/python3", True))
    check_walls([CODE], Scoring(sandbox="walls"))
    assert not capsys.readouterr().err


def test_a_plan_tells_it_of_sources_and_sets_with_programs(bare: None) -> None:
    def file(**fields: str) -> FileSource:
        return FileSource.model_validate({"path": "rows.jsonl", **fields})

    assert unwalled_programs([file()], [SetData(name="aime2024")]) is None
    for sources, sets in (
        ([file(verifier="code")], []),
        ([file(verifier_column="how")], []),  # any row may name it
        ([], [SetData(name="livecodebench", path="rows.jsonl")]),
        ([], [SetData(name="own", source=file(verifier="code"))]),
    ):
        assert "they can end this user's processes" in str(unwalled_programs(sources, sets))


def test_the_default_leaves_records_as_they_were() -> None:
    assert "sandbox" not in Scoring().model_dump() and Scoring(sandbox="walls").model_dump()["sandbox"] == "walls"
