"""The claims, the seeds of the report, the journal and the page of benchmarks/learning.py, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


def result(dev2: float, refused: float = 0.0, key: str = "0a") -> dict[str, Any]:
    common = {"format": 1.0, "refusal": 1.0, "refused_harmless": 0.0, "over_refusal": refused, "win_rate_dev3": 0.8}
    accuracy = {"base": 0.0, "dev1": 0.25, "dev2": dev2, "dev3": 0.5, "r1": 0.5}
    table = {
        name: {**common, "pass@1": value, "stated": value, "steps_right": 0.97}
        | {"alignment_ci95": [5.0, 6.0] if name == "r1" else [1.0, 2.0]}
        for name, value in accuracy.items()
    }
    table["base"] |= {"format": 0.125, "stated": 0.25}
    table["dev1"]["steps_right"] = 0.85
    rewards = {"helpful_held_out_accuracy": 0.9, "safe_held_out_accuracy": 0.96}
    stages = [
        {"name": "reward_models", "key": "ff", "metrics": rewards},
        {"name": "evaluate", "key": key, "metrics": {}},
    ]
    return {"stages": stages, "checkpoints": table}


def test_the_seeds_of_the_report_follow_the_rule() -> None:
    from claims import Claims

    rule = Claims.read().seeds
    # sha256("4008") = 1..., of 4000 to 4007 none begins with 0 to 3.
    assert rule.seeds() == [4008, 4009, 4011, 4014, 4017, 4018, 4031, 4032, 4033, 4034]
    assert not set(rule.seeds()) & set(rule.tuned_on)


def test_numbers_by_name() -> None:
    from claims import look_up

    of = result(0.5)
    assert look_up(of, "base/format") == 0.125 and look_up(of, "r1/alignment_low") == 5.0
    assert look_up(of, "dev3/alignment_high") == 2.0
    assert look_up(of, "reward_models/safe_held_out_accuracy") == 0.96
    with pytest.raises(KeyError, match="no checkpoint or stage 'dev9'"):
        look_up(of, "dev9/pass@1")
    with pytest.raises(KeyError, match="no such metric"):
        look_up(of, "dev1/pass@2")


def test_a_claim_holds_up_to_its_bound() -> None:
    from claims import Claim

    over = Claim(says="", metric="dev2/pass@1", minus="dev1/pass@1", at_least=0.15)
    assert over.holds(over.value(result(0.4))) and not over.holds(over.value(result(0.39)))
    assert over.bound == "at least 15.0"
    most = Claim(says="", metric="base/format", at_most=0.1)
    assert not most.holds(most.value(result(0.4)))
    with pytest.raises(ValueError, match="give either at_least or at_most"):
        Claim(says="x", metric="base/format")


def test_a_study_has_every_seed_once_before_it_varies_the_machine() -> None:
    from learning_cells import cells

    names = [cell.name for cell in cells([7, 8], [2, 1], ["native", "avx2"], ["quiet"])]
    assert names[:3] == ["seed7-2t-native-quiet", "seed8-2t-native-quiet", "seed7-2t-avx2-quiet"]
    assert len(names) == len(set(names)) == 8


def test_the_journal_keeps_finished_cells_of_this_version(tmp_path: Path) -> None:
    from learning_cells import Cell, Journal

    journal = Journal(tmp_path / "a" / "journal.jsonl", "tiny", "v1")
    record = {"cell": {"seed": 1, "threads": 2, "cpu": "native", "load": "quiet"}, "seconds": 60.0, "error": "no space"}
    journal.add(record)
    journal.add({**record, "result": result(0.5)})  # tried again
    with journal.path.open("a") as file:
        file.write(json.dumps({**record, "recipe": "tiny", "version": "v2"}) + "\n" + '{"cell": {"se')  # a kill
    assert "result" in journal.records()[Cell(1, 2)] and len(journal.records()) == 1
    journal.add({**record, "cell": {"seed": 2, "threads": 2, "cpu": "native", "load": "quiet"}})
    assert [*journal.records()] == [Cell(1, 2), Cell(2, 2)]
    assert Journal(journal.path, "another recipe", "v1").records() == {}


def test_the_page_tells_of_every_cell_and_how_many_failed() -> None:
    from claims import Claims
    from learning_cells import Cell
    from learning_page import failed, page

    claims = Claims.read()
    records = {
        Cell(1, 2): {"seconds": 300.0, "result": result(0.5)},
        Cell(2, 2): {"seconds": 330.0, "result": result(0.3, refused=0.5)},
        Cell(3, 2): {"seconds": 12.0, "error": "no space left"},
    }
    assert failed(claims, records) == [Cell(2, 2), Cell(3, 2)]
    text = page(claims, records, [*records, Cell(4, 2)], "python benchmarks/learning.py", "tiny", "at commit 0")
    assert text.splitlines()[2].endswith(", at commit 0.")
    assert "3 of 4 cells were run; 2 of them failed a claim or did not end." in text
    assert "Not run yet: seed4-2t-native-quiet." in text
    assert "| Dev2 over Dev1, pass@1 | at least 15.0 | 1 of 2 | 15.0 | 5.0 to 25.0 |" in text
    assert "| pass@1 | 0.0 | 25.0 | 40.0 (30.0 to 50.0) | 50.0 | 50.0 |" in text
    assert "| 1 | 2 | native | quiet | 5.0 | first | none |" in text
    assert "| 5.5 | first | Dev2 over Dev1, pass@1: 5.0; R1 refuses harmless look-alikes: 50.0 |" in text
    assert "| 3 | 2 | native | quiet | 0.2 |  | the run failed: no space left |" in text


def test_the_page_tells_whether_a_seed_made_the_same_models_on_another_machine() -> None:
    from claims import Claims
    from learning_cells import Cell
    from learning_page import page

    records = {
        Cell(1, 1): {"seconds": 600.0, "result": result(0.5)},
        Cell(1, 2): {"seconds": 360.0, "result": result(0.5)},
        Cell(1, 2, "avx2"): {"seconds": 360.0, "result": result(0.5, key="0b")},
        Cell(1, 4): {"seconds": 6.0, "error": "no space left"},
    }
    text = page(Claims.read(), records, [*records], "python benchmarks/learning.py", "tiny", "at commit 0")
    assert "| 1 | 1 | native | quiet | 10.0 | first | none |" in text
    assert "| 1 | 2 | native | quiet | 6.0 | identical | none |" in text
    assert "| 1 | 2 | avx2 | quiet | 6.0 | others | none |" in text
    assert "| 1 | 4 | native | quiet | 0.1 |  | the run failed: no space left |" in text


def test_the_version_of_a_recipe_follows_what_its_stages_make() -> None:
    from recipe_version import recipe_version

    from flows.recipe.load import load_recipe
    from flows.stage_graphs import r1_graph

    def version(*overrides: str) -> str:
        recipe = load_recipe("tiny", overrides)
        return recipe_version(recipe, r1_graph(recipe))

    assert version() == version('name="other"') == version("sft.hardware.fused=false")
    assert version() != version("sft.epochs=7")
