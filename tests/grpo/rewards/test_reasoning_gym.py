"""reasoning-gym's scorers: gold answers, what is wrong, and payloads that none of them runs."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.rewards.evaluation_guard import EvaluationRefused, no_evaluation
from grpo.rewards.expressions import arithmetic, exact_integer, literal, numeral, symbolic, whole
from grpo.rewards.reasoning_gym import pack_entry, unpack_entry
from grpo.rewards.verifiers import VERIFIERS, verify


def problem(verifier: str, answer: str, metadata: dict[str, Any] | None = None) -> Problem:
    messages = [{"role": "user", "content": "question"}]
    return Problem("p1", messages, answer, verifier, "reasoning", "en", "test", metadata or {})


FAMILIES = ["chain_sum", "letter_counting", "gcd", "number_sorting", "spell_backward"]
# Scorers that read tuples (which JSON would turn into lists) or the generator's parameters.
DELICATE = ["rearc", "decimal_arithmetic", "knights_knaves"]


@pytest.mark.parametrize("family", FAMILIES + DELICATE)
def test_every_gold_answer_earns_full_reward_after_json(family: str) -> None:
    import reasoning_gym

    for entry in reasoning_gym.create_dataset(family, size=20, seed=7):
        metadata = json.loads(json.dumps({"family": family, "entry": pack_entry(entry)}))
        assert verify(problem("reasoning_gym", entry["answer"], metadata), entry["answer"]) == 1.0
        assert verify(problem("reasoning_gym", entry["answer"], metadata), "@") == 0.0


NO_GOLD = ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]


@pytest.mark.parametrize("family", NO_GOLD)
def test_what_a_family_without_gold_answers_cannot_read_is_wrong(family: str) -> None:
    import reasoning_gym

    for entry in reasoning_gym.create_dataset(family, size=3, seed=0):
        assert not entry["answer"]
        asked = problem("reasoning_gym", "", {"family": family, "entry": pack_entry(entry)})
        for answer in ("42", "null", "[1]", "[[]]", "{}", '{"Agent": 1}', "true", "", "(", "1e999"):
            assert verify(asked, answer) == 0.0


def example(family: str, metadata: dict[str, Any]) -> str:
    """A right answer: reasoning-gym's own example, or for two families one that is found here."""
    match family:
        case "graph_color":
            return json.dumps(metadata["possible_answer"])
        case "rubiks_cube":
            return str(metadata["example_correct_answer"])
        case "boxnet":
            return json.dumps([step for colour in ("red", "blue", "green") for step in carried(metadata, colour)])
    return driven_out(metadata["board_config"])


def carried(metadata: dict[str, Any], colour: str) -> list[dict[str, str]]:
    """The steps that bring a box to its target, square by square."""
    squares = {
        item: [float(number) for number in square.split("_")]
        for square, items in metadata["initial_state"].items()
        for item in items
    }
    at, goal = squares[f"box_{colour}"], squares[f"target_{colour}"]
    steps = []
    while at != goal:
        axis = 0 if at[0] != goal[0] else 1
        further = list(at)
        further[axis] += 1 if goal[axis] > at[axis] else -1
        steps.append({f"Agent{at}": f"move(box_{colour}, square{further})"})
        at = further
    return [*steps, {f"Agent{at}": f"move(box_{colour}, target_{colour})"}]


def driven_out(description: str) -> str:
    """The shortest list of moves that solves a rush hour board."""
    from reasoning_gym.games.rush_hour import Board

    names = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len({name for name in description if name.isupper()})]
    boards, seen = [(Board(description), "")], {description}
    for board, moves in boards:
        if board.solved:
            return moves.strip()
        for name in names:
            for step in (1, -1):
                moved = copy.deepcopy(board)
                moved.move(name, step)
                if str(moved) not in seen:
                    seen.add(str(moved))
                    boards.append((moved, f"{moves} {name}{step:+d}"))
    raise AssertionError("no solution")


@pytest.mark.parametrize("family", [family for family in NO_GOLD if family != "propositional_logic"])
def test_a_right_answer_of_a_family_without_gold_answers_earns_full_reward(family: str) -> None:
    import reasoning_gym

    easy = {"min_moves": 1, "max_moves": 5} if family == "rush_hour" else {}
    for entry in reasoning_gym.create_dataset(family, size=3, seed=21, **easy):
        packed = json.loads(json.dumps({"family": family, "entry": pack_entry(entry), "parameters": easy}))
        asked = problem("reasoning_gym", "", packed)
        assert verify(asked, example(family, entry["metadata"])) == 1.0, entry["metadata"]


def test_a_conclusion_is_right_and_a_copied_premise_is_none() -> None:
    import reasoning_gym

    examples = []
    for entry in reasoning_gym.create_dataset("propositional_logic", size=20, seed=3):
        premises = entry["metadata"]["premises"]
        asked = problem("reasoning_gym", "", {"family": "propositional_logic", "entry": pack_entry(entry)})
        copies = [form.format(premise) for premise in premises for form in ("{}", "({})", "{0} ∧ {0}", "¬¬({})")]
        assert not any(verify(asked, copied) for copied in [*copies, " ∧ ".join(premises)])
        examples.append(verify(asked, entry["metadata"]["example_answer"]))
    assert sum(examples) >= 10  # the other examples are premises, too


def test_scorer_uses_the_generators_parameters() -> None:
    # Two decimals asked for: 0.123 and 0.12 are the same answer. Six, the default: they are not.
    import reasoning_gym

    entry = reasoning_gym.create_dataset("decimal_arithmetic", size=1, seed=1)[0] | {"answer": "0.12"}
    packed = {"family": "decimal_arithmetic", "entry": pack_entry(entry)}
    coarse = packed | {"parameters": {"min_num_decimal_places": 1, "max_num_decimal_places": 2}}
    assert verify(problem("reasoning_gym", "0.12", coarse), "0.123") == 1.0
    assert verify(problem("reasoning_gym", "0.12", packed), "0.123") < 1.0


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("game_of_life_halting", ["yes", "?", "TrueFalse"]),  # reasoning-gym's scorer takes any text
        ("complex_arithmetic", ["nan", "nan + nani", "nani"]),
        ("coin_flip", ["0", "0.", "1/7"]),
        ("number_sorting", ["{nan}", "{above}"]),
        ("gsm_symbolic", ["not {gold}", "-{gold}", "{gold}, 98", "98 or {gold}"]),
        ("puzzle24", ["1*2*3*4", "9 + 9 + 9 - 3", "6 + 6 + 6 + 6"]),
    ],
)
def test_answers_that_reasoning_gym_takes_and_that_are_wrong(family: str, wrong: list[str]) -> None:
    import reasoning_gym

    for entry in reasoning_gym.create_dataset(family, size=8, seed=11):
        packed = json.loads(json.dumps({"family": family, "entry": pack_entry(entry)}))
        asked = problem("reasoning_gym", entry["answer"], packed)
        assert verify(asked, entry["answer"]) == 1.0
        numbers = re.findall(r"'(.*?)'", entry["answer"])  # of number_sorting
        forms = {"nan": f"[{', '.join(['NaN'] * len(numbers))}]", "above": [str(float(n) + 0.5) for n in numbers]}
        for text in (form.format(gold=entry["answer"], **forms) for form in wrong):
            assert verify(asked, text) == 0.0, (entry["answer"], text)


@pytest.mark.parametrize(
    "family", ["knights_knaves", "fraction_simplification", "sokoban", "kakurasu", "quantum_lock", "gcd"]
)
def test_the_gold_answer_among_others_is_wrong(family: str) -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(family, size=1, seed=5)[0]
    asked = problem("reasoning_gym", entry["answer"], {"family": family, "entry": pack_entry(entry)})
    gold = entry["answer"]
    for text in ("{} or zebra 7", "zebra 7 or {}", "{}, 7 8", "7 8\n{}", "not {}"):
        assert verify(asked, text.format(gold)) == 0.0, text
    assert verify(asked, gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("3.0517578125e-05", ["1/32768", "3.05e-05"], ["0", "0.0001", "3.1e-05"]),
        ("0.234375", ["15/64", "0.2344"], ["0", "0.2346"]),
        ("0", ["0"], ["0.00001"]),
    ],
)
def test_a_probability_may_be_rounded_to_three_digits(gold: str, right: list[str], wrong: list[str]) -> None:
    asked = problem("reasoning_gym", gold, {"family": "coin_flip", "entry": {"answer": gold}})
    assert [verify(asked, answer) for answer in right] == [1.0] * len(right)
    assert [verify(asked, answer) for answer in wrong] == [0.0] * len(wrong)


def test_part_marks_are_no_verdict() -> None:
    # reasoning-gym gives an answer that contains the gold one its share of the characters: 1 of 2.
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0] | {"answer": "4"}
    packed = {"family": "chain_sum", "entry": pack_entry(entry)}
    assert reasoning_gym.get_score_answer_fn("chain_sum")("-4", entry) == 0.5
    assert verify(problem("reasoning_gym", "4", packed), "-4") == 0.0
    assert verify(problem("reasoning_gym", "4", packed), " 4\n") == 1.0


def test_an_answer_that_a_scorer_cannot_read_is_wrong() -> None:
    # int("2 x two") is a ValueError inside the scorer.
    import reasoning_gym

    entry = reasoning_gym.create_dataset("prime_factorization", size=1, seed=1)[0]
    with pytest.raises(ValueError):
        reasoning_gym.get_score_answer_fn("prime_factorization")("2 × two", entry)
    packed = {"family": "prime_factorization", "entry": pack_entry(entry)}
    assert verify(problem("reasoning_gym", entry["answer"], packed), "2 × two") == 0.0


def test_a_scorer_that_cannot_read_the_gold_answer_either_is_at_fault() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("sudoku", size=1, seed=1)[0]
    gold = entry["answer"]
    del entry["metadata"]
    packed = {"family": "sudoku", "entry": pack_entry(entry)}
    for answer in (gold, "1 2 3"):
        with pytest.raises(KeyError, match="metadata"):
            verify(problem("reasoning_gym", gold, packed), answer)


def test_unknown_family_and_missing_metadata() -> None:
    with pytest.raises(InputError, match="unknown reasoning-gym family 'chain_sums'; close: chain_sum"):
        verify(problem("reasoning_gym", "1", {"family": "chain_sums", "entry": {}}), "1")
    with pytest.raises(InputError, match="needs metadata\\['family'\\]"):
        verify(problem("reasoning_gym", "1"), "1")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"family": ["x"], "entry": {}}, r"problem p1: .*metadata\['family'\], text, not \['x'\]"),
        ({"family": "chain_sum", "entry": 5}, r"metadata\['entry'\], an object, not 5"),
        ({"family": "chain_sum", "entry": {}, "parameters": [1]}, r"metadata\['parameters'\], an object, not \[1\]"),
        ({"family": "chain_sum", "entry": {}, "parameters": {"x": 1}}, "chain_sum does not accept .*'x'"),
        ({"family": "chain_sum", "entry": {}, "parameters": {"max_terms": 0}}, "max_terms must be >= min_terms"),
    ],
)
def test_malformed_metadata_is_said(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        verify(problem("reasoning_gym", "1", metadata), "1")


def test_pack_entry_round_trip() -> None:
    entry = {"grid": ((1, 2), (3,)), "edges": {1: [2, (3, 4)]}, "plain": {"a": [None, 1.5, True]}}
    assert unpack_entry(json.loads(json.dumps(pack_entry(entry)))) == entry


PAYLOADS = [
    "__import__('pathlib').Path('PLANTED').touch()",
    "[__import__('pathlib').Path('PLANTED').touch()]",
    "open('PLANTED', 'w').close() or 24",
    "exec(\"open('PLANTED', 'w')\")",
    "().__class__.__base__.__subclasses__() and __import__('os').system('touch PLANTED')",
    "x**2 + (lambda: open('PLANTED', 'w'))().fileno()",
    "exec('import reasoning_gym; reasoning_gym.PLANTED = 1')",
    "$(touch PLANTED)",
    "\\boxed{$__import__('os').system('touch PLANTED')$}",
]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "PLANTED"


def test_the_payloads_would_work(planted: Path) -> None:
    eval(PAYLOADS[0])
    assert planted.exists()


def test_no_family_runs_a_payload_or_a_field_of_a_data_row(planted: Path) -> None:
    """Gold answers keep full marks, as far as a family gives them; a payload scores nothing and does nothing."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    known = {name: set(vars(module)) for name, module in sys.modules.items() if name.startswith("reasoning_gym")}
    failed = []
    scored: dict[tuple[str, str], float] = {}
    for family in DATASETS:
        if family == "composite":  # only names others
            continue
        entry = reasoning_gym.create_dataset(family, size=1, seed=3)[0]
        packed = {"family": family, "entry": pack_entry(entry)}
        gold = entry["answer"] or ""
        if gold and verify(problem("reasoning_gym", gold, packed), gold) < 1.0:
            failed.append(family)
        for payload in PAYLOADS:
            with contextlib.suppress(EvaluationRefused, *ORDINARY):
                scored[family, payload] = verify(problem("reasoning_gym", gold, packed), payload)
        # The same in every field of the row.
        fields = {n: [PAYLOADS[0]] if isinstance(v, list) else PAYLOADS[0] for n, v in entry["metadata"].items()}
        row = {"answer": PAYLOADS[0], "metadata": fields}
        for answer in (gold or "1", PAYLOADS[0]):
            try:
                verify(problem("reasoning_gym", PAYLOADS[0], {"family": family, "entry": row}), answer)
            except (EvaluationRefused, *ORDINARY):
                pass
        assert not planted.exists(), family
    assert failed == []
    assert scored and not any(scored.values()), {place for place, reward in scored.items() if reward}
    assert not hasattr(reasoning_gym, "PLANTED")
    assert all(not {n for n in vars(sys.modules[m]) if n == "PLANTED"} for m in known)


ORDINARY = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    SyntaxError,
    AssertionError,
    StopIteration,
)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_no_verifier_runs_a_payload(verifier: str, planted: Path) -> None:
    metadata = {"tests": [{"stdin": "", "stdout": "1"}]} if verifier == "code" else {}
    for payload in PAYLOADS:
        for gold, answer in (("24", payload), (payload + "0", payload)):
            reward = 0.0
            with contextlib.suppress(InputError, EvaluationRefused, *ORDINARY):
                reward = verify(problem(verifier, gold, metadata), answer)
            assert reward == 0.0
    assert not planted.exists()


def test_the_guard_refuses_text_and_what_it_might_do(planted: Path) -> None:
    with no_evaluation():
        for attempt in (
            lambda: eval("1 + 1"),
            lambda: exec("x = 1"),
            lambda: compile("1", "", "eval"),
            lambda: planted.write_text("x"),
            lambda: os.system("true"),
            lambda: os.remove("anything"),
        ):
            with pytest.raises(EvaluationRefused):
                attempt()
        assert literal("[1, 2]") == [1, 2]
        with no_evaluation():
            pass
        with pytest.raises(EvaluationRefused):
            eval("1 + 1")
    assert eval("1 + 1") == 2


def test_the_guard_lets_sympys_own_programs_run() -> None:
    # A polynomial's products and a root's formula are programs that sympy writes; unknown functions are named as given.
    import sympy

    x, f = sympy.symbols("x"), sympy.Function("open")
    with no_evaluation() as refusals:
        assert sympy.lambdify(x, x**2 + sympy.sin(x), "mpmath")(0) == 0
        assert abs(float(sympy.CRootOf(x**5 - x - 1, 0)) - 1.1673) < 1e-4
        assert not refusals
        with pytest.raises(EvaluationRefused):
            sympy.lambdify(x, f(x), "math")
        with pytest.raises(EvaluationRefused):
            sympy.Number("5")
        assert len(refusals) == 2


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{x^3-y^3}{x-y}", "x^2+xy+y^2"),
        (r"\frac{\pi^2}{6}", r"\sum_{n=1}^{\infty} \frac{1}{n^2}"),
        (r"\frac13", r"\int_0^1 x^2 dx"),
        ("x>3", r"x\in(3,\infty)"),
        ("f(x)=2x+1", "2x+1"),
        ("007", "7"),
    ],
)
def test_math_is_the_same_under_the_guard(gold: str, answer: str) -> None:
    assert verify(problem("math", gold), answer) == 1.0
    assert verify(problem("math", gold), answer + "+1") == 0.0


@pytest.mark.parametrize(
    "text", ["5", "0", "1.5", ".5", "5.", "1e3", "2E-5", "12345678901234567890123", "0.12345678901234567890"]
)
def test_a_numeral_is_sympys_number(text: str) -> None:
    import sympy

    assert numeral(text) == sympy.Number(text) and type(numeral(text)) is type(sympy.Number(text))
    for wrong in ("", "x", "1_0", "0x1", "1.2.3", "5()", "nan", "٣"):
        with pytest.raises(ValueError):
            numeral(wrong)


def test_expressions_are_read_without_being_evaluated() -> None:
    assert arithmetic("(1 + 2) * 3 - 4 / 8") == 8.5
    assert whole("(0x10 << 2) | ~0x3 & 0xff") == 252 | 64
    assert exact_integer("6 * 8 / 2") == 24
    assert str(symbolic("x**2*sin(x) - 2*C")) == "-2*C + x**2*sin(x)"
    for read, text in (
        (exact_integer, "49 / 2"),
        (arithmetic, "9**9**9"),
        (arithmetic, "1 / 0"),
        (arithmetic, "2 ** 0.5"),
        (arithmetic, "x + 1"),
        (arithmetic, "(" * 5000 + "1"),
        (whole, "1 << 100000"),
        (symbolic, "x.__class__"),
        (symbolic, "getattr(x, y)"),
        (symbolic, "x[0]"),
        (symbolic, "__import__"),
        (symbolic, "'x'"),
        (symbolic, "(lambda: 1)()"),
        (symbolic, "x**10**9"),
        (literal, "[].append(1)"),
    ):
        with pytest.raises(ValueError):
            read(text)
