"""Prompts that state their answer, and prompts that only look like it."""

from __future__ import annotations

import time

import pytest

from tasks.problems.answer_leaks import states_answer
from tasks.problems.load import load
from tasks.problems.sources import ReasoningGymSource


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("What is 6 * 7? The answer is 42.", "42"),
        ("What is 6 * 7?\nAnswer: 42", "42"),
        ("What is 6 * 7?\n**Answer:** 42", "42"),
        ("What is 6 * 7?\n**Answer**: **42**", "42"),
        ("What is 6 * 7? answer:\n42\n", "42"),
        ("Which one?\n(A) 1 (B) 2\nFINAL ANSWER: b (see page 3)", "B"),
        ("6 * 7 => 42", "42"),
        ("6 * 7 #### 42", "42"),
        (r"Show that it is \boxed{42}.", "42"),
        (r"It is \boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        (r"\boxed{\text{C}}", "C"),
        ("What? <answer>\n42\n</answer>", "42"),
        ("How far? Answer: 42 km", "42"),
        ("How much? Answer: 42%", "42"),
        ("How many? The answer is 1,234,567", "1234567"),
        ("Answer: $-5$", "-5"),
        ("Answer: (C)", "C"),
        ("Answer: 1, 2", "(1, 2)"),
        ("What comes of it? Answer: #A B", "#A B"),
        ("Answer: \u22125", "-5"),
        ("Who? Answer: the Danube", "The Danube"),
        ("Was ist 6 * 7? Die Antwort lautet 42.", "42"),
        ("Lösung: 42", "42"),
        ("Combien ? Réponse : 42", "42"),
        ("La respuesta es 42.", "42"),
        ("La risposta è 42.", "42"),
        ("Resposta: 42", "42"),
        ("Het antwoord is 42.", "42"),
        ("Ответ: 42", "42"),
        ("6乘7是多少？答案是42。", "42"),
        ("答え：42", "42"),
        ("정답은 42", "42"),
        ("The answer is not 7. The answer is 42.", "42"),
        ("Answer: 7, for B the answer is 42.", "42"),
    ],
)
def test_stated(prompt: str, answer: str) -> None:
    assert states_answer(prompt, answer)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("There are 42 hens. How many hens are there?", "42"),  # a number of the question
        ("What is 6 * 7?\nAnswer:", "42"),
        ("What is 6 * 7? The answer is 420.", "42"),  # not the token 42
        ("What is 6 * 7? The answer is 42.5", "42"),
        ("The answer is 42 more than x. What is x?", "42"),
        ("The answer is 42 + 1.", "42"),
        ("Is it so? Answer: yes or no.", "yes"),
        ("Is it so? Answer: yes/no", "yes"),
        ("Answer: A, B, C or D", "A"),
        ("Answer: A B", "A"),  # one more word is a unit only behind a number
        ("Is the answer: 42? Say why.", "42"),
        ("Somebody claims the answer is 42? Say why.", "42"),
        (r"Put the answer in \boxed{}.", "42"),
        ("Reply in the form <answer>...</answer>.", "42"),
        ("Answer in one word: is 42 even?", "even"),
        ("for x >= 42", "42"),
        ("The answer must be even. 42", "42"),
        ("What comes of it? Answer: #A B", "A# B"),  # signs count
        ("Answer: 42", ""),
        ("Answer: ", "..."),
        ("", "42"),
    ],
)
def test_not_stated(prompt: str, answer: str) -> None:
    assert not states_answer(prompt, answer)


@pytest.mark.parametrize("family", ["chain_sum", "word_sorting", "ab", "syllogism", "family_relationships"])
def test_generated_problems_state_nothing(family: str) -> None:
    for problem in load(ReasoningGymSource(family=family, count=100), seed=0).problems:
        assert not states_answer(problem.text, problem.answer)
        assert not problem.answer or states_answer(f"{problem.text}\nAnswer: {problem.answer}", problem.answer)


@pytest.mark.parametrize("hostile", ["=> ", "answer is ", r"\boxed{", "<answer>", "answer:" + " " * 50, "#", "("])
def test_four_times_the_prompt_takes_about_four_times_as_long(hostile: str) -> None:
    def seconds(repeats: int) -> float:
        began = time.process_time()
        assert not states_answer(hostile * repeats, "42")
        return time.process_time() - began

    few, many = (min(seconds(repeats) for _ in range(3)) for repeats in (2000, 8000))
    assert many < 10 * few + 0.01  # were it quadratic: 16 times
