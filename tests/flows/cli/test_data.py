"""`r1 data`: what it shows of a data set in the store, with and without statistics, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from grpo.data.records import Problem, Sample, write_rows
from grpo.data.template import parse, render
from tasks.sft_data.card import write_card
from tasks.sft_data.mix import mix
from tasks.sft_data.mix_settings import MixSettings
from tasks.store.manifest import Manifest, artifact_key
from tasks.store.store import Store


def problem(i: int) -> Problem:
    return Problem(str(i), [{"role": "user", "content": f"what is {i}?"}], "3", "math", "reasoning", "en", "sums")


def sample(i: int, reason: str = "") -> Sample:
    text = render(f"thought of {i}\n" + "and so on\n" * 20, f"[bold]{i}[/bold]")
    parts = parse(text)
    found = (text, parts.reasoning, parts.summary, "", {}, 40 + i, "stop")
    verdict = "dropped" if reason else "kept"
    return Sample(str(i), "d", *found, "reasoning", "en", 0, "sums", "e", 3, verdict, reason)  # type: ignore[arg-type]


PROBLEMS = {str(i): problem(i) for i in range(30)}
SAMPLES = [sample(i, "incorrect" if i < 5 else "repetition" if i < 7 else "") for i in range(30)]


def publish(home: Path, *, stage: str = "sft_data", mixed: bool = True, shards: bool = True) -> Manifest:
    key = artifact_key(stage, 1, {"seed": 0, "mixed": mixed, "shards": shards}, {})
    with Store(home).attempt(stage, key) as attempt:
        (attempt.out / "samples").mkdir()
        shard = attempt.out / "samples" / "00000.parquet"
        write_rows(shard, SAMPLES, Sample)
        if mixed:
            settings = MixSettings.model_validate({"parts": {"math": {"sources": ["sums"], "count": 20}}})
            write_card(attempt.out, mix([shard], lambda _: PROBLEMS, settings, 0, attempt.out), {})
        if not shards:
            shard.unlink()
        return attempt.publish(stage_version=1, config={"seed": 0, "mixed": mixed, "shards": shards})


@pytest.fixture
def command(tmp_path: Path, r1: Any) -> Any:
    return type(r1)(tmp_path)


def shown(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_funnel_adds_up_and_samples_of_every_outcome_are_shown(tmp_path: Path, command: Any) -> None:
    made = publish(tmp_path)
    text = shown(command("data", made.digest[:10]))
    assert "20 examples of 30 samples" in text
    funnel = re.findall(r"^(sampled|incorrect|not_drawn|repetition|kept) +(\d+) +(\d+) +([\d.]+)%", text, re.MULTILINE)
    assert funnel == [
        ("sampled", "30", "30", "100.0"),
        ("incorrect", "5", "5", "16.7"),
        ("not_drawn", "3", "3", "10.0"),
        ("repetition", "2", "2", "6.7"),
        ("kept", "20", "20", "66.7"),
    ]
    assert re.search(r"^math +30 +20 +20 +20 +0 +0$", text, re.MULTILINE)
    assert re.findall(r"─ (\w+): math", text) == ["incorrect", "kept", "not_drawn", "repetition"]
    assert "[bold]" not in text and "more characters" in text  # cut before the answer


def test_one_reason_alone_is_shown_in_full_and_to_the_letter(tmp_path: Path, command: Any) -> None:
    publish(tmp_path)
    text = shown(command("data", "sft_data", "--reason", "incorrect", "--samples", "4"))
    assert text.count("─ incorrect: ") == 4 and "─ kept" not in text
    assert text.count("and so on") == 4 * 20 and "[bold]0[/bold]" in text


def test_a_terminal_obeys_no_text_of_a_data_set(tmp_path: Path, command: Any) -> None:
    evil = "\x1b[2J\x9b1A\x07"
    rows = [dataclasses.replace(s, source=f"a{evil}", completion=f"{evil}\n{s.completion}") for s in SAMPLES]
    with Store(tmp_path).attempt("sft_data", artifact_key("sft_data", 1, {}, {})) as attempt:
        write_rows(attempt.out / "samples.parquet", rows, Sample)
        attempt.publish(stage_version=1, config={})
    text = shown(command("data", "sft_data"))
    assert not {"\x1b", "\x9b", "\x07"} & set(text) and "a\ufffd[2J\ufffd1A\ufffd" in text
    view = json.loads(shown(command("data", "sft_data", "--json")))
    assert view["samples"]["kept"][0]["completion"].startswith(evil)  # a program reads the text as it is


def test_json_holds_statistics_and_samples(tmp_path: Path, command: Any) -> None:
    made = publish(tmp_path)
    view = json.loads(shown(command("data", "latest:sft_data", "--samples", "2", "--json")))
    assert view["digest"] == made.digest and view["outcomes"]["not_drawn"] == 3 and view["parts"]["math"]["kept"] == 20
    assert {name: len(rows) for name, rows in view["samples"].items()} == {
        **{"incorrect": 2, "kept": 2, "not_drawn": 2, "repetition": 2}
    }
    assert view["samples"]["kept"][0]["prompt"].startswith("what is ")


@pytest.mark.parametrize("shards", [True, False])
def test_more_samples_than_the_statistics_keep_come_from_the_shards(tmp_path: Path, command: Any, shards: bool) -> None:
    publish(tmp_path, shards=shards)
    view = json.loads(shown(command("data", "sft_data", "--reason", "incorrect", "--samples", "9", "--json")))
    assert len(view["samples"]["incorrect"]) == (5 if shards else 3)


def test_a_data_set_without_statistics_is_counted(tmp_path: Path, command: Any) -> None:
    publish(tmp_path, mixed=False)
    view = json.loads(shown(command("data", "sft_data", "--json")))
    assert view["outcomes"] == {"incorrect": 5, "kept": 23, "repetition": 2} and view["sampled"] == 30
    assert view["samples"]["kept"][0]["completion"] == SAMPLES[7].completion
    assert re.search(r"^kept +23 +23", shown(command("data", "sft_data")), re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["abcdef12"], "no artifact"),
        (["xyz"], "give 6 or more hex characters"),
        (["latest:sft"], "no artifact of stage 'sft'"),
        (["latest:base"], "is an artifact of stage 'base'; this shows those of 'sft_data'"),
        (["sft_data", "--reason", "tuncated"], "no sample has it; there are incorrect, kept, not_drawn, repetition"),
        (["sft_data", "--samples", "-1"], "--samples -1: give 0 or more"),
    ],
)
def test_what_is_refused(tmp_path: Path, command: Any, arguments: list[str], said: str) -> None:
    publish(tmp_path)
    publish(tmp_path, stage="base")
    done = command("data", *arguments)
    assert done.returncode == 2 and not done.stdout
    assert said in done.stderr and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
