r"""Leaks: prompts that give their answer away, through a solution or key left in them.

A leak is the reference answer after words or signs that announce an answer: "Answer: 12", "die Antwort ist 12",
"=> 12", "#### 12", "\boxed{12}", "<answer>12</answer>". The whole announced text must be the answer: "Answer: yes or
no" is no leak, nor is "the answer is 12 more than x". A number that merely occurs in the question is no leak.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# All patterns below are applied to lower-case text.
_NOUNS = (
    r"\b(?:answer|solution|antwort|lösung|réponse|respuesta|solución|risposta|soluzione|resposta|solução|antwoord"
    r"|oplossing|ответ)\b|答案|答え|正解|정답"
)
_VERBS = r"\b(?:is|are|ist|lautet|sind|est|es|è|é)\b|[是为為はが은는]"
_MARKUP = r"[\s*_`]*"
_ANNOUNCED = re.compile(
    rf"(?:(?:{_NOUNS}){_MARKUP}(?:(?:{_VERBS})(?:\s*[:：])?|[:：=])|=>|[⇒⟹]|\#{{4}}){_MARKUP}([^\n]{{0,400}})"
)
_ENCLOSED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}|<answer>(.{0,400}?)</answer>", re.DOTALL)
_END = re.compile(r"[.!;](?=\s|$)|[。！；]| \(")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*(?=\{)")
_TOKEN = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[^\w\s]")  # signs are tokens too: "A#" is not "#A"
_NUMBER = re.compile(r"-?\d[\d.]*\Z")
_AROUND = " \t\n*_`$\"'“”.,:;!"


def states_answer(prompt: str, answer: str) -> bool:
    """Whether the prompt announces exactly this answer, ignoring case. A number may be followed by its unit."""
    answer_tokens, prompt = _tokens(_plain(answer)), _plain(prompt)
    if not answer_tokens or answer_tokens[0] not in prompt:  # cheap, and true for most prompts
        return False
    return any(_is_answer(_tokens(stated), answer_tokens) for stated in _stated(prompt))


def _stated(prompt: str) -> Iterator[str]:
    """Every text that the prompt announces as an answer."""
    for enclosed in _ENCLOSED.finditer(prompt):
        yield enclosed[1] or enclosed[2] or ""
    start = 0
    while match := _ANNOUNCED.search(prompt, start):
        clause = _END.split(match[1].strip(_AROUND), maxsplit=1)[0]
        if "?" not in clause and "？" not in clause:
            yield clause
        start = match.start(1)  # one line may announce two answers


def _plain(text: str) -> str:
    return _THOUSANDS.sub("", _TEXT_COMMAND.sub("", text.replace("\u2212", "-"))).lower()


def _tokens(text: str) -> list[str]:
    text = text.strip(_AROUND)
    if text[:1] + text[-1:] in ("()", "[]", "{}"):
        text = text[1:-1].strip(_AROUND)
    return _TOKEN.findall(text)


def _is_answer(stated: list[str], answer_tokens: list[str]) -> bool:
    if stated == answer_tokens:
        return True
    unit = stated[len(answer_tokens) :]
    return (
        stated[: len(answer_tokens)] == answer_tokens
        and len(unit) == 1
        and (unit[0].isalpha() or unit[0] in "%°€£¥")
        and bool(_NUMBER.match("".join(answer_tokens)))
    )
