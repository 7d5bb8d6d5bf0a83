"""Small files in the shapes of known test sets."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GSM8K = [
    {"question": "Ann has 3 pens and buys 4 more. How many has she?", "answer": "3 + 4 = <<3+4=7>>7.\n#### 7"},
    {"question": "A farm sells 1,200 eggs twice. How many eggs?", "answer": "1,200 * 2 = 2,400\n#### 2,400"},
]
MATH500 = [
    {
        "problem": "What is half of one?",
        "solution": r"It is \boxed{\frac{1}{2}}.",
        "answer": r"\frac{1}{2}",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/1.json",
    }
]
AIME = [{"problem_idx": 1, "problem": "Find the remainder of 2^10 by 1000.", "answer": 24}]
GPQA = [
    {
        "Question": f"Which number is {number}?",
        "Correct Answer": str(number),
        "Incorrect Answer 1": "-1\n",
        "Incorrect Answer 2": "-2",
        "Incorrect Answer 3": "-3",
    }
    for number in range(40)
]
STDIN_TESTS = [{"input": "3\n", "output": "6\n", "testtype": "stdin"}]
FUNCTION_TESTS = [{"input": '[1, 2]\n"x"', "output": "true", "testtype": "functional"}]


def packed(tests: list[dict[str, str]]) -> str:
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


LIVECODEBENCH = [
    {
        "question_content": "Double the number.",
        "starter_code": "",
        "public_test_cases": json.dumps(STDIN_TESTS),
        "private_test_cases": packed([{"input": "5\n", "output": "10\n", "testtype": "stdin"}]),
        "metadata": "{}",
    },
    {
        "question_content": "Is the list not empty?",
        "starter_code": "class Solution:\n    def full(self, items, name):\n",
        "public_test_cases": json.dumps(FUNCTION_TESTS),
        "private_test_cases": "",
        "metadata": json.dumps({"func_name": "full"}),
    },
]
IFEVAL = [
    {
        "key": 1,
        "prompt": "Write at least 3 words without the word cat, and end with Done.",
        "instruction_id_list": [
            "length_constraints:number_words",
            "keywords:forbidden_words",
            "startend:end_checker",
        ],
        "kwargs": [{"relation": "at least", "num_words": 3}, {"forbidden_words": ["cat"]}, {"end_phrase": "Done."}],
    },
    {
        "key": 2,
        "prompt": "Answer with two responses.",
        "instruction_id_list": ["combination:two_responses"],
        "kwargs": [{}],
    },
]
SHAPES: Mapping[str, list[dict[str, Any]]] = {
    "gsm8k": GSM8K,
    "math500": MATH500,
    "aime2024": AIME,
    "gpqa_diamond": GPQA,
    "livecodebench": LIVECODEBENCH,
    "ifeval": IFEVAL,
}


def write_set(folder: Path, name: str) -> Path:
    """The file of a known set's shape."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in SHAPES[name]))
    return path
