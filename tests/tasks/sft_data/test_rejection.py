"""Rejection sampling: who is kept, and that every sample has one reason."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from grpo.config.judge import JudgeSettings
from grpo.data.records import Problem, Sample
from grpo.data.template import parse
from grpo.errors import InputError
from tasks.judges.create_judge import make_judge
from tasks.problems.decontaminate import HeldOut
from tasks.sft_data.filters import FilterSettings
from tasks.sft_data.rejection import REASONS, select

JUDGE = make_judge(JudgeSettings(verifier="exact"))


def reasons(samples: list[Any], problems: dict[str, Any], keep: int = 2, judged: Any = (), **values: Any) -> list[str]:
    settings = values.pop("settings", FilterSettings())
    judge = values.pop("judge", JUDGE)
    return [s.reason for s in select(samples, problems, settings, judge, judged, keep, **values)]


def test_rules_then_duplicates_then_judge_then_surplus(sample: Any, problem: Any) -> None:
    known = {"p": problem("p", answer="3")}
    samples = [
        sample(answer="4", accuracy=0.0),
        sample(reasoning="one"),
        sample(reasoning="one"),
        sample(answer="3.0", reasoning="the verifier lets it pass, the exact judge does not"),
        sample(reasoning="two"),
        sample(reasoning="three"),
    ]
    assert reasons(samples, known, judged=("reasoning",)) == [
        "incorrect",
        "",
        "duplicate",
        "judged_incorrect",
        "",
        "surplus",
    ]
    assert reasons(samples, known) == ["incorrect", "", "duplicate", "", "surplus", "surplus"]


def test_an_answer_is_judged_with_all_messages_of_its_prompt(sample: Any, problem: Any) -> None:
    asked = [{"role": "system", "content": "In binary."}, {"role": "user", "content": "compute 1 + 2"}]
    seen: list[str] = []

    class Reader:
        def correct_all(self, claims: Any) -> list[str]:
            seen.extend(claim.question for claim in claims)
            return ["correct"] * len(claims)

    assert reasons(
        [sample()], {"p": dataclasses.replace(problem(), messages=asked)}, judge=Reader(), judged=("reasoning",)
    ) == [""]
    assert reasons([sample()], {"p": problem()}, judge=Reader(), judged=("reasoning",)) == [""]
    assert seen == ["[system]\nIn binary.\n\n[user]\ncompute 1 + 2", "compute 1 + 2"]


def test_general_samples_are_judged_for_harm(sample: Any, problem: Any) -> None:
    known = {"p": problem(domain="general", metadata={"harmful": True, "refusal": "sorry no"})}
    samples = [sample(answer="sorry, no", accuracy=None), sample(answer="at night", accuracy=None)]
    assert reasons(samples, known, judged=("general",)) == ["", "judged_unsafe"]


def test_general_samples_are_judged_for_quality_if_they_are_safe(sample: Any, problem: Any) -> None:
    known = {"p": problem(domain="general"), "q": problem("q", text="compute 2 + 1")}

    class Reader:
        good: list[str] = []  # noqa: RUF012

        def safe_all(self, responses: Any) -> list[bool | None]:
            return [{"bomb": False, "hm": None}.get(parse(r.text).summary, True) for r in responses]

        def good_all(self, responses: Any) -> list[bool | None]:
            self.good += [parse(r.text).summary for r in responses]
            return [{"no idea": False, "er": None}.get(parse(r.text).summary, True) for r in responses]

    judge = Reader()
    samples = [
        sample(answer=a, accuracy=None, number=n) for n, a in enumerate(["bomb", "hm", "no idea", "er", "Paris"])
    ]
    found = reasons([*samples, sample("q")], known, judge=judge, judged=("general", "quality"), keep=5)
    assert found == ["judged_unsafe", "judged_undecided", "judged_poor", "judged_undecided", "", ""]
    assert sorted(judge.good) == ["Paris", "er", "no idea"]
    assert reasons(samples, known, judge=judge, judged=("quality",), keep=5)[:2] == ["", ""]


def test_a_right_answer_that_is_not_compared_with_a_reference_is_not_judged(sample: Any, problem: Any) -> None:
    program = "```python\nprint(3)\n```"
    known = {
        "tested": problem("tested", text="print 3", answer="", verifier="code"),
        "with a program": problem("with a program", text="print three", answer="print(1 + 2)", verifier="code"),
        "scored": problem("scored", text="a path", answer="", verifier="reasoning_gym"),
        "one of many": problem("one of many", text="24 from 3 and 8", answer="8 * 3", verifier="reasoning_gym"),
        "option": problem("option", text="A) 40 metres B) 42 metres", answer="B", verifier="choice"),
        "number": problem("number", answer="1000", verifier="number"),
        "no reference": problem("no reference", text="anything", answer=" ", verifier="exact"),
    }
    answers = [program, program, "up", "3 * 8", "B) 42 metres", "1,000", "?"]
    samples = [sample(name, answer=answer) for name, answer in zip(known, answers, strict=True)]
    judge = make_judge(JudgeSettings())
    assert reasons(samples, known, judge=judge, judged=("reasoning",)) == [""] * 7
    asked = []

    class Model:
        def correct_all(self, claims: Any) -> list[str]:
            asked.extend((claim.reference, claim.answer) for claim in claims)
            return ["correct"] * len(claims)

    assert reasons(samples, known, judge=Model(), judged=("reasoning",)) == [""] * 7
    assert sorted(asked) == [("1000", "1,000"), ("B", "B) 42 metres")]


class Recorder:
    """A judge for whom the answer "3" is right, "?" undecided and all else wrong, and who remembers what it saw."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def correct_all(self, claims: Any) -> list[str]:
        self.batches.append([claim.answer for claim in claims])
        return [{"3": "correct", "?": "undecided"}.get(claim.answer, "incorrect") for claim in claims]


def test_undecided_is_never_kept(sample: Any, problem: Any) -> None:
    judge: Any = Recorder()
    selected = select([sample(answer="?")], {"p": problem()}, FilterSettings(), judge, ("reasoning",), 2)
    assert [s.reason for s in selected] == ["judged_undecided"] and selected[0].verdict == "dropped"


def test_the_judge_sees_no_more_than_are_needed(sample: Any, problem: Any) -> None:
    known = {"p": problem("p"), "q": problem("q", text="compute 2 + 1")}
    of_p = [sample(answer=a, reasoning=f"way {i}", number=0) for i, a in enumerate(["4", "3", "5", "3", "3", "3"])]
    of_q = [sample("q", reasoning=f"way {i}", number=0) for i in range(3)] + [sample("q", accuracy=0.0)]
    judge = Recorder()
    found = reasons([*of_p, *of_q], known, judge=judge, judged=("reasoning",))
    wrong = "judged_incorrect"
    assert found == [wrong, "", wrong, "", "surplus", "surplus", "", "", "surplus", "incorrect"]
    assert judge.batches == [["4", "3", "3", "3"], ["5"], ["3"]]  # two of each; one in place of 4; one in place of 5


def test_a_prompt_with_two_ids_keeps_one_completion_once(sample: Any, problem: Any) -> None:
    known = {"p": problem("p"), "q": problem("q", text="Compute 1  + 2"), "r": problem("r", text="compute 1 + 3")}
    samples = [sample("r"), sample("q", reasoning=" SO "), sample("p"), sample("q", reasoning="so!")]
    assert reasons(samples, known) == ["", "duplicate", "", ""]


def test_only_what_rules_let_pass_makes_a_duplicate(sample: Any, problem: Any) -> None:
    assert reasons([sample(finish_reason="length"), sample()], {"p": problem()}) == ["truncated", ""]


WORDS = [f"w{i}" for i in range(16)]


def near_settings(jaccard: float | None) -> FilterSettings:
    return FilterSettings(near_duplicate_jaccard=jaccard, shingle_words=1)


@pytest.mark.parametrize(
    ("jaccard", "second"),
    # "<think>", sixteen words, "</think>" and the answer are 19; one word more makes 19 of 20.
    [(0.95, "near_duplicate"), (0.96, ""), (None, "")],
)
def test_near_duplicates(sample: Any, problem: Any, jaccard: float | None, second: str) -> None:
    samples = [sample(reasoning=" ".join(WORDS)), sample(reasoning=" ".join([*WORDS, "more"]))]
    assert reasons(samples, {"p": problem()}, settings=near_settings(jaccard)) == ["", second]


def test_near_duplicates_of_another_problem_or_of_a_dropped_sample_stay(sample: Any, problem: Any) -> None:
    known = {"p": problem("p"), "q": problem("q", text="other")}
    longer = " ".join([*WORDS, "more"])
    samples = [
        sample("p", reasoning=" ".join(WORDS), answer="4"),
        sample("p", reasoning=longer),
        sample("q", reasoning=longer),
    ]
    judge = Recorder()
    found = reasons(samples, known, settings=near_settings(0.8), judge=judge, judged=("reasoning",))
    assert found == ["judged_incorrect", "", ""]
    assert judge.batches == [["4", "3"], ["3"]]  # the second waits until the first, which it is like, is judged


def test_what_is_like_a_kept_one_is_no_surplus(sample: Any, problem: Any) -> None:
    samples = [sample(reasoning=" ".join([*WORDS, *more])) for more in ((), ("more",))] + [sample(reasoning="other")]
    found = reasons(samples, {"p": problem()}, keep=1, settings=near_settings(0.8))
    assert found == ["", "near_duplicate", "surplus"]


def test_all_samples_of_a_bad_problem_go(sample: Any, problem: Any) -> None:
    known = {"p": problem("p", text="compute 1 + 2. Answer: 3"), "q": problem("q")}
    assert reasons([sample(), sample(accuracy=0.0), sample("q")], known) == ["leaked", "leaked", ""]
    easy = FilterSettings(pass_rate_max=0.5, pass_rate_samples=2)
    samples = [sample(), sample(reasoning="x"), sample(accuracy=0.0), sample("q"), sample("q", accuracy=0.0)]
    known["p"] = problem("p")
    assert reasons(samples, known, settings=easy) == ["too_easy", "too_easy", "too_easy", "", "incorrect"]


def test_a_completion_that_quotes_a_held_out_prompt(sample: Any, problem: Any) -> None:
    held_out = HeldOut([problem("h", text="a b c d e f g h i j")])
    samples = [sample(reasoning="we know a b c d e f g h i j"), sample(reasoning="we know a b c d e f g h i")]
    assert reasons(samples, {"p": problem()}, held_out=held_out) == ["contaminated", ""]
    prompts = FilterSettings(contamination="prompts", near_duplicate_jaccard=None)
    assert reasons(samples, {"p": problem()}, held_out=held_out, settings=prompts) == ["", ""]


def test_surplus_is_drawn_fairly_and_by_seed(sample: Any, problem: Any) -> None:
    known = {f"p{i}": problem(f"p{i}", text=f"compute {i}") for i in range(400)}
    samples = [sample(id, number=n, reasoning=f"way {n}") for id in known for n in range(4)]
    kept = [s.number for s in select(samples, known, FilterSettings(), JUDGE, (), 1, seed=1) if not s.reason]
    assert len(kept) == 400
    # Each of four is expected 100 times, with a standard deviation of 8.7.
    assert all(65 < Counter(kept)[n] < 135 for n in range(4))
    again = [s.number for s in select(samples, known, FilterSettings(), JUDGE, (), 1, seed=2) if not s.reason]
    assert sum(a != b for a, b in zip(kept, again, strict=True)) > 200


def test_adding_a_problem_changes_no_other(sample: Any, problem: Any) -> None:
    known = {f"p{i}": problem(f"p{i}", text=f"compute {i}") for i in range(20)}
    samples = [sample(id, number=n, reasoning=f"way {n}") for id in known for n in range(4)]
    assert reasons(samples, known)[:40] == reasons(samples[:40], known)


def test_a_missing_problem_is_named(sample: Any, problem: Any) -> None:
    with pytest.raises(InputError, match="a sample answers problem 'q', which is not among the 1 given"):
        reasons([sample("q")], {"p": problem()})


def mixture() -> tuple[list[Sample], dict[str, Problem], HeldOut]:
    """Samples with all sorts of defects, by chance; every reason of the rule judge occurs."""
    rng = random.Random(0)

    def asked(id: str, text: str, **values: Any) -> Problem:
        defaults: dict[str, Any] = {"verifier": "number", "domain": "reasoning", "language": "en", "source": "test"}
        return Problem(id, [{"role": "user", "content": text}], "3", **{**defaults, **values})

    known = {f"p{i}": asked(f"p{i}", f"compute {i // 2}" + " => 3" * (i % 17 == 0)) for i in range(120)}
    for i in range(30):
        metadata = {"harmful": True, "refusal": "sorry no"} if i % 2 else {"mentions": ["3"]}
        known[f"g{i}"] = asked(f"g{i}", f"tell me {i}", domain="general", metadata=metadata)
    held_out = HeldOut([asked("h", "u v w x y z"), asked("h2", "compute 7")], n=4)
    samples = []
    for problem in known.values():
        hard = rng.random() < 0.1
        for number in range(8):
            words = rng.choices("abcdefgh", k=rng.choice([1, 4, 30, 31])) + rng.choices([[], ["u v w x"]], [30, 1])[0]
            reasoning = " ".join(words) + rng.choices(["", "```", " a" * 60], [20, 1, 1])[0]
            answer = rng.choice(["3", "3.0", "sorry, no"]) if problem.domain == "general" else rng.choice(["3", "3.0"])
            completion = f"<think>\n{reasoning}\n</think>\n<answer>{answer}</answer>"
            rewards = {"format": float(rng.random() > 0.05), "language": rng.choice([1.0, 1.0, 1.0, 0.95, 0.5])}
            if problem.domain == "reasoning":
                rewards["accuracy"] = 0.0 if hard else float(rng.random() > 0.2)
            samples.append(
                Sample(
                    problem.id,
                    "policy",
                    completion,
                    reasoning,
                    answer,
                    answer,
                    rewards,
                    tokens=rng.randint(10, 60),
                    finish_reason=rng.choices(["stop", "length"], [20, 1])[0],  # type: ignore[arg-type]
                    domain=problem.domain,
                    language="en",
                    number=number,
                    source=problem.source,
                )
            )
    return samples, known, held_out


STRICT = FilterSettings(
    context=58,
    paragraph_max_words=80,
    pass_rate_min=0.2,
    pass_rate_max=0.9,
    shingle_words=1,
    near_duplicate_jaccard=0.8,
)
ALL = ("reasoning", "general", "quality")


def verdicts(samples: list[Sample], known: dict[str, Problem], held_out: HeldOut) -> dict[str, str]:
    selected = select(samples, known, STRICT, JUDGE, ALL, 2, held_out=held_out, seed=5)
    return {f"{s.problem_id}/{s.number}": s.reason for s in selected}


def test_the_funnel_of_a_random_mixture_adds_up() -> None:
    samples, known, held_out = mixture()
    selected = select(samples, known, STRICT, JUDGE, ALL, 2, held_out=held_out, seed=5)
    assert [(s.problem_id, s.number) for s in selected] == [(s.problem_id, s.number) for s in samples]
    assert set(REASONS) - {s.reason for s in selected} == {"judged_undecided"}  # the rule judge always decides
    assert all((s.verdict == "kept") is (s.reason == "") for s in selected)
    assert max(Counter(s.problem_id for s in selected if not s.reason).values()) == 2


def test_the_order_of_the_samples_does_not_matter() -> None:
    samples, known, held_out = mixture()
    expected = verdicts(samples, known, held_out)
    random.Random(1).shuffle(samples)
    assert verdicts(samples, known, held_out) == expected


def test_two_processes_agree() -> None:
    code = "import json, test_rejection as t; print(json.dumps(t.verdicts(*t.mixture())))"
    here = Path(__file__).parent
    found = []
    for hash_seed in ("1", "2"):
        paths = os.pathsep.join([str(here), str(here.parents[2])])
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
        found.append(json.loads(done.stdout))
    assert found[0] == found[1] == verdicts(*mixture())
