"""The data card: its header, that its tables add up, and that nothing in a sample breaks it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo.data.records import Problem, Sample, write_rows
from grpo.data.template import parse, render
from tasks.sft_data.card import fenced, table, write_card
from tasks.sft_data.mix import mix
from tasks.sft_data.mix_settings import MixSettings
from tasks.sft_data.plots import plot
from tasks.sft_data.statistics import read

ABOUT = {
    "title": "Sums: a trial",
    "description": "Forty sums.",
    "command": "r1 run tiny --seed 3",
    "settings": {"samples_per_problem": 2},
    "judge": {"kind": "openai", "agreement": 0.96, "agreement_ci95": [0.9, 0.99]},
    "judge_prompts": {"correct.txt": "0f" * 8},
    "inputs": {"problems": "ab" * 8},
    "device": "cpu",
}


@pytest.fixture
def made(tmp_path: Path, problem: Callable[..., Problem]) -> Callable[..., tuple[dict[str, Any], Path]]:
    """40 sums, the first 10 of them wrong, mixed with the settings given; the card lies in the folder."""

    def make(**settings: Any) -> tuple[dict[str, Any], Path]:
        problems = {
            str(i): problem(str(i), f"what is {i} | ```{i}```?", source="sums|x", language="de-CH") for i in range(40)
        }
        samples = []
        for i in range(40):
            text = render(f"let me see, {i}\n```python\nprint({i})\n```", f"{i} - 1")
            parts = parse(text)
            verdict = ("dropped", "incorrect") if i < 10 else ("kept", "")
            found: Any = (text, parts.reasoning, parts.summary, "", {}, i, "stop")
            samples.append(Sample(str(i), "digest", *found, "reasoning", "de-CH", 0, "sums|x", "vllm", 3, *verdict))
        write_rows(tmp_path / "shard.parquet", samples, Sample)
        values = {"licences": {"sums*": "MIT"}, **settings}
        out = tmp_path / "out"
        statistics = mix([tmp_path / "shard.parquet"], lambda _: problems, MixSettings(**values), 3, out)
        write_card(out, statistics, ABOUT)
        return statistics, out

    return make


def rows_of(card: str, section: str) -> list[list[str]]:
    """Cells of all tables of a section."""
    text = re.split(r"^## ", card, flags=re.MULTILINE)
    body = next(part for part in text if part.startswith(section))
    lines = [line for line in body.splitlines() if line.startswith("|") and not line.startswith("|-")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_header_is_yaml_that_names_the_splits(made: Any) -> None:
    _, out = made(validation_share=0.1)
    header = yaml.safe_load((out / "README.md").read_text().split("---\n")[1])
    assert header["configs"][0]["data_files"] == [
        {"split": "train", "path": "examples/train/*.parquet"},
        {"split": "validation", "path": "examples/validation/*.parquet"},
    ]
    assert (header["license"], header["language"], header["size_categories"]) == ("mit", ["de"], ["n<1K"])
    assert header["pretty_name"] == "Sums: a trial"


def test_no_split_is_named_that_is_not_there(made: Any) -> None:
    _, out = made()
    header = yaml.safe_load((out / "README.md").read_text().split("---\n")[1])
    assert [files["split"] for files in header["configs"][0]["data_files"]] == ["train"]


@pytest.mark.parametrize(("licences", "told"), [({}, "unknown"), ({"*": "My own licence"}, "other")])
def test_a_licence_that_the_hub_does_not_know(made: Any, licences: dict[str, str], told: str) -> None:
    _, out = made(licences=licences)
    card = (out / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["license"] == told
    assert rows_of(card, "Sources")[1] == ["sums\\|x", "40", "30", licences.get("*", "unknown")]


def test_the_tables_hold_the_numbers_and_add_up(made: Any) -> None:
    _, out = made(validation_share=0.1)
    card = (out / "README.md").read_text()
    size = rows_of(card, "Size")
    assert size[:2] == [
        ["part", "examples", "short of", "train", "validation", "tokens", "wanted"],
        ["reasoning", "30", "0", "27", "3", "735", "all there is"],  # 10 + 11 + ... + 39 = 735
    ]
    assert size[3] == ["all", "30", "0", "27", "3", "735", "all there is"]
    dropped = rows_of(card, "What was dropped")
    assert dropped[:4] == [
        ["", "all", "reasoning"],
        ["sampled", "40", "40"],
        ["incorrect", "10", "10"],
        ["kept", "30", "30"],
    ]
    assert dropped[-1] == ["sums\\|x", "40", "10", "30"]
    length = rows_of(card, "Length")
    assert length[1] == ["reasoning", "24.5", "24", "38", "39", "735"]
    assert sum(int(row[-1]) for row in length if re.fullmatch(r"\d+-\d+", row[0])) == 30


def test_it_says_how_to_make_it_again(made: Any) -> None:
    _, out = made()
    card = (out / "README.md").read_text()
    assert "```bash\nr1 run tiny --seed 3\n```" in card and '"samples_per_problem": 2' in card
    told = dict(rows_of(card, "Making it again")[1:])
    assert told == {
        **{"seed": "3", "policy": "digest (30 examples)", "engine": "vllm (30 examples)"},
        **{"inputs: problems": "ab" * 8, "device": "cpu"},
    }
    assert ["agreement", "0.96"] in rows_of(card, "Judge") and ["correct.txt", "0f" * 8] in rows_of(card, "Judge")


def test_statistics_beside_it_hold_the_same(made: Any) -> None:
    statistics, out = made()
    assert read(out) == json.loads(json.dumps({**statistics, "about": ABOUT}))


def test_no_backticks_of_a_sample_end_its_block(made: Any) -> None:
    _, out = made()
    assert "\n````text\nwhat is " in (out / "README.md").read_text()
    assert fenced("a ```` b") == "`````text\na ```` b\n`````"
    assert fenced("x" * 601) == f"```text\n{'x' * 600} …\n```"


def test_cells_keep_to_their_column() -> None:
    assert table(["name", "n"], [["a|b\nc", 1234]]) == "| name | n |\n|---|---:|\n| a\\|b c | 1,234 |"


def test_plots_are_pictures_and_the_same_each_time(made: Any, tmp_path: Path) -> None:
    statistics, _ = made()
    first = [path.read_bytes() for path in plot(statistics, tmp_path / "a")]
    assert [path.read_bytes() for path in plot(statistics, tmp_path / "b")] == first
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 5000 for picture in first)
