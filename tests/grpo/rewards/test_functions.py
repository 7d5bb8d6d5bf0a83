"""Each reward on completions that can be scored by hand, the table that names them, and their weighted sum."""

from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys

import pytest

from grpo.config.scoring import Scoring
from grpo.data.records import Problem
from grpo.data.template import parse
from grpo.errors import InputError
from grpo.processes.pool import Failure, Pool
from grpo.rewards.functions import Response
from grpo.rewards.registry import JUDGE_REWARDS, MODEL_REWARDS, REWARDS, check, find, load, score_one, total
from grpo.scoring.scorer import Scorer

HENS = [{"role": "user", "content": "325 chickens, 28 roosters, 20 do not lay. How many lay eggs?"}]
REASONING = Problem("hens", HENS, "277", "number", "reasoning", "en", "test")
GENERAL = Problem("poem", [{"role": "user", "content": "A poem?"}], "", "none", "general", "en", "test")


def response(text: str = "", tokens: int = 10, finished: bool = True, max_tokens: int = 100) -> Response:
    return Response(text, parse(text), tokens, finished, max_tokens)


def score(name: str, text: str = "", problem: Problem = REASONING, **options) -> float:
    return score_one(name, options, problem, response(text))


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("<think>we subtract</think><answer>277</answer>", 1),
        ("first 297\nthen 277\nso the result is 277", 1),
        ("zuerst 297\nalso ist das ergebnis 277\n277", 1),
        ("so \\boxed{277}", 1),
        ("the result is 305. no, the answer is 277", 1),
        ("the result is 277. no, the answer is 305", 0),
        ("<think>the result is 277</think><answer>305</answer>", 0),
        ("the result is 305\nUser: and now?\nAssistant: the result is 277", 0),
        ("we subtract", 0),
        ("", 0),
    ],
)
def test_a_stated_result_counts_however_it_is_written(completion, right):
    assert score("stated", completion) == right


def test_programs_and_judged_answers_state_no_result():
    programs, judged = (dataclasses.replace(REASONING, verifier=name) for name in ("code", "judge"))
    assert not REWARDS["stated"].scores(programs) and REWARDS["accuracy"].scores(programs)
    assert not REWARDS["stated"].scores(judged) and not REWARDS["accuracy"].scores(judged)
    assert not REWARDS["stated"].scores(GENERAL) and REWARDS["stated"].scores(REASONING)


@pytest.mark.parametrize(
    ("completion", "scores"),
    [
        # accuracy, format, language
        ("<think>we subtract</think><answer>277</answer>", (1, 1, 1)),
        ("<reasoning>we\nsubtract</reasoning>\n<answer>\n277\n</answer>", (1, 1, 1)),
        ("<think>we subtract</think><answer>305</answer>", (0, 1, 1)),
        ("<think>wir ziehen ab</think><answer>277</answer>", (1, 1, 0)),
        ("So <think>we subtract</think><answer>277</answer>", (1, 0, 1)),
        ("<think>we subtract</think>277", (0, 0, 1)),
        ("<answer>277</answer>", (1, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_the_rewards_of_r1(completion, scores):
    assert tuple(score(name, completion) for name in ("accuracy", "format", "language")) == scores


def test_the_hens_group():
    outputs = [f"<think>we subtract</think><answer>{n}</answer>" for n in (277, 305, 277, 297)]
    assert [score("accuracy", o) for o in outputs] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("completion", "soft", "count"),
    [
        ("<think>a</think><answer>b</answer>", 1, 1),
        ("<reasoning>a\n</reasoning>\n<answer>\nb</answer>", 1, 1),
        ("Sure! <think>a</think> so <answer>b</answer> Good luck!", 1, 1),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 1, 0.5),  # the answer's two tags occur twice
        ("<answer>b</answer><think>a</think>", 0, 1),
        ("<think>a</reasoning><answer>b</answer>", 0, 0.75),
        ("<think>a</think><answer>b", 0, 0.75),
        ("<think>a", 0, 0.25),
        ("277", 0, 0),
    ],
)
def test_lenient_formats(completion, soft, count):
    assert (score("format_soft", completion), score("tag_count", completion)) == (soft, count)


CHOICE = Problem("c", HENS, "B", "choice", "reasoning", "en", "test")
MATH = Problem("m", HENS, "\\frac{1}{2}", "math", "reasoning", "en", "test")
CITY = Problem("t", HENS, "Paris", "exact", "reasoning", "en", "test")
SCORED = Problem("s", HENS, "7", "reasoning_gym", "reasoning", "en", "test")


@pytest.mark.parametrize(
    ("problem", "reasoning", "answer", "agrees"),
    [
        (REASONING, "325 - 28 = 297\n297 - 20 = 277", "277", 1),
        (REASONING, "325 - 28 = 297\n297 - 20 = 277", "297", 0),
        (REASONING, "325 - 28 = 297\n297 - 20 = 287", "287", 1),  # wrong, but of one mind
        (REASONING, "so the result is 277, since 20 are left out", "277", 1),
        (REASONING, "The answer is 297. No, the answer is 277.", "277", 1),
        (REASONING, "The answer is 297. No, the answer is 277.", "297", 0),
        (REASONING, "the answer must be even. 1,000 - 2 = 998", "998", 1),  # "must be" states nothing
        (REASONING, "\\boxed{\\text{277}} because 325 > 28", "277", 1),
        (REASONING, "the total is $1,000", "1000", 1),
        (REASONING, "also ist das ergebnis -7", "-7", 1),
        (REASONING, "所以答案是277。", "277", 1),
        (REASONING, "we subtract", "277", 0),
        (CHOICE, "A is too small, so the answer is (B).", "B", 1),
        (CHOICE, "A is too small, so the answer is (B).", "C", 0),
        (MATH, "so $x = \\frac{1}{2}$.", "0.5", 1),
        (MATH, "so $x = \\frac{1}{2}$.", "0.25", 0),
        (CITY, "The capital of France is sought. The answer is Paris.", "paris", 1),
        (SCORED, "first 8 - 1\nthen 7\nso the result is 7", "7.0", 1),
        (SCORED, "first 8 - 1\nthen 7\nso the result is 7", "8", 0),
    ],
)
def test_consistency_compares_the_conclusion_with_the_answer(problem, reasoning, answer, agrees):
    assert score("consistency", f"<think>{reasoning}</think><answer>{answer}</answer>", problem) == agrees


def test_without_reasoning_or_answer_nothing_is_consistent():
    assert score("consistency", "<answer>277</answer>") == score("consistency", "<think>it is 277</think>") == 0


@pytest.mark.parametrize(
    ("tokens", "finished", "reward"),
    # Longest 100, cache 20: free up to 80, then 1/20 less a token.
    [(80, True, 0), (81, True, -0.05), (90, True, -0.5), (99, True, -0.95), (100, True, -1), (100, False, -1)],
)
def test_overlong_by_dapo(tokens, finished, reward):
    r = response(tokens=tokens, finished=finished)
    assert score_one("overlong", {"cache_tokens": 20}, REASONING, r) == pytest.approx(reward)
    assert score_one("overlong", {}, REASONING, r) == pytest.approx(reward)  # a fifth of 100


@pytest.mark.parametrize(
    ("options", "reward"),
    [
        ({}, -10 * 0.0003),
        ({"per_token": 0.01}, -0.1),
        ({"longest": 10}, 0),
        ({"longest": 8, "per_token": 0.5}, -1),  # two tokens too long
        ({"shortest": 13, "longest": 20, "per_token": 0.5}, -1.5),  # three too short
        ({"shortest": 13, "per_token": 0.5}, -1.5),  # at least 13, and each token beyond costs
    ],
)
def test_length_costs_each_token_outside_the_range(options, reward):
    assert score("length", **options) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("text", "n", "reward"),
    [
        ("one two three four five", 4, 0),
        # 8 words, 5 four-grams: abcd bcda cdab dabc abcd; the last occurred before.
        ("a b c d a b c d", 4, -1 / 5),
        ("<think>a b c d</think><answer>a b c d</answer>", 4, -1 / 5),
        ("A b a B", 1, -1 / 2),
        ("1 + 1 = 2, 1 + 1 = 2", 2, -4 / 10),  # 11 units, 10 pairs, and the last four occurred before
        ("先减去先减去", 2, -2 / 5),  # 先减 减去 去先 先减 减去
        ("so so so", 4, 0),  # no four-gram at all
        ("", 1, 0),
    ],
)
def test_repetition_is_the_share_of_ngrams_seen_before(text, n, reward):
    assert score("repetition", text, n=n) == pytest.approx(reward)
    assert math.copysign(1, score("repetition", "so")) == 1  # not -0.0


def test_a_loop_nears_minus_one():
    assert score("repetition", "wait, let me check. " * 100) < -0.95


def test_a_reward_knows_its_domains():
    reasoning = [name for name, reward in REWARDS.items() if "general" not in reward.domains]
    assert reasoning == ["accuracy", "stated", "consistency"]
    assert all("reasoning" in reward.domains for reward in REWARDS.values())


def test_every_reward_of_the_table_gives_a_number_for_anything():
    texts = [
        "",
        "<think>",
        "</answer><answer>",
        "<think>\\boxed{</think><answer>\\boxed{</answer>",
        "\x00 ∞ 𝟙",
        "=" * 50,
    ]
    for name, reward in REWARDS.items():
        check(name, {})
        for problem in [p for p in (REASONING, GENERAL, MATH) if p.domain in reward.domains]:
            assert all(-1 <= score(name, text, problem) <= 1 for text in texts)


OWN = """
import math

def of_answer_length(problem, response, *, factor: float = 1.0):
    return factor * len(response.parts.answer or "")

def nothing(problem, response):
    return {"nan": math.nan, "none": None, "text": "1"}[response.text]

def of_one(problem):
    return 1.0
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of a user's own."""
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "broken_rewards.py").write_text("import no_such_thing")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_rewards"
    sys.modules.pop("own_rewards", None)


def test_a_users_own_function(own):
    name = f"{own}:of_answer_length"
    check(name, {"factor": 2})
    assert find(name).domains == ("reasoning", "general")
    assert score(name, "<answer>277</answer>") == 3
    assert score(name, "<answer>277</answer>", factor=2) == 6


def test_rewards_run_in_a_pool(own):
    with Pool(1, 30, None) as pool:
        hens = response("<think>we subtract</think><answer>277</answer>")
        futures = [
            pool.submit(score_one, name, {}, REASONING, hens) for name in ("accuracy", f"{own}:of_answer_length")
        ]
        assert [future.result() for future in futures] == [1, 3]
        bad = pool.submit(score_one, f"{own}:nothing", {}, REASONING, response("nan")).result()
        assert bad == Failure("error", f"ValueError: reward '{own}:nothing' gave nan, which is no finite number", False)
    assert pickle.loads(pickle.dumps(hens)) == hens


@pytest.mark.parametrize("value", ["nan", "none", "text"])
def test_only_finite_numbers_are_rewards(own, value):
    with pytest.raises(ValueError, match=f"reward '{own}:nothing' gave (nan|None|'1'), which is no finite number"):
        score(f"{own}:nothing", value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acuracy", "unknown reward 'acuracy'; did you mean 'accuracy'?"),
        ("helpfull", "did you mean 'helpful'"),
        ("xyz", "known are accuracy, stated, format, format_soft, tag_count, consistency, language, .*, helpful, safe"),
        ("no_module:f", r"cannot import module 'no_module' \(ModuleNotFoundError"),
        ("broken_rewards:f", "cannot import module 'broken_rewards'"),
        ("math:nothing", "module 'math' has no function 'nothing'"),
        ("math:pi", "module 'math' has no function 'pi'"),
        ("own_rewards:of_one", r"must be callable as \(problem, response\)"),
    ],
)
def test_unknown_rewards(own, name, message):
    with pytest.raises(InputError, match=message):
        check(name, {})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("accuracy", {"n": 3}, "reward 'accuracy': .*'n'; its options are none"),
        ("length", {"longst": 3}, "reward 'length': .*'longst'; its options are shortest, longest, per_token"),
        ("repetition", {"n": 0}, "reward 'repetition', option 'n': .*greater than or equal to 1, but it is 0"),
        ("repetition", {"n": 2.5}, "option 'n': .*integer, but it is 2.5"),
        ("repetition", {"n": "3"}, "option 'n': .*integer, but it is '3'"),
        ("overlong", {"cache_tokens": -4}, "option 'cache_tokens': .*but it is -4"),
        ("helpful", {"n": 3}, "reward 'helpful' comes from a model and takes no option 'n'"),
        ("own_rewards:of_answer_length", {"factor": "x"}, "option 'factor': .*number, but it is 'x'"),
        ("own_rewards:of_answer_length", {"problem": 1}, "multiple values for argument 'problem'"),
    ],
)
def test_options_are_checked(own, name, options, message):
    with pytest.raises(InputError, match=message):
        check(name, options)


def test_model_rewards_are_known_and_have_no_function():
    for name in MODEL_REWARDS + JUDGE_REWARDS:
        check(name, {})
        with pytest.raises(InputError, match="scored by a model"):
            find(name)
    load([*REWARDS, *MODEL_REWARDS, *JUDGE_REWARDS])
    with pytest.raises(InputError, match="unknown reward"):
        load(["acuracy"])


def test_total_is_the_weighted_sum():
    weights = {"accuracy": 2.0, "format": 0.5, "language": 0.25, "helpful": 0.1, "safe": 4.0}
    assert total({"accuracy": 1.0, "format": 1.0, "language": 0.5}, weights) == pytest.approx(2.625)
    assert total({"format": 1.0, "language": 0.0, "helpful": -3.0, "safe": 0.5}, weights) == pytest.approx(2.2)
    assert total({}, weights) == 0


def test_a_process_that_scores_loads_no_torch():
    code = "import sys, grpo.rewards.functions, grpo.rewards.steps; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_preference_models_score_general_prompts_only():
    completion = "<think>a draft</think><answer>Roses</answer>"
    scorer = Scorer({"accuracy": {}, "format": {}, "helpful": {}, "safe": {}}, Scoring(workers=1))
    read: dict[str, list[str]] = {}

    def model(name, score):
        def scores(messages, responses):
            assert messages == [GENERAL.messages] * len(responses)
            read[name] = read.get(name, []) + responses
            return [score] * len(responses)

        return scores

    scorer.helpful, scorer.safe = model("helpful", 2.5), model("safe", 0.0)  # type: ignore[assignment]
    try:
        (reasoning,), (general,) = (
            scorer.start(problem, [response(completion)]).finish().breakdowns for problem in (REASONING, GENERAL)
        )
    finally:
        scorer.close()
    assert reasoning == {"accuracy": 0, "format": 1}
    # The probability of a logit of 0 is 0.5.
    assert general == {"format": 1, "helpful": 2.5, "safe": 0.5}
    # The helpful model reads the summary only, the safety model the whole response.
    assert read == {"helpful": ["Roses"], "safe": [completion]}
