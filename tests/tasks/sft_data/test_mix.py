"""Mixing: what is drawn, held out and written, and that nothing but the samples and the seed decides it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest

from grpo.data.conversations import demonstrations, from_columns, response
from grpo.data.records import Problem, Sample, write_rows
from grpo.data.template import parse, render
from grpo.errors import InputError
from tasks.sft_data import shards as shard_files
from tasks.sft_data.card import write_card
from tasks.sft_data.mix import TRAIN, VALIDATION, mix
from tasks.sft_data.mix_settings import MixSettings

PARTS = {"math": {"sources": ["sums", "lines"]}, "talk": {"domains": ["general"]}}


class World:
    """Problems and samples with verdicts, written as shards."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.problems: dict[str, Problem] = {}
        self.samples: list[Sample] = []

    def add(
        self,
        source: str,
        problems: int,
        each: int = 2,
        *,
        language: str = "en",
        domain: str = "reasoning",
        **values: Any,
    ) -> World:
        for i in range(problems):
            id = f"{source}-{language}-{i}"
            prompt = values.get("prompt", f"question {i} of {source} in {language}")
            messages = [{"role": "user", "content": prompt}]
            self.problems[id] = Problem(id, messages, "3", "none", domain, language, source)  # type: ignore[arg-type]
            self.samples += [self._sample(id, n, **values) for n in range(each)]
        return self

    def _sample(self, id: str, number: int, *, reason: str = "", answer: str | None = None, **values: Any) -> Sample:
        problem = self.problems[id]
        completion = values.get("completion", render(f"thought {number} about {id}", answer or f"answer {number}"))
        parts = parse(completion)
        return Sample(
            id, "policy", completion, parts.reasoning, parts.summary, "", {}, 10 + number, "stop", problem.domain,
            problem.language, number, problem.source, "engine", 5, "dropped" if reason else "kept", reason,
        )  # fmt: skip

    def shards(self, size: int = 50, order: int | None = None) -> list[Path]:
        """Shards of `size` samples; `order` seeds another order of the samples."""
        samples = list(self.samples)
        if order is not None:
            random.Random(order).shuffle(samples)
        folder = self.folder / f"shards-{len(list(self.folder.glob('shards-*')))}"
        folder.mkdir()
        for start in range(0, len(samples), size):
            write_rows(folder / f"{start:05d}.parquet", samples[start : start + size], Sample)
        return sorted(folder.iterdir())

    def known(self, shard: Path) -> Mapping[str, Problem]:
        return self.problems

    def mix(self, name: str, seed: int = 0, shards: Sequence[Path] | None = None, **settings: Any) -> dict[str, Any]:
        made = MixSettings.model_validate({"parts": PARTS, **settings})
        return mix(shards or self.shards(), self.known, made, seed, self.folder / name)

    def rows(self, name: str, split: str = TRAIN) -> list[dict[str, Any]]:
        parts = sorted((self.folder / name / split).glob("*.parquet"))
        return [from_columns(row) for part in parts for row in pq.read_table(part).to_pylist()]

    def drawn(self, name: str, *sources: str) -> set[tuple[str, int]]:
        rows = self.rows(name) + self.rows(name, VALIDATION)
        return {(r["problem_id"], r["number"]) for r in rows if not sources or r["source"] in sources}

    def bytes(self, name: str) -> dict[str, bytes]:
        root = self.folder / name
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def world(tmp_path: Path) -> World:
    """100 sums and 40 lines in two languages, 60 talks, two samples each; a fifth more was dropped."""
    made = World(tmp_path).add("sums", 50).add("sums", 50, language="de").add("lines", 40)
    return (
        made.add("talk", 60, domain="general").add("bad", 25, reason="incorrect").add("worse", 15, reason="repetition")
    )


def test_everything_kept_is_written_once_with_its_prompt(world: World) -> None:
    made = world.mix("out")
    rows = world.rows("out")
    assert len(rows) == 400 and made["kept"] == 400 and made["sampled"] == 480
    expected = {(s.problem_id, s.number): s for s in world.samples if s.verdict == "kept"}
    assert {(r["problem_id"], r["number"]) for r in rows} == set(expected)
    for row in rows:
        sample = expected[row["problem_id"], row["number"]]
        assert row["messages"] == world.problems[sample.problem_id].messages and row["completion"] == sample.completion
        assert row["part"] == ("talk" if sample.source == "talk" else "math") and row["think"]
        assert (row["policy"], row["engine"], row["tokens"], row["prompt_tokens"]) == (
            "policy",
            "engine",
            sample.tokens,
            5,
        )
    assert not (world.folder / "out" / VALIDATION).exists()
    assert made["outcomes"] == {"incorrect": 50, "kept": 400, "repetition": 30}
    assert made["policies"] == {"policy": 400} and made["engines"] == {"engine": 400}


def test_the_order_is_shuffled(world: World) -> None:
    world.mix("out")
    sources = [row["source"] for row in world.rows("out")]
    changes = sum(a != b for a, b in pairwise(sources))
    assert changes > 150  # 400 rows of shares 0.5, 0.2 and 0.3 change 0.62 x 399 = 247 times when shuffled, 3 when not


def test_parts_have_the_sizes_wanted(world: World) -> None:
    parts = {"math": {**PARTS["math"], "share": 3}, "talk": {**PARTS["talk"], "share": 1}}
    made = world.mix("out", parts=parts, total=200)
    assert Counter(row["part"] for row in world.rows("out")) == {"math": 150, "talk": 50}
    assert made["outcomes"] == {"incorrect": 50, "kept": 200, "not_drawn": 200, "repetition": 30}
    assert sum(made["outcomes"].values()) == made["sampled"] == 480


def test_a_part_with_too_little_gives_all_and_is_filled_from_no_other(world: World) -> None:
    parts = {"math": {**PARTS["math"], "share": 1}, "talk": {**PARTS["talk"], "share": 1}}
    made = world.mix("out", parts=parts, total=300)
    assert made["parts"]["talk"] | {"train": 0} == {
        **{"wanted": 150, "sampled": 120, "kept": 120, "shortage": 30, "train": 0, "validation": 0}
    }
    assert made["parts"]["math"]["kept"] == 150 and made["parts"]["math"]["shortage"] == 0
    assert made["warnings"] == [
        "part 'talk' has 120 examples, 30 fewer than the 150 wanted; sample more of its problems, or more of each"
    ]


def test_the_same_bytes_whatever_the_order_and_the_cut_of_the_shards(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add("lines", 20, language="fr", prompt="one question", completion=render("one thought", "one answer"))
    settings: dict[str, Any] = {
        "total": 90,
        "validation_share": 0.1,
        "parts": {n: {**p, "share": 1} for n, p in PARTS.items()},
    }
    made = [
        world.mix("first", **settings),
        world.mix("first again", **settings),
        world.mix("other cut", shards=world.shards(7), **settings),
        world.mix("other order", shards=world.shards(33, order=1), **settings),
    ]
    monkeypatch.setattr(shard_files, "_BATCH_ROWS", 7)
    made.append(world.mix("other batches", **settings))
    assert made[0] == made[1] == made[2] == made[3] == made[4]
    assert made[0]["outcomes"]["duplicate"] == 39
    first = world.bytes("first")
    assert set(first) == {f"{TRAIN}/part-00000.parquet", f"{VALIDATION}/part-00000.parquet"}
    assert (
        first
        == world.bytes("first again")
        == world.bytes("other cut")
        == world.bytes("other order")
        == world.bytes("other batches")
    )
    world.mix("other seed", seed=1, **settings)
    assert world.drawn("other seed") != world.drawn("first")


def test_a_mix_that_was_killed_starts_over(world: World) -> None:
    world.mix("out")
    whole = world.bytes("out")
    (world.folder / "out" / "buckets" / "train").mkdir(parents=True)
    (world.folder / "out" / "buckets" / "train" / "00000.arrows").write_bytes(b"half")
    (world.folder / "out" / TRAIN / "part-00007.parquet").write_bytes(b"of another mix")
    world.mix("out")
    assert world.bytes("out") == whole


def test_a_new_source_leaves_the_draws_of_other_parts_and_only_displaces_in_its_own(world: World) -> None:
    parts = {"math": {**PARTS["math"], "count": 140}, "talk": {**PARTS["talk"], "count": 60}}
    parts["new"] = {"sources": ["new"], "count": 30}
    world.mix("before", parts=parts, validation_share=0.1)
    before = {
        split: {(r["problem_id"], r["number"]) for r in world.rows("before", split)} for split in (TRAIN, VALIDATION)
    }
    world.add("new", 40)
    world.mix("after", parts=parts, validation_share=0.1)
    for split in (TRAIN, VALIDATION):
        rows = [row for row in world.rows("after", split) if row["source"] != "new"]
        assert {(row["problem_id"], row["number"]) for row in rows} == before[split]
    joined = {"math": {"sources": ["sums", "lines", "new"], "count": 140}, "talk": parts["talk"]}
    world.mix("joined", parts=joined)
    assert world.drawn("joined", "talk") == world.drawn("before", "talk")
    assert world.drawn("joined", "sums", "lines") < world.drawn("before", "sums", "lines")


def test_duplicates_of_other_shards_go_and_are_counted(world: World) -> None:
    world.add("sums", 30, language="fr", prompt="one question", completion=render("one thought", "one answer"))
    made = world.mix("out", shards=world.shards(7))
    assert made["outcomes"]["duplicate"] == 59 and made["kept"] == 401
    assert len({row["completion"] for row in world.rows("out") if row["language"] == "fr"}) == 1


def test_equal_completions_of_other_prompts_are_no_duplicates(world: World) -> None:
    world.add("sums", 30, 1, language="fr", completion=render("one thought", "one answer"))
    assert "duplicate" not in world.mix("out")["outcomes"]


def test_a_duplicate_in_two_parts_stays_in_the_one_that_comes_first_in_the_alphabet(world: World) -> None:
    same = {"prompt": "one question", "completion": render("one thought", "one answer")}
    world.add("lines", 1, 1, language="fr", **same).add("chat", 1, 1, language="fr", domain="general", **same)
    made = world.mix("out")
    assert made["outcomes"]["duplicate"] == 1
    assert [row["part"] for row in world.rows("out") if row["language"] == "fr"] == ["math"]


def test_what_belongs_to_no_part_is_counted_and_named(world: World) -> None:
    made = world.mix("out", parts={"math": {"sources": ["sums", "linse"]}})
    assert made["outcomes"] == {"incorrect": 50, "kept": 200, "no_part": 200, "repetition": 30}
    assert made["warnings"] == [
        "part 'math': no sample is from source 'linse'; the sources are bad, lines, sums, talk, worse",
        "200 good samples belong to no part; their sources: lines, talk",
    ]


def test_validation_is_stratified_and_keeps_a_prompts_examples_together(world: World) -> None:
    made = world.mix("out", validation_share=0.1)
    held_out, rest = world.rows("out", VALIDATION), world.rows("out")
    # math: 180 in English and 100 in German, talk: 120 in English; two samples a prompt, so that tenths come out even.
    assert Counter((r["part"], r["language"]) for r in held_out) == {
        ("math", "en"): 18,
        ("math", "de"): 10,
        ("talk", "en"): 12,
    }
    assert not {row["problem_id"] for row in held_out} & {row["problem_id"] for row in rest}
    assert len(held_out) + len(rest) == 400
    assert made["parts"]["math"]["validation"] == 28 and made["parts"]["math"]["train"] == 252
    third = world.mix("third", validation_share=0.015)  # 2.7, 1.5 and 1.8 examples: 3, 2 and 2 wanted, whole prompts
    assert third["parts"]["math"]["validation"] == 4 + 2 and third["parts"]["talk"]["validation"] == 2


def test_a_prompt_in_two_parts_is_on_one_side(world: World) -> None:
    for number in range(40):
        world.add(f"x{number}", 1, 1, prompt=f"shared {number}").add(
            f"y{number}", 1, 1, prompt=f"Shared  {number}", domain="general"
        )
    world.mix("out", parts={"x": {"sources": ["x*"]}, "y": {"sources": ["y*"]}}, validation_share=0.25)
    sides = [
        {r["messages"][0]["content"].lower().split()[1] for r in world.rows("out", s)} for s in (TRAIN, VALIDATION)
    ]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 40 and len(sides[1]) == 10


def test_too_few_for_validation_is_said(world: World) -> None:
    made = world.mix("out", validation_share=0.001)
    assert made["warnings"] == ["nothing is held out: no part has enough examples for validation_share 0.001"]


def test_without_a_chain_of_thought_the_summary_alone_is_learnt(world: World) -> None:
    world.mix("out", think="never")
    for row in world.rows("out"):
        parts = parse(row["completion"])
        if row["domain"] == "general":
            assert row["completion"] == f"answer {row['number']}" == parts.summary and not row["think"]
        else:
            assert parts.well_formed and row["think"]
    world.mix("listed", think=["ta*"])
    assert all(row["think"] for row in world.rows("listed"))


def test_summaries_that_are_equal_are_duplicates_only_where_the_thought_goes(world: World) -> None:
    world.add("chat", 10, 3, domain="general", answer="the same")
    assert "duplicate" not in world.mix("with")["outcomes"]
    assert world.mix("without", think="never")["outcomes"]["duplicate"] == 20


def test_a_response_without_a_summary_is_not_learnt(world: World) -> None:
    world.add("chat", 3, 1, domain="general", completion="<think>\nand then it stops</think>")
    assert world.mix("out", think="never")["outcomes"]["no_summary"] == 3
    assert "no_summary" not in world.mix("all")["outcomes"]


def test_tokens_are_those_that_were_sampled(world: World) -> None:
    made = world.mix("out", think="never")
    tokens = made["tokens"]
    assert tokens["parts"]["talk"]["counts"] == [0] * 10 + [60, 60] and tokens["edges"] == list(range(13))
    assert tokens["parts"]["math"] | {"counts": []} == {
        **{"counts": [], "total": 2940, "mean": 10.5, "median": 10, "p95": 11, "max": 11}
    }


def test_samples_are_shown_of_every_part_and_reason(world: World) -> None:
    made = world.mix("out", examples=2, parts={n: {**p, "count": 50} for n, p in PARTS.items()})
    shown = made["examples"]
    assert {name: [row["part"] for row in rows] for name, rows in shown.items()} == {
        **{"incorrect": ["", ""], "kept": ["math", "math", "talk", "talk"], "repetition": ["", ""]},
        **{"not_drawn": ["math", "math", "talk", "talk"]},
    }
    for outcome, rows in shown.items():
        for row in rows:
            drawn = (row["problem_id"], row["number"]) in world.drawn("out")
            assert drawn == (outcome == "kept") and row["prompt"] == world.problems[row["problem_id"]].text
    assert world.mix("none", examples=0)["examples"] == {}


def test_sft_and_datasets_read_it(world: World) -> None:
    made = world.mix("out", validation_share=0.1)
    write_card(world.folder / "out", made, {})
    pairs = list(demonstrations(world.folder / "out" / TRAIN))
    assert len(pairs) == 360 and set(pairs[0]) == {"messages", "completion"}
    read = datasets.load_dataset(str(world.folder / "out"), cache_dir=str(world.folder / "cache"))
    assert {name: len(rows) for name, rows in read.items()} == {"train": 360, "validation": 40}
    row = world.rows("out")[5]
    assert from_columns(read["train"][5]) == row
    assert read["train"][5]["prompt"] == row["messages"]
    assert read["train"][5]["completion"] == response(row["completion"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"verdict": ""}, "a sample has no verdict"),
        ({"reason": "", "verdict": "dropped"}, "dropped for no reason"),
        ({"problem_id": "gone"}, "problem 'gone' is not among those of its shard"),
    ],
)
def test_shards_that_are_not_what_they_should_be(world: World, change: dict[str, str], said: str) -> None:
    world.samples[7] = Sample(**{**vars(world.samples[7]), **change})
    with pytest.raises(InputError) as error:
        world.mix("out")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_missing_column_and_a_broken_file_are_named(world: World, tmp_path: Path) -> None:
    shards = world.shards()
    pq.write_table(pq.read_table(shards[1]).drop_columns("engine"), shards[1])
    with pytest.raises(InputError, match="column 'engine' is missing"):
        world.mix("out", shards=shards)
    shards[1].write_text("no parquet")
    with pytest.raises(InputError, match="not a readable parquet file"):
        world.mix("out", shards=shards)


def test_nothing_left_is_an_error_that_says_where_all_went(tmp_path: Path) -> None:
    world = World(tmp_path).add("sums", 3, reason="incorrect").add("chat", 2, domain="general")
    with pytest.raises(InputError, match=r"of 10 samples: \{'incorrect': 6, 'no_part': 4\}"):
        world.mix("out", parts={"math": {"sources": ["sums"]}})
    with pytest.raises(InputError, match="of 0 samples"):
        mix([], world.known, MixSettings(), 0, tmp_path / "none")
