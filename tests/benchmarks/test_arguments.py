"""Command lines of benchmarks: bad input ends with exit code 2 and one line, before anything is measured."""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OUTPUT = re.compile(r'"(--\w+)",\s*type=output_file')
OUTPUTS = [
    (path.stem, option) for path in sorted(BENCHMARKS.glob("*.py")) for option in OUTPUT.findall(path.read_text())
]
BAD = [
    ("gaming", ["--every", "0"], "argument --every: 0: give 1 or more"),
    ("paper_claims", ["--jobs", "0"], "argument --jobs: 0: give 1 or more"),
    ("learning", ["--jobs", "0"], "argument --jobs: 0: give 1 or more"),
    ("grpo_vs_trl", ["--rounds", "0"], "argument --rounds: 0: give 1 or more"),
    ("grpo_vs_trl", ["--rounds", "x"], "argument --rounds: invalid int value: 'x'"),
    ("fleet", ["--samples", "10"], "argument --samples: 10: give a multiple of 16, the samples of a problem"),
    ("shard_load", ["--shards", "5000"], "argument --shards: 5000: give a number that divides the 4,000 problems"),
    ("shard_load", ["--shards", "3000"], "argument --shards: 3000: give a number that divides the 4,000 problems"),
    ("sft_data", ["--samples", "1000"], "argument --samples: 1000: give a multiple of 800"),
    ("report_load", ["--home", "nowhere"], "--home nowhere: has no mlflow.db; run `r1 run tiny` with this R1FLOW_HOME"),
    (
        "real_learning",
        ["--model", "other", "--output", "page.md"],
        "the page is of the recipe and the model as they ship; leave --set, --model or --output out",
    ),
]

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


def refused(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a benchmark says last, when it stops with exit code 2."""
    package = "benchmarks." if "from benchmarks" in (BENCHMARKS / f"{name}.py").read_text() else ""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(package + name).main()
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    return printed.err.splitlines()[-1].partition("error: ")[2]


@pytest.mark.parametrize(("name", "option"), OUTPUTS)
def test_a_page_that_cannot_be_written_is_refused_at_once(
    name: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(name, [option, str(tmp_path / "missing" / "page.md")], monkeypatch, capsys)
    assert said.startswith(
        f"argument {option}: {tmp_path}/missing/page.md: there is no folder {tmp_path}/missing; make"
    )
    assert refused(name, [option, str(tmp_path)], monkeypatch, capsys).endswith("is a folder; give a file")


def test_every_page_is_checked() -> None:
    pages = re.compile(r'"--(?:output|write|plot)",\s*type=(?!output_file)')
    assert len(OUTPUTS) >= 30
    assert [path.name for path in BENCHMARKS.glob("*.py") if pages.search(path.read_text())] == []


@pytest.mark.parametrize(("name", "arguments", "says"), BAD)
def test_a_number_out_of_range_is_one_line(
    name: str,
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(name, arguments, monkeypatch, capsys).startswith(says)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None], ids=["no text", "a folder"])
@pytest.mark.parametrize("name", ["paper_claims", "learning", "fleet"])
def test_a_journal_that_cannot_be_read_is_one_line(
    name: str,
    content: bytes | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    journal = tmp_path / "journal.jsonl"
    journal.mkdir() if content is None else journal.write_bytes(content)
    said = refused(name, ["--journal", str(journal)], monkeypatch, capsys)
    assert str(journal) in said and said.endswith("give another file" if content or name == "fleet" else "give a file")


def test_contention_without_a_run_of_the_recipe_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["contention.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / "contention.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith("error: latest:problems: no artifact of stage 'problems'")


def test_lines_that_are_no_records_are_skipped(tmp_path: Path) -> None:
    from json_lines import read_lines

    journal = tmp_path / "journal.jsonl"
    journal.write_text('{"a": 1}\n\n[2]\n3\n{"b": \n{"c": 4}\n')
    assert read_lines(journal) == [{"a": 1}, {"c": 4}]
    assert read_lines(tmp_path / "none") == []


def test_a_page_of_claims_without_its_marks_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "other.md"
    page.write_text("words")
    arguments = ["--show", "--home", str(tmp_path / "home"), "--output", str(page)]
    said = refused("paper_claims", arguments, monkeypatch, capsys)
    assert said.startswith(f"{page}: has no generated part; it begins with")
    assert page.read_text() == "words" and not (tmp_path / "home").exists()


def test_an_output_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from arguments import write_output

    page, link = tmp_path / "page.md", tmp_path / "link.md"
    page.write_text("old")
    link.symlink_to(page)
    write_output(link, "new")
    assert page.read_text() == "new" and link.is_symlink()

    def full(self: Path, text: str, **options: str) -> int:
        self.write_bytes(text.encode()[:1])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space left"):
        write_output(page, "newer")
    assert page.read_bytes() == b"new" and sorted(tmp_path.iterdir()) == [link, page]


def test_what_is_no_file_cannot_be_written() -> None:
    from arguments import output_file

    with pytest.raises(argparse.ArgumentTypeError, match="/dev/null is no regular file; give another"):
        output_file("/dev/null")


def test_a_page_shows_the_options_but_no_places_of_the_machine() -> None:
    from arguments import shown

    given = ["--setting", "small", "--output", "/a/page.md", "--json", "--build=/b", "--rounds", "2", "--kind", "a b"]
    assert shown(given, ("--output", "--build"), ("--json",)) == " --setting small --rounds 2 --kind 'a b'"
    assert shown(["--output", "--json", "--rounds", "2"], ["--output"], ["--json"]) == " --rounds 2"


def test_the_first_line_has_command_commit_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import machine

    assert machine.measured_by("x", {"commit": "0ab", "machine": "2 cores"}) == "`x`, at commit 0ab, on 2 cores."
    assert re.match(r"`x`, at commit ([0-9a-f]{7,}\+?|unknown), on \d+ CPU cores", machine.measured_by("x"))
    monkeypatch.setenv("PATH", "")
    assert machine.code_commit() == "unknown"  # where git is not installed


def test_every_page_has_its_commit() -> None:
    """Studies name those of their records; the others that print no page are not held to it."""
    own = {"machine", "learning_page", "learning_cells", "real_learning", "paper_claims_page", "paper_claims_plan"}
    no_page = {"overhead", "real_families", "estimates"}
    with_machine = {path.stem for path in BENCHMARKS.glob("*.py") if re.search(r"on \{machine\(\)\}", path.read_text())}
    assert with_machine - own - no_page == set()
